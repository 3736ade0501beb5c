"""A tiny model on disk and batches of rows for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore.testing.tiny_model import build_tiny_model
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.types import CallKey


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow beside other busy processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, num_layers=2, width=64)
    return str(folder)


@pytest.fixture(scope="session")
def teacher_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another size and other weights, the same tokenizer, far from uniform."""
    folder = tmp_path_factory.mktemp("teacher")
    build_tiny_model(folder, num_layers=1, width=32, seed=7, spread=0.3)
    return str(folder)


@pytest.fixture
def make_spec(model_path: str, tmp_path: Path):
    def make(**changes) -> TrainingSpec:
        values = {
            "run_id": "run",
            "attempt": 1,
            "folder": str(tmp_path / "run"),
            "model_path": model_path,
            "learning_rate": LearningRate(peak=1e-3),
            "dtype": "float32",
            "mini_batch_groups": 3,
        }
        return TrainingSpec(**{**values, **changes})

    return make


@pytest.fixture
def make_key():
    def make(step: int, **changes) -> CallKey:
        return CallKey(run_id="run", attempt=1, global_step=step, **changes)

    return make


@pytest.fixture
def make_rows():
    """Three groups of ragged rows that begin alike; every third token is not the policy's."""

    def make(seed: int = 0, num_groups: int = 3, per_group: int = 3):
        generator = torch.Generator().manual_seed(seed)

        def tokens(low: int, high: int) -> torch.Tensor:
            count = int(torch.randint(low, high, (1,), generator=generator))
            return torch.randint(4, 60, (count,), generator=generator)

        names = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
        rows = {name: [] for name in names}
        groups = []
        start = tokens(4, 5)
        for group in range(num_groups):
            prompt = torch.cat([start, tokens(2, 6)])
            for _ in range(per_group):
                response = tokens(1, 9)
                count = len(response)
                rows["prompts"].append(prompt)
                rows["responses"].append(response)
                rows["response_mask"].append((torch.arange(count) % 3 != 1).long())
                rows["old_log_probs"].append(-4 - torch.rand(count, generator=generator))
                sign = torch.randn(1, generator=generator)
                rows["advantages"].append(sign.expand(count).clone())
                groups.append(f"prompt{group}")
        return rows, groups

    return make
