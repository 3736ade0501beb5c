"""Pages, saves and the time limit of an attempt; no Ray, and no step is made."""

import time


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


def test_pages_hold_as_many_steps_as_asked_for(make_run):
    assert pages_of(make_run(total_training_steps=3)) == [(1, 1), (2, 2), (3, 3)]
    assert pages_of(make_run(total_training_steps=5, steps_per_page=2)) == [(1, 2), (3, 4), (5, 5)]
    assert pages_of(make_run(val_only=True)) == []


def test_fast_steps_share_a_page_and_slow_ones_do_not(make_run):
    fast = make_run(total_training_steps=15, steps_per_page="auto")
    assert pages_of(fast, step_s=0.5) == [(1, 1), (2, 11), (12, 15)]
    slow = make_run(total_training_steps=3, steps_per_page="auto")
    assert pages_of(slow, step_s=9.0) == [(1, 1), (2, 2), (3, 3)]


def test_a_resumed_run_goes_on_after_its_last_step(make_run):
    run = make_run(total_training_steps=4)
    run.trainer.global_steps = 2
    assert pages_of(run) == [(3, 3), (4, 4)]


def test_saves_and_validations_are_due_by_their_rhythm_and_at_the_end(make_run):
    run = make_run(total_training_steps=5, save_freq=2, test_freq=3)
    assert [step for step in range(1, 6) if run.is_save_due(step)] == [2, 4, 5]
    assert [step for step in range(1, 6) if run.is_validation_due(step)] == [3, 5]
    never = make_run(total_training_steps=5, save_freq=-1, test_freq=-1)
    assert not any(never.is_save_due(s) or never.is_validation_due(s) for s in range(1, 6))


def test_the_time_limit_makes_the_step_that_runs_the_last_one_saved_and_validated(make_run):
    run = make_run(
        total_training_steps=9, save_freq=-1, test_freq=-1, max_wall_s=0.01, steps_per_page=4
    )
    time.sleep(0.02)
    assert pages_of(run) == [(1, 4)]
    assert run.trainer.global_steps == 1
    assert run.is_save_due(1)
    assert run.is_validation_due(1)


def test_a_validation_that_the_attempt_before_did_not_report_comes_first(make_run):
    run = make_run(total_training_steps=5, test_freq=2)
    assert run.is_first_validation_due()
    run.trainer.state["scores"] = {"0": 0.1, "2": 0.2}
    run.trainer.global_steps = 2
    assert not run.is_first_validation_due()
    assert not run.is_start_reported()
    for step in (4, 5):
        run.trainer.global_steps = step
        assert run.is_first_validation_due()
        assert run.is_start_reported()
    run.trainer.global_steps = 3
    assert not run.is_first_validation_due()


def test_a_report_that_is_missing_has_what_the_checkpoint_knows_of_its_step(make_run):
    run = make_run(total_training_steps=5, test_freq=-1)
    run.trainer.global_steps = 2
    run.begin_step()
    run._metrics["actor/grad_norm"] = 0.5
    run._step_began -= 10
    run.keep_metrics()
    resumed = make_run(total_training_steps=5, test_freq=-1)
    resumed.trainer.restore({"global_step": 2, "state": run.trainer.state})
    resumed.begin_start()
    assert not resumed.is_start_reported()
    assert "actor/grad_norm" not in resumed._metrics
    resumed.lacks_report = True
    resumed.begin_start()
    assert resumed.is_start_reported()
    assert resumed._metrics["actor/grad_norm"] == 0.5
    assert time.monotonic() - resumed._step_began >= 10
    # A later step's checkpoint that was made without a report of its own: nothing is known of it.
    resumed.trainer.global_steps = 3
    resumed.begin_start()
    assert "actor/grad_norm" not in resumed._metrics


def test_a_time_limit_that_ends_with_the_run_changes_nothing(make_run):
    run = make_run(total_training_steps=1, save_freq=-1, test_freq=-1, max_wall_s=0.01)
    time.sleep(0.02)
    assert pages_of(run) == [(1, 1)]
    assert not run.is_save_due(1)


def test_a_start_that_is_saved_nowhere_is_saved_first(make_run):
    """A lost training group goes back to it; a due checkpoint may be missing behind a snapshot."""
    run = make_run(total_training_steps=5, save_freq=2)
    assert run.is_start_snapshot_due()
    assert not run.is_start_checkpoint_due()
    for step, due in ((2, True), (3, False), (5, True)):
        run.trainer.global_steps = step
        assert run.is_start_checkpoint_due() == due
    folder = run.folder.path / "global_step_2"
    folder.mkdir()
    (folder / "trainer.json").write_text("{}")
    run.trainer.global_steps = 2
    assert not run.is_start_checkpoint_due()
    assert not run.is_start_snapshot_due()
    assert not make_run(snapshots=False).is_start_snapshot_due()
    only = make_run(val_only=True, save_freq=2)
    only.trainer.global_steps = 4
    assert not only.is_start_snapshot_due() and not only.is_start_checkpoint_due()
