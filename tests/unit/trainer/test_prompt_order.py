"""The trainer's phases feed an order that follows from results, and a checkpoint continues it."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from rlcore.data.parquet import write_rows
from rlcore.errors import DataError
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.base import PPOTrainer, TrainerResources
from rlcore.trainer.phases import ADD_BATCH, BATCH_PHASES, run_phase
from rlcore.trainer.prompt_source import PromptSource
from rlcore.types import BatchRef, CallKey, SampledBatch

STEPS = 6


class RecordingLedger:
    """Takes prompts once each, leases the last ones; row r is solved in r % 3 of 2 sessions."""

    def __init__(self):
        self.fed = {}
        self.last = []

    def feed(self, key, specs):
        new = [spec for spec in specs if spec.uid not in self.fed]
        self.fed |= {spec.uid: spec for spec in specs}
        self.last = specs
        return len(new)

    def leased(self, lease_id):
        tags = [
            {
                "uid": spec.uid, "session_id": i, "reward": 0.0, "prompt_len": 1,
                "response_len": 1, "seq_len": 2,
                "reward_extra": {"acc": float(i < spec.index % 3)},
            }
            for spec in self.last
            for i in range(2)
        ]  # fmt: skip
        return SampledBatch(
            lease_id=lease_id, global_step=1, inner_step=0, uids=[s.uid for s in self.last],
            keys=[f"{tag['uid']}_{tag['session_id']}_0" for tag in tags], tags=tags, metrics={},
        )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_root(tmp_path_factory):
    return tmp_path_factory.mktemp("order")


@pytest.fixture
def config(tiny_root, tmp_path):
    rows = pq.read_table(tiny_config(tiny_root).data.train_files[0]).to_pylist()[:8]
    write_rows(tmp_path / "train.parquet", rows)
    return tiny_config(
        tiny_root,
        {
            "data.train_files": str(tmp_path / "train.parquet"),
            "data.sampler.class_name": "success_rate",
            "trainer.total_epochs": 3,
            "trainer.total_training_steps": STEPS,
        },
    )


def make_trainer(config, ledger):
    resources = TrainerResources(
        folder=SimpleNamespace(run_id="r", path=Path("r")),
        attempt=1,
        ledger=ledger,
        training=None,
        checkpoint_manager=None,
    )
    return PPOTrainer(config, resources)


def take(trainer, phase, batch=None, try_number=1):
    """Run a phase and apply its state, as the driver does."""
    key = CallKey(
        run_id="r", attempt=1, global_step=trainer.global_steps, phase=phase.name,
        try_number=try_number,
    )  # fmt: skip
    trainer.state = run_phase(trainer, phase, key, batch, deadline_s=60).state


def step(trainer):
    trainer.global_steps += 1
    before = json.loads(json.dumps(trainer.state))
    take(trainer, ADD_BATCH)
    fed = len(trainer.ledger.fed)
    # The executor died after it had fed, and its state was lost: fed again, nothing is new.
    trainer.state = before
    take(trainer, ADD_BATCH, try_number=2)
    assert len(trainer.ledger.fed) == fed == 4 * trainer.global_steps
    batch = BatchRef(
        run_id="r", global_step=trainer.global_steps, inner_step=0, lease_id="l", num_prompts=4,
        num_trajectories=8,
    )  # fmt: skip
    take(trainer, BATCH_PHASES[0], batch)


def test_a_checkpoint_at_any_step_continues_the_curriculum(config):
    whole = RecordingLedger()
    trainer = make_trainer(config, whole)
    saved = []
    for _ in range(STEPS):
        step(trainer)
        saved.append({"global_step": trainer.global_steps, "state": dict(trainer.state)})
    # The first epoch has every row once, the others follow from what was solved.
    rows = [spec.index for spec in whole.fed.values()]
    assert sorted(rows[:8]) == list(range(8))
    assert sorted(rows[8:16]) != list(range(8))
    for content in saved[:-1]:
        ledger = RecordingLedger()
        resumed = make_trainer(config, ledger)
        resumed.restore(json.loads(json.dumps(content)))
        done = content["global_step"]
        ledger.fed = dict(list(whole.fed.items())[: 4 * done])
        for _ in range(STEPS - done):
            step(resumed)
        assert list(ledger.fed) == list(whole.fed), f"resumed after step {done}"


def test_rows_that_change_under_a_run_are_refused_and_after_it_are_told(config, caplog):
    prompts = PromptSource(config, "r")
    old = prompts.digest
    path = Path(config.data.train_files[0])
    rows = pq.read_table(path).to_pylist()
    # Another process reads the files anew: a configuration of its own stands for it.
    write_rows(path, [*rows[1:], rows[0]])
    other = PromptSource(config.model_copy(update={"seed": 9}), "r")
    other_digest, other.digest = other.digest, old
    assert other_digest != old
    with pytest.raises(DataError, match=r"train.parquet changed while the run goes on"):
        other.train_specs(start=0, count=4, global_step=1)
    other.digest = other_digest
    with caplog.at_level(logging.WARNING):
        other.tell_changes(old)
    assert "the training rows are not those of the checkpoint" in caplog.text
    caplog.clear()
    other.tell_changes(other_digest)
    assert caplog.text == ""
