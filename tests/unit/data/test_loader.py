"""The order of a run: the same after a stop at any step, whatever chooses the rows."""

import json
from collections import Counter

import pytest

from rlcore.data.check import check_data
from rlcore.data.dataset import load_dataset
from rlcore.data.loader import PromptLoader, results_of
from rlcore.data.parquet import write_rows
from rlcore.errors import ConfigError, DataError
from rlcore.types import SampledBatch

STEPS_PER_EPOCH, BATCH = 16, 4

SEEDED = """
import random

class Seeded:
    def __init__(self, data_source, data_config):
        self.rows = len(data_source)
        self.random = random.Random(data_config.seed)

    def __iter__(self):
        return iter(self.random.sample(range(self.rows), self.rows))
"""

BACKWARDS = """
class Backwards:
    def __init__(self, data_source, data_config, step=1):
        self.rows, self.step, self.epoch = len(data_source), step, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(self.epoch - self.step * i) % self.rows for i in range(self.rows)])
"""

UNSEEDED = SEEDED.replace("random.Random(data_config.seed)", "random.Random()")
NO_STATE = SEEDED + "    def update(self, results): ...\n"
TOO_SHORT = BACKWARDS.replace("for i in range(self.rows)", "for i in range(3)")
OUTSIDE = BACKWARDS.replace("% self.rows", "+ 100")


def sampler_file(tmp_path, code, name, **kwargs):
    path = tmp_path / f"{name.lower()}.py"
    path.write_text(code)
    found = {"data__sampler__class_path": str(path), "data__sampler__class_name": name}
    return found | ({"data__sampler__kwargs": kwargs} if kwargs else {})


def success_rate(tmp_path):
    return {"data__sampler__class_name": "success_rate"}


def weights(tmp_path):
    rows = [
        {
            "data_source": "rollflow/letters",
            "prompt": [{"role": "user", "content": f"word {number}"}],
            "reward_model": {"ground_truth": "aeiou"},
        }
        for number in range(64)
    ]
    for name, part in (("a", rows[:50]), ("b", rows[50:])):
        write_rows(tmp_path / f"{name}.parquet", part)
    files = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    return {"data__train_files": files, "data__train_weights": [1, 3]}


ORDERS = {
    "shuffled": lambda tmp_path: {},
    "in file order": lambda tmp_path: {"data__shuffle": False},
    "weighted files": weights,
    "weighted files in order": lambda tmp_path: {**weights(tmp_path), "data__shuffle": False},
    "a sampler of one's own": lambda tmp_path: sampler_file(tmp_path, SEEDED, "Seeded"),
    "one with set_epoch": lambda tmp_path: sampler_file(tmp_path, BACKWARDS, "Backwards", step=3),
    "success rate": success_rate,
}


def batch_of(specs, step):
    """Return a leased batch in which row r is solved in r % 3 of 2 sessions."""
    tags = [
        {
            "uid": spec.uid,
            "session_id": session,
            "reward": 0.5,
            "reward_extra": {"acc": float(session < spec.index % 3)},
        }
        for spec in specs
        for session in range(2)
    ]
    return SampledBatch(
        lease_id="l",
        global_step=step,
        inner_step=0,
        uids=[spec.uid for spec in specs],
        keys=[f"{tag['uid']}_{tag['session_id']}_0" for tag in tags],
        tags=tags,
        metrics={},
    )


def run(make_loader, *, stop_at=None, steps=2 * STEPS_PER_EPOCH):
    """Return the uids that a run feeds, which is stopped and resumed after step `stop_at`."""
    loader, state = make_loader(), {"position": 0, "sampler": None}
    uids = []
    for step in range(1, steps + 1):
        start = state["position"]
        begun = loader.begin(state["sampler"], start=start, count=BATCH)
        specs = loader.specs(begun, start=start, count=BATCH, run_id="r", global_step=step)
        uids += [spec.uid for spec in specs]
        state = {
            "position": start + BATCH,
            "sampler": loader.observe(begun, batch_of(specs, step)),
        }
        if step == stop_at:
            loader, state = make_loader(), json.loads(json.dumps(state))
    return uids


@pytest.mark.parametrize("order", ORDERS)
def test_a_resume_at_any_step_of_two_epochs_gives_the_order_of_a_run_without_a_stop(
    make_config, tmp_path, order
):
    config = make_config(**ORDERS[order](tmp_path), trainer__total_epochs=2)
    dataset = load_dataset(config, "train")

    def make_loader():
        return PromptLoader(config, dataset)

    whole = run(make_loader)
    assert len(set(whole)) == len(whole) == 2 * STEPS_PER_EPOCH * BATCH
    for step in range(1, 2 * STEPS_PER_EPOCH):
        assert run(make_loader, stop_at=step) == whole, f"stopped after step {step}"


