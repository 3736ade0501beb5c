"""Which finished groups a step may train: staleness, failures, DAPO's filter. Pure functions.

verl's words: a group dispatched at step d and trained at step s spans s - d + 1 steps; the
threshold k allows a span of k, that is, a staleness of k - 1. With basis `tokens` the span is
counted from the oldest token's weight version instead: weight updates since then, + 1.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.buffer.ledger_state import LedgerState, Prompt
from rlcore.errors import DataError
from rlcore.types import PromptStatus

Strategy = Literal["drop", "wait", "pace"]
Basis = Literal["dispatch", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePolicy:
    """How a batch is chosen; travels with every call, the ledger keeps none."""

    max_off_policy_threshold: int | None = None
    """Steps (or weight versions) that a group may span; None: no limit."""
    strategy: Strategy = "drop"
    """`drop` evicts finished groups that span more. `wait` and `pace` hold the batch back while
    a group in flight would have to be trained too late after it; `pace` also limits what is fed
    (see `num_admitted`)."""
    basis: Basis = "dispatch"
    trainer_version: int | None = None
    """The trainer's weight version now; needed with basis `tokens`."""
    skipped_versions: tuple[int, ...] = ()
    """Version numbers that no state of the trainer has had, ascending: of a dead attempt."""
    prompts_per_step: int = 0
    """Prompts that all inner steps of a step take; 0: one batch."""
    prompts_left_in_step: int = 0
    """Of those, what is sampled after this batch."""
    filter_metric: str | None = None
    """Groups whose sessions all have the same value of it are evicted: `reward`, or a key of what
    the reward function returned."""
    refill_factor: int = 1
    """Prompts that are fed for each filtered group."""
    max_in_flight: int | None = None
    """Prompts pending and running at most when evicted groups are replaced."""
    keeps_supply: bool = False
    """Replace evicted groups also when a full batch is there (asynchronous modes)."""
    discards_surplus: bool = False
    """Let what is in flight finish, then drop what the batch does not take (verl's sync DAPO)."""

    def span_of(self, prompt: Prompt, global_step: int) -> int:
        """Return how many steps, or weight versions, a group spans if it is trained now."""
        if self.basis == "tokens" and self.trainer_version is not None:
            oldest = prompt.min_version
            if oldest is None:
                return 1
            return num_updates(oldest, self.trainer_version, self.skipped_versions) + 1
        return global_step - prompt.global_step + 1


def num_updates(older: int, newer: int, skipped: Sequence[int] = ()) -> int:
    """Return how many weight updates lie between two versions.

    Args:
        older: Version number.
        newer: Version number.
        skipped: Numbers that name no state of this line, ascending.
    """
    return newer - older - (bisect_right(skipped, newer) - bisect_right(skipped, older))


def judge(
    state: LedgerState, partition_id: str, global_step: int, policy: SamplePolicy
) -> dict[PromptStatus, list[Prompt]]:
    """Return the settled groups that no batch may have, by what becomes of them.

    Each group is in one list only, so that it is replaced once.

    Raises:
        DataError: a group lacks the metric that it is filtered by.
    """
    failed = state.queue("failure", partition_id).in_order()
    stale = _stale(state, partition_id, global_step, policy)
    gone = {prompt.uid for prompt in stale}
    filtered: list[Prompt] = []
    if policy.filter_metric is not None:
        fresh = [prompt for prompt in state.unjudged(partition_id) if prompt.uid not in gone]
        filtered = [prompt for prompt in fresh if not varies(prompt, policy.filter_metric)]
    return {"failed": failed, "stale": stale, "filtered": filtered}


def _stale(
    state: LedgerState, partition_id: str, global_step: int, policy: SamplePolicy
) -> list[Prompt]:
    limit = policy.max_off_policy_threshold
    if limit is None or policy.strategy != "drop":
        return []
    tokens = policy.basis == "tokens"
    queue = state.by_version(partition_id) if tokens else state.queue("finished", partition_id)
    found: list[Prompt] = []
    count = 1
    while count:  # the oldest come first: double the look until one is fresh
        oldest = queue.first(count)
        found = [p for p in oldest if policy.span_of(p, global_step) > limit]
        count = 0 if len(found) < count else 2 * count
    return found


def varies(prompt: Prompt, metric: str) -> bool:
    """Whether the good sessions of a group differ in a metric; a lone one counts as differing.

    Raises:
        DataError: a session lacks the metric; the message lists what it has.
    """
    values: list[float] = []
    for session in prompt.sessions:
        if session.is_failed:
            continue
        value = session.reward if metric == "reward" else session.reward_extra.get(metric)
        if value is None:
            raise DataError(
                f"prompt {prompt.uid}, session {session.session_id}: the reward function returned "
                f"no {metric!r}, which algorithm.filter_groups.metric names; it returned "
                f"{', '.join(sorted(session.reward_extra)) or 'the score alone'}"
            )
        values.append(float(value))
    return len(values) < 2 or min(values) != max(values)


def is_held_back(
    state: LedgerState,
    partition_id: str,
    global_step: int,
    batch: Sequence[Prompt],
    policy: SamplePolicy,
) -> bool:
    """Whether `wait` and `pace` have to wait for a group in flight before they take `batch`.

    A prompt dispatched at step d is due by step d + k - 1. After this batch, what is due by step
    s + t must fit into the batches up to then. If it does not, and one of the prompts in flight is
    among them, its end is waited for: being older it then takes the place of a younger one. With
    k = 1 + warm-up batches, or feeding that respects `num_admitted`, that always suffices.
    """
    limit = policy.max_off_policy_threshold
    if limit is None or policy.strategy == "drop":
        return False
    per_step = policy.prompts_per_step or len(batch)
    flying: Counter[int] = Counter()
    for status in ("pending", "running"):
        flying.update(state.queue(status, partition_id).by_step)
    if not flying:
        return False
    left = flying + state.queue("finished", partition_id).by_step
    left.subtract(Counter(prompt.global_step for prompt in batch))
    for dispatch in sorted(left):
        steps_ahead = max(0, dispatch + limit - 1 - global_step)
        due = sum(n for step, n in left.items() if step <= dispatch)
        room = policy.prompts_left_in_step + steps_ahead * per_step
        if due > room and any(step <= dispatch for step in flying):
            return True
    return False


def num_admitted(wanted: int, *, outstanding: int, per_step: int, policy: SamplePolicy) -> int:
    """Return how many of `wanted` prompts may be fed at the beginning of a step.

    Under `pace` no more than `threshold` steps' worth of prompts are on their way, the step's own
    included: the last of them is then trained with a staleness of threshold - 1.

    Args:
        wanted: Prompts that the mode would feed.
        outstanding: Prompts that are fed and neither sampled nor evicted.
        per_step: Prompts that a step trains.
        policy: Strategy and threshold.
    """
    limit = policy.max_off_policy_threshold
    if policy.strategy != "pace" or limit is None:
        return wanted
    return max(0, min(wanted, limit * per_step - outstanding))
