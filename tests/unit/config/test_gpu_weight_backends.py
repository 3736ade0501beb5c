"""The back ends of weight updates that need GPUs: refused in one line where there are none."""

import importlib.util

import pytest

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, TransferSettings
from rlcore.checkpoint_engine.kimi import KimiCheckpointEngine
from rlcore.checkpoint_engine.nccl import NcclCheckpointEngine
from rlcore.config import load_config
from rlcore.config.load import examine
from rlcore.config.rules_devices import count_gpus
from rlcore.config.rules_weights import weight_backend_can_run
from rlcore.errors import ConfigError
from rlcore.testing.unchecked import unchecked_config

ENGINE = "actor_rollout_ref.rollout.checkpoint_engine."
BACKEND = f"{ENGINE}backend"


@pytest.mark.parametrize(
    ("backend", "num_gpus", "reason"),
    [
        ("nccl", 0, "it needs 2 GPUs or more, and this host has no NVIDIA device"),
        ("nccl", 1, "it needs 2 GPUs or more, and this host has 1"),
        ("kimi_ckpt_engine", 0, "it needs a GPU, and this host has no NVIDIA device"),
    ],
)
def test_a_host_without_gpus_refuses_them(backend, num_gpus, reason):
    config = unchecked_config({BACKEND: backend})
    (problem,) = weight_backend_can_run(config, num_gpus)
    assert (problem.path, problem.value, problem.reason) == (BACKEND, backend, reason)
    assert problem.fix == "set it to shm, or ray.address to a cluster with GPUs"
    is_package_there = importlib.util.find_spec("checkpoint_engine") is not None
    enough = list(weight_backend_can_run(config, 2))
    if backend == "nccl" or is_package_there:
        assert enough == []
    else:
        assert [p.fix for p in enough] == ["pip install 'rollflow[kimi]', or set it to shm"]


@pytest.mark.parametrize("backend", ["nccl", "kimi_ckpt_engine"])
def test_before_anything_starts_one_line_says_so(backend):
    problems = examine("grpo-tiny", [f"{BACKEND}={backend}"]).problems
    assert problems == list(weight_backend_can_run(unchecked_config({BACKEND: backend})))
    if count_gpus() == 0:  # as on the machines of CI
        with pytest.raises(ConfigError) as refused:
            load_config("grpo-tiny", [f"{BACKEND}={backend}"])
        text = str(refused.value)
        assert text.count(BACKEND) == 1
        assert all(part in text for part in (backend, "no NVIDIA device", "set it to shm"))


def test_a_cluster_elsewhere_may_have_gpus():
    found = examine("grpo-tiny", [f"{BACKEND}=nccl", "ray.address=auto"]).problems
    assert [p for p in found if p.path == BACKEND] == []


def test_settings_are_those_of_the_backend():
    found = examine(
        "grpo-tiny",
        [
            f"{BACKEND}=kimi_ckpt_engine",
            f"+{ENGINE}engine_kwargs.kimi_ckpt_engine.mem_fraction=2",
            f"+{ENGINE}engine_kwargs.kimi_ckpt_engine.colour=red",
        ],
    ).problems
    reasons = {p.path.removeprefix(f"{ENGINE}engine_kwargs."): p.reason for p in found}
    assert "above 0 and at most 1" in reasons["kimi_ckpt_engine.mem_fraction"]
    assert "has no such setting" in reasons["kimi_ckpt_engine.colour"]


def test_a_replica_of_several_processes_refuses_them():
    tensor = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    vllm = "actor_rollout_ref.rollout.name=vllm"
    for backend in ("nccl", "kimi_ckpt_engine"):
        found = examine("grpo-tiny", [vllm, tensor, f"{BACKEND}={backend}"]).problems
        (problem,) = [p for p in found if p.path == BACKEND]
        assert "it sends to one process of a replica" in problem.reason


@pytest.mark.parametrize(
    ("name", "engine"),
    [("nccl", NcclCheckpointEngine), ("kimi_ckpt_engine", KimiCheckpointEngine)],
)
def test_a_build_of_torch_for_cpus_refuses_them(name, engine):
    assert CHECKPOINT_ENGINES.get(name) is engine
    with pytest.raises(ConfigError, match=f"^checkpoint_engine.backend={name}: [^\n]*$"):
        engine(TransferSettings())
