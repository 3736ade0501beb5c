"""Values of honoured keys that mean something in verl and that rollflow does not do: a table."""

from dataclasses import dataclass
from typing import Any, Final

from rlcore.config.verl_keys import ANY, AnyValue

_A: Final = "actor_rollout_ref."


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedValue:
    """Values of an honoured key that mean something in verl and that rollflow does not do."""

    values: tuple[Any, ...] | AnyValue
    reason: str
    fix: str

    def names(self, value: Any) -> bool:
        """Whether `value`, or an item of it, is one of these values."""
        items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
        return isinstance(self.values, AnyValue) or any(item in self.values for item in items)


_NO_SCHEDULE: Final = RefusedValue(
    values=("linear", "wsd"),
    reason="this schedule is not there yet",
    fix="set it to constant or cosine",
)

REFUSED_VALUES: dict[str, RefusedValue] = {
    "trainer.device": RefusedValue(
        values=("npu",), reason="training runs on CPUs and NVIDIA GPUs", fix="set it to cpu"
    ),
    f"{_A}actor.kl_loss_type": RefusedValue(
        values=("full",),
        reason="the KL over the whole vocabulary is not computed (nor in verl)",
        fix="set it to low_var_kl",
    ),
    "algorithm.kl_penalty": RefusedValue(
        values=("full",),
        reason="the KL over the whole vocabulary is not computed (nor in verl)",
        fix="set it to kl",
    ),
    "distillation.distillation_loss.loss_mode": RefusedValue(
        values=("forward_kl_topk", "reverse_kl_topk", "reverse_kl_topk+", "jsd_topk", "full"),
        reason="it needs the teacher's distribution; of it the sampled token alone is computed",
        fix="set it to k3, or to k1 with use_policy_gradient=true",
    ),
    f"{_A}actor.optim.lr_scheduler_type": _NO_SCHEDULE,
    "critic.optim.lr_scheduler_type": _NO_SCHEDULE,
    f"{_A}rollout.top_p": RefusedValue(
        values=ANY,
        reason="the trainer computes log-probs of the full distribution and cannot reproduce it",
        fix="set it to 1",
    ),
    f"{_A}rollout.top_k": RefusedValue(
        values=ANY,
        reason="the trainer computes log-probs of the full distribution and cannot reproduce it",
        fix="set it to -1",
    ),
    f"{_A}rollout.dtype": RefusedValue(
        values=("float16", "half", "auto", "fp8"),
        reason="the embedded engine computes in bfloat16 or float32",
        fix="set it to one of the two",
    ),
    f"{_A}rollout.calculate_log_probs": RefusedValue(
        values=(False,),
        reason="the engine reports log-probs anyway, and engine and trainer are compared by them",
        fix="leave it out",
    ),
}  # fmt: skip
