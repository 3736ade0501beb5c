"""Two training ranks as Ray actors: one batch divided, and a group that dies together."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.cluster.queue_host import start_queue_host, stop_queue_host
from rlcore.cluster.training_worker import start_training_group
from rlcore.config import load_config
from rlcore.errors import ActorUnavailableError
from rlcore.testing.tiny_model import build_tiny_model
from rlcore.types import CallKey, SampledBatch

pytestmark = [pytest.mark.integration, pytest.mark.training_runs]
RUN = "ranks-run"
TRAIN = f"{RUN}/train"


@pytest.fixture
def queue(ray_session):
    host = start_queue_host(RUN, 1)
    yield host
    stop_queue_host(RUN, 1)


@pytest.fixture
def config(tmp_path: Path):
    build_tiny_model(tmp_path / "model", num_layers=2, width=32)
    return load_config(
        "grpo-tiny",
        {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
            "trainer.n_gpus_per_node": 2,
            "ray.num_threads": 2,
        },
    )


def put_batch(host) -> SampledBatch:
    keys = [f"u{i // 4}_{i % 4}_0" for i in range(16)]
    lengths = [1 + i % 5 for i in range(16)]
    rows = [
        {
            "prompts": np.arange(4, 10) + i // 4,
            "responses": np.arange(5, 5 + length),
            "response_mask": np.ones(length, dtype=np.int64),
            "rollout_log_probs": np.full(length, -4.5, dtype=np.float32),
        }
        for i, length in enumerate(lengths)
    ]
    host.put_rows(1, TRAIN, keys, rows, [{} for _ in keys])
    advantages = [torch.full((length,), i % 4 - 1.5) for i, length in enumerate(lengths)]
    QueueClient(deadline_s=20).put(TRAIN, keys, {"advantages": advantages})
    tags = [{"uid": key[:2], "seq_len": 6 + n} for key, n in zip(keys, lengths, strict=True)]
    return SampledBatch(
        lease_id="l1", global_step=1, inner_step=0, uids=["u0", "u1", "u2", "u3"],
        keys=keys, tags=tags, metrics={},
    )  # fmt: skip


def key(step: int, phase: str, attempt: int = 1) -> CallKey:
    return CallKey(run_id=RUN, attempt=attempt, global_step=step, phase=phase)


def step(group, batch, number: int, attempt: int = 1) -> dict[str, float]:
    group.compute_log_prob(key(number, "old", attempt), TRAIN, batch)
    return group.update_actor(key(number, "update", attempt), TRAIN, batch)


def dies(handle, within_s: float = 20.0) -> bool:
    """Whether the actor's process goes away; a kill returns before it is gone."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        try:
            ray.get(handle.state.remote(), timeout=within_s)
        except RayActorError:
            return True
        time.sleep(0.1)
    return False


def test_a_group_that_lost_a_rank_ends_and_its_successor_has_the_same_weights(
    queue, config, tmp_path
):
    batch = put_batch(queue)
    group = start_training_group(config, run_id=RUN, attempt=1, folder=tmp_path)
    balance = group.balance_metrics(batch)
    assert balance["global_seqlen/balanced_min"] >= balance["global_seqlen/min"]
    assert balance["global_seqlen/minmax_diff"] > 0
    assert step(group, batch, 1)["actor/optimizer_steps"] == 4
    columns = QueueClient(deadline_s=20).get(TRAIN, batch.keys, ["old_log_probs", "responses"])
    assert all(len(a) == len(b) for a, b in zip(*columns.values(), strict=True))
    group.save_checkpoint(key(1, "save"), tmp_path / "saved")
    step(group, batch, 2)
    undisturbed = group.publish_weights(key(2, "publish")).checksum
    group.load_checkpoint(key(2, "load"), tmp_path / "saved")

    failed: list[Exception] = []

    def update() -> None:
        try:
            for number in range(2, 10_000):
                step(group, batch, number)
        except ActorUnavailableError as error:
            failed.append(error)

    updating = threading.Thread(target=update)
    updating.start()
    ray.kill(group.handles[1])
    updating.join(60)
    assert len(failed) == 1 and "trainer rank 1" in str(failed[0])
    for handle in group.handles:
        assert dies(handle)

    second = start_training_group(config, run_id=RUN, attempt=2, folder=tmp_path)
    second.load_checkpoint(key(1, "load", attempt=2), tmp_path / "saved")
    step(second, batch, 2, attempt=2)
    assert second.publish_weights(key(2, "publish", attempt=2)).checksum == undisturbed
    second.stop()
