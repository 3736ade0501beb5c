"""The training worker as a Ray actor: rows from the queue, weights to shared memory."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.cluster.queue_host import start_queue_host, stop_queue_host
from rlcore.cluster.training_worker import TrainingGroup, start_training_group
from rlcore.config import RunConfig, load_config
from rlcore.errors import ConfigError, FencedError, TrainingGroupLostError
from rlcore.testing.tiny_model import build_tiny_model
from rlcore.trainer.advantage import AdvantageSpec, compute_advantage
from rlcore.types import CallKey, SampledBatch

pytestmark = pytest.mark.integration
RUN = "training-run"
TRAIN = f"{RUN}/train"


@dataclass
class Bench:
    config: RunConfig
    group: TrainingGroup
    folder: Path
    queue: QueueClient
    batch: SampledBatch


@pytest.fixture(scope="module")
def bench(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build_tiny_model(folder / "model", num_layers=1, width=32)
    correction = "algorithm.rollout_correction."
    config = load_config(
        "grpo-tiny",
        {
            "actor_rollout_ref.model.path": str(folder / "model"),
            "ray.num_threads": 1,
            f"{correction}rollout_is": "token",
            f"{correction}rollout_rs": "token_k1",
            f"{correction}rollout_rs_threshold": 1.5,
        },
    )
    host = start_queue_host(RUN, 1)
    group = start_training_group(config, run_id=RUN, attempt=1, folder=folder)
    keys = [f"u{i // 4}_{i % 4}_0" for i in range(16)]
    rows = [
        {
            "prompts": np.arange(4, 10) + i // 4,
            "responses": np.arange(5, 6 + i % 3),
            "response_mask": np.ones(1 + i % 3, dtype=np.int64),
            "rollout_log_probs": np.full(1 + i % 3, -4.5, dtype=np.float32),
            "rm_scores": np.arange(1 + i % 3, dtype=np.float32),
        }
        for i in range(16)
    ]
    host.put_rows(1, TRAIN, keys, rows, [{} for _ in keys])
    tags = [
        {"uid": key[:2], "session_id": i % 4, "reward": float(i % 4), "seq_len": 7 + i % 3}
        for i, key in enumerate(keys)
    ]
    batch = SampledBatch(
        lease_id="l1", global_step=1, inner_step=0, uids=["u0", "u1", "u2", "u3"],
        keys=keys, tags=tags, metrics={},
    )  # fmt: skip
    yield Bench(config, group, folder, QueueClient(deadline_s=20), batch)
    group.stop()
    stop_queue_host(RUN, 1)


def call_key(phase: str, step: int = 1) -> CallKey:
    return CallKey(run_id=RUN, attempt=1, global_step=step, phase=phase)


def test_a_step_on_rows_of_the_queue(bench: Bench, tmp_path: Path):
    group, queue, batch = bench.group, bench.queue, bench.batch
    before = group.publish_weights(call_key("update_weights", step=0))
    metrics = group.compute_log_prob(call_key("compute_old_log_probs"), TRAIN, batch)
    columns = queue.get(TRAIN, batch.keys, ["old_log_probs", "entropy", "responses"])
    assert [len(row) for row in columns["old_log_probs"]] == [1 + i % 3 for i in range(16)]
    assert metrics["actor/entropy"] == pytest.approx(torch.cat(columns["entropy"]).mean().item())
    gap = (-4.5 - torch.cat(columns["old_log_probs"])).mean().item()
    assert metrics["rollout_corr/kl"] == pytest.approx(gap, rel=1e-4)
    spec = AdvantageSpec.from_config(bench.config)
    corrected = compute_advantage(queue, TRAIN, batch, spec)
    written = ["advantages", "train_mask", "rollout_is_weights", "old_log_probs"]
    columns = queue.get(TRAIN, batch.keys, written)
    # scores 0, 1, 2, 3: deviations from 1.5 over sqrt(5 / 3)
    assert columns["advantages"][0][0].item() == pytest.approx(-1.5 / (5 / 3) ** 0.5, rel=1e-4)
    ratio = (torch.cat(columns["old_log_probs"]) + 4.5).exp()
    kept = (ratio >= 1 / 1.5) & (ratio <= 1.5)
    assert torch.cat(columns["train_mask"]).bool().tolist() == kept.tolist()
    weights = torch.cat(columns["rollout_is_weights"])
    assert torch.allclose(weights, ratio.clamp(max=2) * kept)
    rejected = corrected["rollout_corr/rollout_rs_masked_fraction"]
    assert rejected == pytest.approx(1 - kept.float().mean().item())
    updated = group.update_actor(call_key("update_actor"), TRAIN, batch)
    assert updated["actor/optimizer_steps"] == 1 and updated["actor/grad_norm"] > 0
    assert group.update_actor(call_key("update_actor"), TRAIN, batch) == updated
    after = group.publish_weights(call_key("update_weights"))
    assert (before.version, after.version) == (0, 1) and before.checksum != after.checksum
    assert dict(read_tensors(after))["model.norm.weight"].dtype == torch.float32
    group.save_checkpoint(call_key("save_checkpoint"), tmp_path / "actor")
    group.load_checkpoint(call_key("load_checkpoint"), tmp_path / "actor")
    group.export_hf(call_key("export"), tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    assert group.state()["applied"] == (1, 0) and group.state()["num_threads"] == 1
    lengths = group.balance_metrics(batch)
    # one rank has all tokens, as they came and balanced
    assert {lengths[f"global_seqlen/{n}"] for n in ("min", "max", "balanced_max", "mean")} == {127}


def test_errors_arrive_as_ours(bench: Bench):
    other = CallKey(run_id="another", attempt=1, global_step=1)
    with pytest.raises(FencedError, match="belongs to run training-run"):
        bench.group.publish_weights(other)


def test_a_given_up_try_is_refused(bench: Bench):
    key = call_key("update_actor", step=2)
    ray.get([handle.give_up.remote(key) for handle in bench.group.handles])
    with pytest.raises(FencedError, match="or this one given up"):
        bench.group.update_actor(key, TRAIN, bench.batch)


def test_a_damaged_model_is_the_users_error(bench: Bench, tmp_path: Path):
    build_tiny_model(tmp_path / "model", num_layers=1, width=32)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    config = load_config(
        "grpo-tiny", {"actor_rollout_ref.model.path": str(tmp_path / "model"), "ray.num_threads": 1}
    )
    with pytest.raises(ConfigError, match=r"model.path=.*: the model cannot be loaded: Safetensor"):
        start_training_group(config, run_id="another", attempt=1, folder=tmp_path)


def test_a_new_group_takes_the_place_of_one_whose_rank_died(bench: Bench, tmp_path: Path):
    group, key = bench.group, call_key("update_weights", step=2)
    group.save_checkpoint(call_key("save_snapshot", step=2), tmp_path / "actor")
    before = group.publish_weights(key)
    copy = group.with_deadline(60)
    pid = ray.get(group.handles[0].__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        TrainingGroupLostError, match="all its ranks are ended: trainer rank 0: state"
    ):
        group.state()
    group.stop()
    assert not Path(before.path).exists()
    group.become(start_training_group(bench.config, run_id=RUN, attempt=1, folder=tmp_path))
    group.load_checkpoint(call_key("restore_training", step=2), tmp_path / "actor")
    assert (group.state()["applied"], group.state()["weight_version"]) == ((1, 0), before.version)
    after = group.publish_weights(key)
    assert (after.version, after.checksum) == (before.version, before.checksum)
    # The first try of a phase is admitted again: the new ranks have seen none.
    assert group.update_actor(call_key("update_actor"), TRAIN, bench.batch)
    with pytest.raises(TrainingGroupLostError, match="trainer rank 0: state"):
        copy.state()


def test_a_group_that_does_not_answer_in_time_is_lost(bench: Bench):
    pid = ray.get(bench.group.handles[0].__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TrainingGroupLostError, match=r"rank 0: state did not answer within 1 s"):
        bench.group.with_deadline(1).state()
    bench.group.stop()
    gone, _ = psutil.wait_procs([p for p in psutil.process_iter() if p.pid == pid], timeout=10)
    assert not psutil.pid_exists(pid), gone


def test_a_dead_worker_is_named_and_its_segment_removed(bench: Bench):
    fresh = start_training_group(bench.config, run_id=RUN, attempt=1, folder=bench.folder)
    bench.group.become(fresh)
    meta = bench.group.publish_weights(call_key("update_weights", step=2))
    bench.group.stop()
    assert not Path(meta.path).exists()
    with pytest.raises(TrainingGroupLostError, match="trainer rank 0: state"):
        bench.group.state()
