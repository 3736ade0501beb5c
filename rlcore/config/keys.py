"""The three classes of keys: honoured, satisfied (a notice), refused (a problem)."""

from typing import Any

from rlcore.config.pending import Hint
from rlcore.config.problems import Problem, nearest, show
from rlcore.config.tree import Tree, all_fields, default_of, leaves, markers, put, section_paths
from rlcore.config.verl_keys import VERL_KEYS


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
    return kept, problems, notices


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
    known = nearest(path, all_fields())
    return Problem(
        path=path,
        value=value,
        reason="there is no such key",
        fix=f"did you mean {known}?" if known else "`rollflow check PRESET --all` lists all keys",
    )


def _idle_bucket(tree: Tree) -> list[str]:
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    given = {path: value for path, value in leaves(tree) if path.startswith(f"{engine}.")}
    size = given.get(f"{engine}.update_weights_bucket_megabytes")
    backend = given.get(f"{engine}.backend", default_of(f"{engine}.backend"))
    if size is None or backend != "naive":
        return []
    return [
        f"{engine}.update_weights_bucket_megabytes={show(size)}: it has no effect with "
        "backend=naive, which cuts nothing in pieces"
    ]


def idle_keys(tree: Tree) -> list[str]:
    """Return notices of keys that others overrule, where verl takes both in silence."""
    actor = "actor_rollout_ref.actor"
    given = {path: value for path, value in leaves(tree) if path.startswith(f"{actor}.")}
    notices: list[str] = []
    if given.get(f"{actor}.use_dynamic_bsz"):
        idle, because = f"{actor}.ppo_micro_batch_size_per_gpu", "use_dynamic_bsz=true"
    else:
        idle, because = f"{actor}.ppo_max_token_len_per_gpu", "use_dynamic_bsz=false"
    if given.get(idle) is not None:
        notices.append(f"{idle}={show(given[idle])}: it has no effect with {because}")
    notices += _idle_bucket(tree)
    clips = [f"{actor}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    if all(path in given for path in clips):
        notices.append(
            f"{clips[0]}={show(given[clips[0]])}: clip_ratio_low and clip_ratio_high hold"
        )
    return notices
