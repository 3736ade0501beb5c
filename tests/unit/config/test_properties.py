"""Valid configurations, mutated at any key: refused with its path, satisfied, or of effect."""

import re
from typing import Annotated, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rlcore.config import load_config, preset_names
from rlcore.config.load import examine_tree
from rlcore.config.problems import nearest
from rlcore.config.tree import all_fields, honoured_fields, markers, put, remove, value_at

PRESETS = {name: load_config(name).model_dump(mode="json") for name in preset_names()}
KEYS = list(all_fields())

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(-2, 9),
    st.sampled_from(["", "x", "auto", "cuda", "sync", "gae", "k1", "0.5_2.0", "1e-3", "token"]),
    st.lists(st.sampled_from(["console", "x", 1]), max_size=2),
    st.just({"y": 1}),
)


def literals(kind):
    """The words that a key's type lists."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for part in get_args(kind) for word in literals(part)]


@st.composite
def values(draw, path):
    words = literals(all_fields()[path].annotation)
    return draw(st.one_of(scalars, st.sampled_from(words)) if words else scalars)


@st.composite
def mutations(draw):
    """A preset and one to three keys with other values."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    paths = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    return preset, {path: draw(values(path)) for path in paths}


def same(left, right):
    """Equal, and of one kind: True is no 1 here."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def coerced(path, value):
    """What the key's own type makes of a value."""
    field = all_fields()[path]
    kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(kind).validate_python(value)


def told(found, path):
    """Whether a problem is about a key, or names it."""
    last = re.compile(rf"(?<![\w.]){re.escape(path.rsplit('.', 1)[-1])}\b|\b{re.escape(path)}\b")
    return any(
        problem.path == path
        or path in problem.involves
        or last.search(problem.reason)
        or problem.path.startswith(f"{path}.")
        for problem in found.problems
    )


@settings(max_examples=400, deadline=None)
@given(mutations())
def test_a_changed_value_is_refused_satisfied_or_has_an_effect(mutation):
    preset, changes = mutation
    tree = PRESETS[preset]
    for path, value in changes.items():
        tree = put(remove(tree, path), path, value)
    found = examine_tree("mutated", tree, ())
    for path, value in changes.items():
        noticed = any(notice.startswith(f"{path}=") for notice in found.notices)
        if found.problems:
            continue
        # It can be run: then the value arrived; a notice tells of one that asks for nothing.
        assert found.config is not None
        arrived = value_at(found.config, path)
        if path in markers():
            assert noticed, (path, value)
        if value is not None:  # null may stand for the value of another key
            assert same(arrived, coerced(path, value)), (path, value, arrived)
    if found.problems:
        assert found.config is None or any(told(found, path) for path in changes)
        assert any(told(found, path) for path in changes), [str(p) for p in found.problems]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(honoured_fields())), st.data())
def test_a_value_that_is_taken_has_an_effect(path, data):
    base = PRESETS["grpo-tiny"]
    value = data.draw(values(path))
    found = examine_tree("mutated", put(remove(base, path), path, value), ())
    if found.problems:
        assert any(told(found, p) for p in [path])
        return
    before = value_at(load_config("grpo-tiny"), path)
    if value is not None and not same(coerced(path, value), before):
        assert found.config != load_config("grpo-tiny"), (path, value)
    (again,) = [examine_tree("again", found.config.model_dump(mode="json"), ())]
    assert again.config == found.config  # what a run records is what it ran


V1 = "trainer.v1."
ACTOR = "actor_rollout_ref.actor."
VAL = "actor_rollout_ref.rollout.val_kwargs."
CONTRADICTIONS = [
    ((f"{V1}trainer_mode", "colocate_async"), (f"{V1}sampler.max_off_policy_threshold", 1)),
    (("trainer.val_only", True), ("trainer.val_before_train", False)),
    ((f"{ACTOR}optim.lr_warmup_steps", 3), (f"{ACTOR}optim.lr_warmup_steps_ratio", 0.2)),
    ((f"{VAL}do_sample", False), (f"{VAL}temperature", 0.7)),
    ((f"{ACTOR}loss_agg_mode", "token-mean"), (f"{ACTOR}loss_scale_factor", 8.0)),
    (("reward.reward_manager.name", "naive"), ("reward.max_rpm", 30)),
    ((f"{ACTOR}use_dynamic_bsz", True), ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", 0)),
    (("data.train_batch_size", 8), ("data.gen_batch_size", 4)),
    (("trainer.resume_mode", "auto"), ("trainer.resume_from_path", "x")),
    (("algorithm.adv_estimator", "grpo"), ("algorithm.gdpo_batch_norm", "token")),
]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CONTRADICTIONS), mutations())
def test_two_that_contradict_are_refused_and_named_whatever_else_is_given(pair, mutation):
    preset, changes = mutation
    tree = PRESETS[preset]
    keys = {path for path, _ in pair}
    involved = {key for path in keys for key in (path, path.rsplit(".", 1)[0])}
    for path, value in [*((p, v) for p, v in changes.items() if p not in involved), *pair]:
        tree = put(remove(tree, path), path, value)
    found = examine_tree("mutated", tree, ())
    assert found.problems
    if {problem.path for problem in found.problems} <= keys:  # nothing else is wrong
        for path in keys:
            assert told(found, path), (path, [str(problem) for problem in found.problems])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KEYS), st.integers(0, 30), st.sampled_from("abcxyz_"))
def test_a_misspelt_key_is_refused_with_the_nearest(path, place, letter):
    head, _, last = path.rpartition(".")
    place = place % len(last)
    misspelt = f"{head}.{last[:place]}{letter}{letter}{last[place:]}".lstrip(".")
    found = examine_tree("mutated", put(PRESETS["grpo-tiny"], misspelt, 1), ())
    (problem,) = [problem for problem in found.problems if problem.path == misspelt]
    assert not problem.is_unsupported or "there" not in problem.reason
    assert nearest(misspelt, KEYS) in problem.fix or problem.is_unsupported


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("path", KEYS)
def test_a_deleted_key_is_its_default_or_missing(preset, path):
    found = examine_tree("mutated", remove(PRESETS[preset], path), ())
    if all_fields()[path].is_required():
        assert [problem.path for problem in found.problems] == [path]
    elif found.problems:
        assert told(found, path), [str(problem) for problem in found.problems]
    else:
        assert found.config is not None