@pytest.mark.parametrize("order", ORDERS)
def test_a_phase_that_is_tried_again_feeds_the_same_prompts(make_config, tmp_path, order):
    config = make_config(**ORDERS[order](tmp_path), trainer__total_epochs=2)
    loader = PromptLoader(config, load_dataset(config, "train"))
    state = None
    for step in range(2 * STEPS_PER_EPOCH):
        start = step * BATCH
        # A refill of one step may reach into the next epoch.
        tries = [
            loader.begin(state, start=start, count=count) for count in (BATCH, 2 * BATCH, BATCH)
        ]
        specs = [
            loader.specs(t, start=start, count=BATCH, run_id="r", global_step=step) for t in tries
        ]
        assert specs[0] == specs[1] == specs[2]
        state = loader.observe(tries[0], batch_of(specs[0], step))


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_is_another_with_another_seed_where_it_is_random(make_config, tmp_path, order):
    overrides = ORDERS[order](tmp_path)

    def uids(seed):
        config = make_config(**overrides, data__seed=seed, trainer__total_epochs=2)
        return run(lambda: PromptLoader(config, load_dataset(config, "train")))

    is_random = "order" not in order and order != "one with set_epoch"
    assert (uids(1) != uids(2)) == is_random


def test_weights_are_the_shares_of_the_files(make_config, tmp_path):
    config = make_config(**weights(tmp_path), trainer__total_epochs=2)
    loader = PromptLoader(config, load_dataset(config, "train"))
    specs = loader.specs(None, start=0, count=64, run_id="r", global_step=1)
    files = Counter(spec.fields["origin"].split(" row ")[0][-9:] for spec in specs)
    assert files == {"a.parquet": 16, "b.parquet": 48}  # 1 : 3 of 64
    # The 14 rows of b come three or four times, with uids and samples of their own.
    repeats = Counter(spec.index for spec in specs if spec.index >= 50)
    assert set(repeats.values()) == {3, 4}
    assert max(spec.repeat for spec in specs) == 3


def test_what_is_never_or_always_solved_is_used_less(make_config, tmp_path):
    config = make_config(**success_rate(tmp_path), trainer__total_epochs=4)
    loader = PromptLoader(config, load_dataset(config, "train"))
    state, counts = None, Counter()
    for step in range(3 * STEPS_PER_EPOCH):
        state = loader.begin(state, start=step * BATCH, count=BATCH)
        specs = loader.specs(state, start=step * BATCH, count=BATCH, run_id="r", global_step=step)
        state = loader.observe(state, batch_of(specs, step))
        if step == STEPS_PER_EPOCH - 1:
            assert {spec.index for spec in specs} <= set(range(64))
        if step >= STEPS_PER_EPOCH:
            counts.update(spec.index % 3 for spec in specs)
    # Solved in 0, 1 and 2 of 2 sessions: weights 0.1, 1 and 0.1, so 1/12, 10/12 and 1/12 of 128.
    assert counts[1] == pytest.approx(128 * 10 / 12, abs=10)
    assert counts[0] == pytest.approx(128 / 12, abs=10)
    assert counts[2] == pytest.approx(128 / 12, abs=10)


def test_the_first_epoch_of_the_curriculum_uses_every_row_once(make_config, tmp_path):
    config = make_config(**success_rate(tmp_path))
    loader = PromptLoader(config, load_dataset(config, "train"))
    state = loader.begin(None, start=0, count=64)
    specs = loader.specs(state, start=0, count=64, run_id="r", global_step=1)
    assert sorted(spec.index for spec in specs) == list(range(64))


def test_results_are_of_sessions_not_of_their_trajectories():
    uid = "train-0-7-abc"
    tags = [
        {"uid": uid, "session_id": 0, "reward": 3.0, "reward_extra": {}},
        {"uid": uid, "session_id": 0, "reward": 3.0, "reward_extra": {}},
        {"uid": uid, "session_id": 1, "reward": -1.0, "reward_extra": {"acc": 0.5}},
    ]
    batch = SampledBatch(
        lease_id="l", global_step=1, inner_step=0, uids=[uid], keys=["a", "b", "c"], tags=tags,
        metrics={},
    )  # fmt: skip
    [result] = results_of(batch)
    assert (result.index, result.rewards, result.accuracies) == (7, [3.0, -1.0], [1.0, 0.5])


@pytest.mark.parametrize(
    ("code", "name", "error", "message"),
    [
        (UNSEEDED, "Seeded", DataError, "another order each time it is made"),
        (NO_STATE, "Seeded", ConfigError, "has update.. and needs state_dict.. and"),
        (TOO_SHORT, "Backwards", DataError, "gave 3 rows for an epoch of 64 prompts"),
        (OUTSIDE, "Backwards", DataError, "gave row 100 of 64 rows"),
        (SEEDED, "Other", ConfigError, "defines no 'Other'"),
        ("Seeded = 3", "Seeded", ConfigError, "must be a class with __iter__"),
        ("class Seeded:\n def __iter__(self): ...", "Seeded", ConfigError, "must take .data"),
    ],
)  # fmt: skip
def test_a_sampler_that_cannot_work_is_refused(make_config, tmp_path, code, name, error, message):
    with pytest.raises(error, match=message):
        check_data(make_config(**sampler_file(tmp_path, code, name)))


def test_settings_of_the_curriculum_are_checked(make_config):
    names = {"data__sampler__class_name": "success_rate"}
    with pytest.raises(ConfigError, match=r"floor=0 must be in \(0, 1\]"):
        check_data(make_config(**names, data__sampler__kwargs={"floor": 0}))
    with pytest.raises(ConfigError, match=r"the keys of data.sampler.kwargs: .*'ceiling'"):
        check_data(make_config(**names, data__sampler__kwargs={"ceiling": 0.2}))
    with pytest.raises(
        ConfigError, match="unknown prompt sampler 'sucess_rate'; known: success_rate"
    ):
        check_data(make_config(data__sampler__class_name="sucess_rate"))
