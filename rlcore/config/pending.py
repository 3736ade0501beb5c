"""Keys that are in the tree and are not read (yet): their markers, one constant a feature.

A marked key is typed, described and checked like any other. `NotYet` refuses it by name unless its
value asks for what happens anyway; `Hint` takes every valid value, since it changes speed or memory
of something that is not in use. A marker on a section holds for every key below it. When a feature
lands, its markers go and its keys are honoured: nothing else in this package has to change.
"""

from dataclasses import dataclass
from typing import Any, Final

from rlcore.config.base import SchemaNote

LEAVE_OUT: Final = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class NotYet(SchemaNote):
    """The feature is not there: only the default is taken, and what else asks for nothing."""

    reason: str
    fix: str = LEAVE_OUT
    satisfied: tuple[Any, ...] = ()
    """Values besides the default that ask for what happens anyway."""

    def notes(self) -> dict[str, str]:
        """Return the reason, for editors."""
        return {"not_yet": self.reason}

    def admits(self, value: Any, default: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        return value == default or value in self.satisfied


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint(SchemaNote):
    """Every valid value is taken, with a notice: it changes nothing of what is computed."""

    reason: str
    fix: str = LEAVE_OUT

    def notes(self) -> dict[str, str]:
        """Return the reason, for editors."""
        return {"no_effect": self.reason}


Marker = NotYet | Hint

# --- issue "Algorithms and the training engine"
CRITIC_CHECKPOINTS: Final = NotYet(
    reason="the critic's weights lie in the policy's checkpoints",
    fix="set trainer.max_actor_ckpt_to_keep",
)
ADAPTER_PATH: Final = NotYet(reason="adapters start at 0; going on from one is not there yet")
HOSTS: Final = NotYet(reason="training runs on one host so far", fix="set it to 1")
DEVICE: Final = NotYet(reason="training runs on the CPU so far", fix="set it to cpu")

# --- issue "Asynchrony"
GEN_BATCH: Final = Hint(reason="a step's prompts are fed together, later ones one by one")
LENDING: Final = NotYet(reason="idle training devices are not lent to generation")
REFILL: Final = NotYet(reason="failed groups are dropped and replaced in every mode")
QUEUE_ALWAYS: Final = Hint(reason="rows always travel through TransferQueue")
STORAGE_SIZE: Final = Hint(reason="the storage grows with the run")
PROMETHEUS: Final = NotYet(reason="Prometheus metrics are not there yet")

# --- issue "vLLM, and weight updates"
PIPELINE: Final = Hint(reason="there is one stage")
FREE_CACHE: Final = Hint(reason="replicas sleep while the policy trains, where they share devices")
LOAD_FORMAT: Final = Hint(reason="an engine reads the model folder when it starts")
ROLLOUT_POOL: Final = NotYet(reason="generation shares the training host so far")

# --- issue "Agents, tools, rewards and data"
REWARD_MANAGER_MODULE: Final = NotYet(
    reason="reward managers are registered by name",
    fix="register it (@REWARD_MANAGERS.register) in a file of trainer.user_modules, and set "
    "reward.reward_manager.name",
)
REWARD_POOL: Final = Hint(
    reason="it sizes a pool of GPUs that is not in use; on the CPU set "
    "reward.reward_model.rollout.num_replicas"
)
