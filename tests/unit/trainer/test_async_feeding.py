"""The asynchronous phases on a real ledger in this process; engine and training are fakes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rlcore.testing.ledger import good_session
from rlcore.testing.sampling import FakeRows, InProcessLedger
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.base import TrainerResources
from rlcore.trainer.modes import get_trainer_cls
from rlcore.trainer.phases import ADD_BATCH, SAMPLE_BATCH, run_phase
from rlcore.types import CallKey

TRAIN = "r-1/train"


@dataclass
class Training:
    """Counts versions as the trainer does: one per step."""

    version: int = 0
    calls: list = field(default_factory=list)

    def state(self):
        return {"weight_version": self.version, "skipped_versions": []}


class Engine:
    """Claims everything and finishes the youngest prompts first, or fails those in `fails`."""

    def __init__(self, training):
        self.training = training
        self.claimed = []

    def __call__(self, ledger):
        new = ledger.claim(1, "w0", 100)
        self.claimed += [(spec, self.training.version) for spec in new]
        spec, version = self.claimed.pop()
        tag = {
            "prompt_len": 3,
            "response_len": 4,
            "seq_len": 7,
            "min_global_steps": version,
            "max_global_steps": self.training.version,
        }
        sessions = [
            good_session(spec.uid, i, tags=[tag], reward=float(i % 2))
            for i in range(spec.num_sessions)
        ]
        ledger.settle("w0", spec.uid, sessions)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


def make(root, tmp_path, mode, **overrides):
    config = tiny_config(root, {"trainer.v1.trainer_mode": mode, **overrides})
    training = Training()
    ledger = InProcessLedger("r-1", tmp_path / "l.jsonl", 1, meanwhile=Engine(training))
    resources = TrainerResources(
        folder=SimpleNamespace(run_id="r-1"),
        attempt=1,
        ledger=ledger,
        training=training,
        checkpoint_manager=SimpleNamespace(),
        total_steps=4,
    )
    trainer = get_trainer_cls(mode)(config, resources)
    trainer.replay_buffer._rows = FakeRows()
    return trainer, ledger, training


def run(trainer, phase, step):
    trainer.global_steps = step
    key = CallKey(run_id="r-1", attempt=1, global_step=step, phase=phase.name)
    result = run_phase(trainer, phase, key, deadline_s=100)
    trainer.state = result.state
    return result


@pytest.mark.parametrize("strategy", ["drop", "wait", "pace"])
def test_a_run_with_a_pipeline_trains_every_prompt_once_within_the_bound(root, tmp_path, strategy):
    trainer, ledger, training = make(
        root,
        tmp_path,
        "colocate_async",
        **{
            "trainer.v1.sampler.max_off_policy_threshold": 2,
            "trainer.v1.sampler.max_off_policy_strategy": strategy,
        },
    )
    assert trainer._warm_up(1) == 4
    assert trainer._warm_up(1) == 0  # a resume that restored them
    trained = []
    for step in range(1, 5):
        before = dict(trainer.state)
        run(trainer, ADD_BATCH, step)
        trainer.state = before  # that try died after it had fed
        again = run(trainer, ADD_BATCH, step)
        assert again.metrics["training/prompts_fed"] == 0
        result = run(trainer, SAMPLE_BATCH, step)
        assert result.metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert run(trainer, SAMPLE_BATCH, step).batch == result.batch
        trained += ledger.leased(result.batch.lease_id).uids
        ledger.mark_trained(CallKey(run_id="r-1", attempt=1, global_step=step), step)
        training.version += 1
    assert len(set(trained)) == len(trained) == 16
    counts = ledger.counts(TRAIN)
    # Nothing is generated for steps that do not come.
    assert counts["trained"] + counts["stale"] == counts["fed"]
    assert counts["stale"] == 0 or strategy == "drop"
    assert trainer.state["train_position"] == counts["fed"]
    ledger.check_conservation()


def test_without_a_pipeline_it_feeds_and_samples_what_sync_does(root, tmp_path):
    batches = {}
    for mode in ("sync", "colocate_async"):
        (tmp_path / mode).mkdir()
        trainer, ledger, _ = make(root, tmp_path / mode, mode)
        batches[mode] = []
        for step in range(1, 4):
            run(trainer, ADD_BATCH, step)
            batch = run(trainer, SAMPLE_BATCH, step).batch
            batches[mode].append(ledger.leased(batch.lease_id).keys)
            ledger.mark_trained(CallKey(run_id="r-1", attempt=1, global_step=step), step)
    assert batches["sync"] == batches["colocate_async"]


def test_inner_steps_share_a_step(root, tmp_path):
    trainer, ledger, _ = make(root, tmp_path, "sync")
    trainer.inner_steps = 2
    run(trainer, ADD_BATCH, 1)
    uids = []
    for inner in range(2):
        key = CallKey(
            run_id="r-1", attempt=1, global_step=1, inner_step=inner, phase="sample_batch"
        )
        batch = run_phase(trainer, SAMPLE_BATCH, key, deadline_s=100).batch
        assert batch.num_prompts == 2
        uids += ledger.leased(batch.lease_id).uids
    assert len(set(uids)) == 4


def test_between_two_inner_steps_nothing_grows_older(root, tmp_path):
    trainer, _, training = make(root, tmp_path, "sync")
    trainer.inner_steps = 2
    run(trainer, ADD_BATCH, 1)
    for inner in range(2):
        key = CallKey(
            run_id="r-1", attempt=1, global_step=1, inner_step=inner, phase="sample_batch"
        )
        result = run_phase(trainer, SAMPLE_BATCH, key, deadline_s=100)
        trainer.state = result.state
        assert result.metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        training.version += 1  # an optimizer step, which nobody publishes
