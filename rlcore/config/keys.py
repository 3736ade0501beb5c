"""The three classes of keys: honoured, satisfied (a notice), refused (a problem)."""

from typing import Any, Final

from rlcore.config.pending import Hint
from rlcore.config.problems import Problem, nearest, show
from rlcore.config.tree import (
    Tree,
    all_fields,
    default_of,
    get,
    leaves,
    markers,
    put,
    section_paths,
)
from rlcore.config.verl_keys import VERL_KEYS

_A: Final = "actor_rollout_ref."


def classify(tree: Tree) -> tuple[Tree, list[Problem], list[str]]:
    """Return the part of `tree` that has fields, and the problems and notices of its keys."""
    kept: Tree = {}
    problems: list[Problem] = []
    notices: list[str] = []
    for path, value in leaves(tree):
        if path in all_fields():
            kept = put(kept, path, value)
            notices += _notice_of_marked(path, value)
        elif path in section_paths():
            problems += not_a_section(path, value)
        else:
            verdict = _of_verl_or_unknown(path, value)
            if isinstance(verdict, Problem):
                problems.append(verdict)
            else:
                notices.append(verdict)
    return kept, problems + _contradictions(tree), notices


def _contradictions(tree: Tree) -> list[Problem]:
    """Return the problems of keys without a field that contradict one that has a field."""
    actor, rollout = f"{_A}actor.use_dynamic_bsz", f"{_A}rollout.log_prob_use_dynamic_bsz"
    of_actor, of_rollout = bool(get(tree, actor)), get(tree, rollout)
    if of_rollout is None or bool(of_rollout) == of_actor:
        return []
    return [
        Problem(
            path=rollout,
            value=of_rollout,
            reason=f"it contradicts {actor}={show(of_actor)}: log-probs and updates are cut alike",
            fix="leave it out",
            involves=(actor,),
        )
    ]


def is_known(path: str) -> bool:
    """Whether a dotted key is one of ours or of verl's, or a section."""
    return (
        path in all_fields()
        or path in section_paths()
        or any(entry.matches(path) for entry in VERL_KEYS)
    )


def unknown_key(path: str, value: Any, *, has_value: bool = True) -> Problem:
    """Return the problem of a key that nobody knows, with the nearest that is known."""
    known = nearest(path.lstrip("~"), all_fields())
    return Problem(
        path=path,
        value=value,
        has_value=has_value,
        reason="there is no such key",
        fix=f"did you mean {known}?" if known else "`rollflow check PRESET --all` lists all keys",
    )


def _notice_of_marked(path: str, value: Any) -> list[str]:
    """Return the notice of a key that is not read, where its value is taken all the same."""
    marker = markers().get(path)
    if marker is None or not (isinstance(marker, Hint) or marker.admits(value, default_of(path))):
        return []
    return [f"{path}={show(value)}: {marker.reason}"]


def not_a_section(path: str, value: Any) -> list[Problem]:
    """Return the problem of a section that was given a value; none where it is just empty."""
    if value is None or value == {}:  # `reward:` with nothing below it
        return []
    below = [key for key in all_fields() if key.startswith(f"{path}.")]
    return [
        Problem(
            path=path,
            value=value,
            reason="it is a section and holds no value of its own",
            fix=f"set a key below it, such as {below[0]}",
        )
    ]


def _of_verl_or_unknown(path: str, value: Any) -> Problem | str:
    for entry in VERL_KEYS:
        if entry.matches(path):
            if entry.is_satisfied_by(value):
                return f"{path}={show(value)}: {entry.reason}"
            return Problem(
                path=path, value=value, reason=entry.reason, fix=entry.fix, is_unsupported=True
            )
    return unknown_key(path, value)
