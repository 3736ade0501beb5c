"""The phases of a step, in order, and how one is run on a copy of the trainer.

A phase's body runs in an executor process with a copy of the trainer. It may change only
`trainer.state`, a dict that comes back with the result and is applied on success; changing another
attribute raises. A phase whose method the trainer's class does not define is not part of the step,
so a subclass adds one by defining it.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import StateChangeError
from rlcore.types import BatchRef, CallKey

if TYPE_CHECKING:
    from rlcore.trainer.base import PPOTrainer

Metrics = dict[str, float]

OWN_SHARE = 0.9
"""Share of a phase's deadline after which its own waits are overdue."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: its name on the step's page and the trainer's method (verl's name)."""

    name: str
    method: str
    is_in_training_group: bool = False
    """It leaves something in the training group: one that is restored from a snapshot has to go
    through it again."""


ADD_BATCH = Phase("add_batch_to_generate", "_add_batch_to_generate")
SAMPLE_BATCH = Phase("sample_batch", "_sample_batch")
BATCH_PHASES: tuple[Phase, ...] = (
    Phase("compute_reward", "_compute_reward_colocate"),
    Phase("balance_batch", "_balance_batch"),
    Phase("compute_old_log_probs", "_compute_old_log_prob", is_in_training_group=True),
    Phase("compute_ref_log_probs", "_compute_ref_log_prob"),
    Phase("compute_teacher_log_probs", "_compute_teacher_log_prob"),
    Phase("compute_values", "_compute_values"),
    Phase("compute_advantage", "_compute_advantage"),
    Phase("update_critic", "_update_critic", is_in_training_group=True),
    Phase("update_actor", "_update_actor", is_in_training_group=True),
)
SAVE_SNAPSHOT = Phase("save_snapshot", "_save_snapshot")
COMMIT_STEP = Phase("commit_step", "_commit_step")
SAVE_CHECKPOINT = Phase("save_checkpoint", "_save_checkpoint")
VALIDATE = Phase("validate", "_validate")

PHASE_NAMES: tuple[str, ...] = (
    ADD_BATCH.name,
    SAMPLE_BATCH.name,
    *(phase.name for phase in BATCH_PHASES),
    SAVE_SNAPSHOT.name,
    COMMIT_STEP.name,
    SAVE_CHECKPOINT.name,
    "update_weights",
    VALIDATE.name,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseResult:
    """What a phase's body sends back to the driver."""

    metrics: Metrics
    state: dict[str, Any]
    batch: BatchRef | None = None


def active_batch_phases(trainer: "PPOTrainer") -> list[Phase]:
    """Return the phases between sampling and the commit, in order.

    They are those that the trainer defines, without those that its configuration leaves idle.
    """
    idle = trainer.idle_phases()
    return [
        phase
        for phase in BATCH_PHASES
        if hasattr(trainer, phase.method) and phase.method not in idle
    ]


def run_phase(
    trainer: "PPOTrainer",
    phase: Phase,
    key: CallKey,
    batch: BatchRef | None = None,
    *,
    deadline_s: float,
) -> PhaseResult:
    """Run one phase on this process's copy of the trainer.

    Args:
        trainer: The copy; its `state` is what earlier phases left.
        phase: Which one.
        key: Names attempt, step and try; the phase's calls to collaborators carry it.
        batch: The leased batch, for the phases after sampling.
        deadline_s: Seconds that the phase may take; its own waits end a little earlier, so that
            the error names what was waited for.

    Raises:
        StateChangeError: the body changed an attribute other than `state`; names it.
    """
    trainer.call_key = key
    trainer.deadline_s = OWN_SHARE * deadline_s
    before = {name: (value, _plain_copy(value)) for name, value in vars(trainer).items()}
    arguments = () if batch is None else (batch,)
    result = getattr(trainer, phase.method)(*arguments)
    changed = _changed_attributes(before, vars(trainer))
    if changed:
        raise StateChangeError(
            f"{type(trainer).__name__}.{phase.method} changed {', '.join(changed)}; a phase runs "
            "on a copy, so the change would be lost: keep such values in self.state"
        )
    if isinstance(result, BatchRef):
        return PhaseResult(metrics={}, state=trainer.state, batch=result)
    if isinstance(result, tuple):
        sampled, metrics = result
        return PhaseResult(metrics=metrics, state=trainer.state, batch=sampled)
    return PhaseResult(metrics=result or {}, state=trainer.state)


def _plain_copy(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, dict | list | set) else value


def _changed_attributes(before: dict[str, tuple[Any, Any]], after: dict[str, Any]) -> list[str]:
    names = (before.keys() | after.keys()) - {"state"}
    return sorted(name for name in names if _is_changed(name, before, after))


def _is_changed(name: str, before: dict[str, tuple[Any, Any]], after: dict[str, Any]) -> bool:
    if name not in before or name not in after:
        return True
    value, copied = before[name]
    if after[name] is not value:
        return True
    return isinstance(value, dict | list | set) and value != copied
