"""Alarm when engine and trainer do not agree about the log-probs of what was just sampled.

Both compute the same function of the same weights. In float32 they differ in the last bits; a
larger gap means other weights, another temperature or a broken kernel, and what is trained is then
not what was sampled. In bfloat16 the gap is that of the type and is reported only.
"""

import logging
from collections.abc import Mapping

from rlcore.config import RunConfig

logger = logging.getLogger(__name__)

GAPS = {
    "mean": "training/rollout_logp_diff_mean",
    "max": "training/rollout_logp_diff_max",
}
ALARM = "training/rollout_logp_alarm"
FLOAT32_LIMITS = {"mean": 1e-5, "max": 1e-3}
"""Nats per token; seen with the embedded engine on SmolLM2: 3e-6 and 2e-5."""

VLLM_MEAN = 2e-5
"""Seen with vLLM on a CPU: 1e-5 on SmolLM2, nearly all of it one-sided: torch's float32 log_softmax
over 49,152 tokens is itself 7e-6 off the value in float64. 3e-6 on a vocabulary of 100."""


def limits_of(config: RunConfig) -> dict[str, float]:
    """Return the bounds that hold for a run, by `mean` and `max`; none where nothing is known.

    A limit that is not set follows from the types: both in float32, and every token of this step's
    weights, which is so in sync mode.
    """
    alarm = config.actor_rollout_ref.rollout.log_probs_alarm
    is_exact = (
        config.actor_rollout_ref.actor.dtype == "float32"
        and config.actor_rollout_ref.rollout.dtype == "float32"
        and config.trainer.v1.trainer_mode == "sync"
    )
    limits = dict(FLOAT32_LIMITS)
    if config.actor_rollout_ref.rollout.name == "vllm":
        limits["mean"] = VLLM_MEAN
    given = {"mean": alarm.mean, "max": alarm.max}
    found = {name: value for name, value in given.items() if value is not None}
    return {**(limits if is_exact else {}), **found}


def watch_engine(config: RunConfig, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics`, with the alarm (0 or 1) where a limit holds; a gap above it is logged."""
    limits = {n: limit for n, limit in limits_of(config).items() if GAPS[n] in metrics}
    if not limits:
        return dict(metrics)
    # A gap that is not a number is above any limit.
    above = [n for n, limit in limits.items() if not metrics[GAPS[n]] <= limit]
    if above:
        logger.warning(
            "engine and trainer disagree about the log-probs of this step's tokens: %s; were the "
            "weights published as they are trained, and does %s sample at the trainer's "
            "temperature?",
            ", ".join(f"{n} {metrics[GAPS[n]]:.2g} (limit {limits[n]:g})" for n in above),
            config.actor_rollout_ref.rollout.name,
        )
    return {**metrics, ALARM: float(bool(above))}
