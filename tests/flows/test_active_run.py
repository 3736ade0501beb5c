"""Pages, saves and the time limit of an attempt; no Ray, and no step is made."""

import time
from types import SimpleNamespace

import pytest

from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.run_folder import RunFolder
from tasks.active_run import ActiveRun

ROWS = 64


class Pool:
    """Runs nothing."""

    pool_id = "none"

    def set_stray_sink(self, sink):
        self.sink = sink


@pytest.fixture
def make(tmp_path):
    made = []

    def make(**trainer):
        overrides = {f"trainer.{name}": value for name, value in trainer.items()}
        config = tiny_config(tmp_path, {"trainer.logger": ["file"], **overrides})
        folder = RunFolder.create(tmp_path / "runs" / "x", run_id="x", request={})
        cluster = SimpleNamespace(
            executors=Pool(), ledger=None, training=None, checkpoint_manager=None, replicas={}
        )
        run = ActiveRun(config=config, folder=folder, attempt=1, cluster=cluster, rows=ROWS)
        made.append(run)
        return run

    yield make
    for run in made:
        run.reporter.end()


def pages_of(run, step_s=None):
    """Make every step of every page, each in `step_s` seconds by the run's own clock."""
    pages = []
    for first, last in run.pages():
        pages.append((first, last))
        for step in range(first, last + 1):
            run.trainer.global_steps = step
            if step_s is not None:
                run._step_seconds.append(step_s)
            run.end_here_if_time_is_over()
            if run.is_over:
                break
    return pages


def test_pages_hold_as_many_steps_as_asked_for(make):
    assert pages_of(make(total_training_steps=3)) == [(1, 1), (2, 2), (3, 3)]
    assert pages_of(make(total_training_steps=5, steps_per_page=2)) == [(1, 2), (3, 4), (5, 5)]
    assert pages_of(make(val_only=True)) == []


def test_fast_steps_share_a_page_and_slow_ones_do_not(make):
    fast = make(total_training_steps=15, steps_per_page="auto")
    assert pages_of(fast, step_s=0.5) == [(1, 1), (2, 11), (12, 15)]
    slow = make(total_training_steps=3, steps_per_page="auto")
    assert pages_of(slow, step_s=9.0) == [(1, 1), (2, 2), (3, 3)]


def test_a_resumed_run_goes_on_after_its_last_step(make):
    run = make(total_training_steps=4)
    run.trainer.global_steps = 2
    assert pages_of(run) == [(3, 3), (4, 4)]


def test_saves_and_validations_are_due_by_their_rhythm_and_at_the_end(make):
    run = make(total_training_steps=5, save_freq=2, test_freq=3)
    assert [step for step in range(1, 6) if run.is_save_due(step)] == [2, 4, 5]
    assert [step for step in range(1, 6) if run.is_validation_due(step)] == [3, 5]
    never = make(total_training_steps=5, save_freq=-1, test_freq=-1)
    assert not any(never.is_save_due(s) or never.is_validation_due(s) for s in range(1, 6))


def test_the_time_limit_makes_the_step_that_runs_the_last_one_saved_and_validated(make):
    run = make(
        total_training_steps=9, save_freq=-1, test_freq=-1, max_wall_s=0.01, steps_per_page=4
    )
    time.sleep(0.02)
    assert pages_of(run) == [(1, 4)]
    assert run.trainer.global_steps == 1
    assert run.is_save_due(1)
    assert run.is_validation_due(1)


def test_a_time_limit_that_ends_with_the_run_changes_nothing(make):
    run = make(total_training_steps=1, save_freq=-1, test_freq=-1, max_wall_s=0.01)
    time.sleep(0.02)
    assert pages_of(run) == [(1, 1)]
    assert not run.is_save_due(1)
