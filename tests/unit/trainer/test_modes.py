"""Which calls on the checkpoint manager each mode's hooks make, in the order of a step."""

import pytest

from rlcore.config import load_config
from rlcore.errors import ConfigError
from rlcore.trainer.base import TRAINERS, PPOTrainer, register_trainer
from rlcore.trainer.modes import get_trainer_cls
from rlcore.trainer.separate_async import PPOTrainerSeparateAsync
from rlcore.user_code import load_user_module


class Manager:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


def bare(cls, config=None, step=3):
    """A trainer without collaborators: hooks need configuration, step and manager only."""
    trainer = object.__new__(cls)
    trainer.config = config
    trainer.global_steps = step
    trainer.checkpoint_manager = Manager()
    return trainer


def step_of(trainer):
    for hook in ("on_step_begin", "on_sample_begin", "on_sample_end", "on_step_end"):
        getattr(trainer, hook)()
    return trainer.checkpoint_manager.calls


def test_sync_sleeps_and_updates():
    trainer = bare(get_trainer_cls("sync"))
    trainer.on_init_end()
    assert step_of(trainer) == [("update_weights", 3), ("sleep_replicas",), ("update_weights", 3)]


def test_colocate_async_cuts_off_sleeps_updates_and_resumes():
    assert step_of(bare(get_trainer_cls("colocate_async"))) == [
        ("abort_replicas",),
        ("sleep_replicas",),
        ("update_weights", 3),
        ("resume_generation_replicas",),
    ]


@pytest.mark.parametrize("in_flight", [False, True])
def test_separate_async_pauses_for_the_update_only(in_flight):
    trainer = bare(PPOTrainerSeparateAsync, separate(in_flight_update=in_flight))
    cut_off, resume = ("abort_replicas",), ("resume_generation_replicas",)
    update = ("update_weights", 3)
    assert step_of(trainer) == ([update] if in_flight else [cut_off, update, resume])


def separate(**settings):
    """A configuration of two inner steps, laid over one that passes the checks of sync mode."""
    config = load_config("grpo-tiny")
    section = config.trainer.v1.separate_async.model_copy(
        update={"parameter_sync_step": 2, **settings}
    )
    v1 = config.trainer.v1.model_copy(update={"separate_async": section})
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"v1": v1})})


def test_inner_steps_come_from_the_mode_and_not_from_its_name():
    config = separate()
    assert PPOTrainerSeparateAsync.inner_steps_of(config) == 2
    for name in ("sync", "colocate_async"):
        assert get_trainer_cls(name).inner_steps_of(config) == 1

    class Two(PPOTrainer):
        inner_steps = 2

    assert Two.inner_steps_of(config) == 2
    assert not Two.is_async


SEED_MODE = """
from rlcore.trainer.base import PPOTrainer, register_trainer

@register_trainer("my_mode")
class MyTrainer(PPOTrainer):
    def on_sample_end(self):
        self.checkpoint_manager.sleep_replicas()
    def on_step_end(self):
        if self.global_steps % 2 == 0:
            self.checkpoint_manager.update_weights(self.global_steps)
"""


def test_a_mode_of_the_users_runs_with_the_capabilities_of_sync(tmp_path):
    file = tmp_path / "my_trainer.py"
    file.write_text(SEED_MODE)
    load_user_module(file)
    mode = TRAINERS.get("my_mode")
    assert (mode.is_async, mode.inner_steps) == (False, 1)
    assert step_of(bare(mode, step=3)) == [("sleep_replicas",)]
    assert step_of(bare(mode, step=4)) == [("sleep_replicas",), ("update_weights", 4)]


def test_a_mode_that_overrides_the_loop_is_refused():
    with pytest.raises(ConfigError, match=r"overrides fit; the loop belongs to flows/train.py"):

        @register_trainer("loops")
        class Loops(PPOTrainer):
            def fit(self):
                """verl's loop."""
