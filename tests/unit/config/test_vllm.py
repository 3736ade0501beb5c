"""The engine vllm in a configuration: what it needs and what it cannot do."""

import pytest

from rlcore.config.load import examine

A = "actor_rollout_ref.rollout."
NAME = f"{A}name=vllm"
LORA = "actor_rollout_ref.model.lora.merge"


def problems_of(*overrides):
    found = {p.path: p for p in examine("grpo-tiny", [NAME, *overrides]).problems}
    found.pop(f"{A}name", None)  # vLLM need not be here
    return found


@pytest.mark.parametrize(
    ("overrides", "path", "reason", "fix"),
    [
        ([f"{A}full_determinism=true"], f"{A}full_determinism", "last bits", "transformers"),
        ([f"{A}temperature=3"], f"{A}temperature", "up to 2", "2 at most"),
        (
            [f"{A}val_kwargs.do_sample=true", f"{A}val_kwargs.temperature=2.5"],
            f"{A}val_kwargs.temperature", "up to 2", "2 at most",
        ),
        (
            ["actor_rollout_ref.model.lora_rank=4", f"{LORA}=false"],
            LORA, "takes whole weights", "transformers",
        ),
        (
            [f"{A}checkpoint_engine.backend=gloo", f"{A}tensor_model_parallel_size=2"],
            f"{A}checkpoint_engine.backend", "2 x data_parallel_size 1 = 2", "shm",
        ),
    ],
)  # fmt: skip
def test_what_vllm_cannot_do_is_refused(overrides, path, reason, fix):
    (problem,) = problems_of(*overrides).values()
    assert problem.path == path
    assert reason in problem.reason
    assert fix in problem.fix
    embedded = examine("grpo-tiny", [f"{A}name=transformers", *overrides]).problems
    assert [p for p in embedded if p.path == path] == []


def test_what_vllm_can_do_is_taken():
    assert problems_of(f"{A}temperature=2", f"{A}tensor_model_parallel_size=2") == {}


@pytest.mark.vllm
def test_where_vllm_is_installed_it_can_be_chosen():
    assert examine("grpo-tiny", [NAME]).problems == []
