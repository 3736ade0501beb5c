"""The advantage phase: rewards of a leased batch to per-token advantages in the queue.

Rows of one uid are a group; rows of one session share its outcome. Rollout correction is made here
too, where the whole batch is at hand: it writes weights and a mask for the loss and touches neither
response_mask nor the statistics of the advantages, so that the phase may run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlcore.algorithms import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    Estimator,
    correct_rollout,
    masked_mean,
    masked_var,
)
from rlcore.buffer.transfer_queue import QueueClient
from rlcore.config import RunConfig
from rlcore.config.arguments import estimator_settings, weight_settings
from rlcore.config.corrections import rejections
from rlcore.errors import DataError
from rlcore.trainer.reference_critic import KLPenalty
from rlcore.types import BASELINE_TAG, SampledBatch

PENALTY_COLUMNS = ("old_log_probs", "ref_log_prob")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSpec:
    """What the configuration asks of this phase."""

    estimator: Estimator
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the estimator."""
    reward_keys: Sequence[str] = ()
    """Names of the rewards that an estimator of several combines."""
    weights: Mapping[str, Any] | None = None
    """Arguments of `rollout_is_weights`; None: no weights."""
    rejections: Sequence[Mapping[str, Any]] = ()
    """Arguments of one `rejection_mask` each."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "AdvantageSpec":
        """Take what concerns this phase out of the run's configuration.

        Raises:
            ConfigError: the estimator is not registered.
        """
        name = config.algorithm.adv_estimator
        estimator = ADV_ESTIMATORS.get(name)
        corrects = not config.algorithm.rollout_correction.bypass_mode
        return cls(
            estimator=estimator,
            settings=estimator_settings(config, name, estimator.reads),
            reward_keys=config.algorithm.gdpo_reward_keys or (),
            weights=weight_settings(config) if corrects else None,
            rejections=rejections(config) if corrects else (),
        )

    @property
    def corrects(self) -> bool:
        """Whether log-probs of engine and trainer are compared."""
        return self.weights is not None or bool(self.rejections)

    @property
    def columns(self) -> list[str]:
        """What is read of the batch."""
        wanted = ["response_mask", "rm_scores"]
        wanted += ["values"] if "values" in self.estimator.needs else []
        return wanted + (["old_log_probs", "rollout_log_probs"] if self.corrects else [])


def compute_advantage(
    queue: QueueClient,
    partition_id: str,
    batch: SampledBatch,
    spec: AdvantageSpec,
    *,
    kl: KLPenalty | None = None,
) -> dict[str, float]:
    """Write `advantages` and `returns` of every row, and what corrects it; return their metrics.

    Advantages are 0 where `response_mask` is 0.

    Args:
        queue: Holds the rows.
        partition_id: Where in it.
        batch: The leased rows.
        spec: What is asked for.
        kl: Penalty that is taken off the rewards.

    Raises:
        DataError: a row is incomplete, or a reward of `reward_keys` or a baseline is missing.
        ValueError: the numbers are not fit for the estimator.
    """
    columns = {*spec.columns, *(PENALTY_COLUMNS if kl is not None else ())}
    rows = queue.get(partition_id, batch.keys, sorted(columns))
    lengths = [len(row) for row in rows["response_mask"]]
    padded = {name: pad_sequence(values, batch_first=True) for name, values in rows.items()}
    mask = padded["response_mask"]  # [B, T]
    rewards = padded["rm_scores"]
    scores = torch.tensor([tag["reward"] for tag in batch.tags], dtype=torch.float32)
    penalty: dict[str, float] = {}
    if kl is not None:
        rewards, scores, penalty = kl(padded, scores, mask)
    inputs = AdvantageInputs(
        mask=mask,
        token_rewards=rewards,
        scores=scores,
        groups=[tag["uid"] for tag in batch.tags],
        sessions=[tag["session_id"] for tag in batch.tags],
        out_index=[int(key.rpartition("_")[2]) for key in batch.keys],
        values=padded.get("values"),
        baselines=_baselines(batch) if "baselines" in spec.estimator.needs else None,
        score_matrix=_score_matrix(batch, spec.reward_keys) if spec.reward_keys else None,
    )
    advantages, returns = spec.estimator(inputs, **spec.settings)
    metrics = _metrics(advantages, returns, mask) | penalty
    if inputs.values is not None:
        metrics |= value_metrics(inputs.values, returns, mask)
    if inputs.baselines is not None:
        metrics["critic/baselines/mean"] = float(inputs.baselines.mean())
    written = {"advantages": advantages, "returns": returns}
    if spec.corrects:
        correction = correct_rollout(
            padded["old_log_probs"],
            padded["rollout_log_probs"],
            mask,
            spec.weights,
            spec.rejections,
        )
        metrics |= {f"rollout_corr/{name}": v for name, v in correction.metrics.items()}
        if spec.rejections:
            written["train_mask"] = correction.mask
        if correction.is_weights is not None:
            written["rollout_is_weights"] = correction.is_weights
    queue.put(
        partition_id,
        batch.keys,
        {name: _cut(values, lengths, name) for name, values in written.items()},
    )
    return metrics


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Return verl's metrics of values, and how much of the returns' variance they explain.

    Explained variance is 1 - var(returns - values) / var(returns): 1 for perfect values, 0 for a
    constant, negative for worse; 0 where all returns are equal.

    Args:
        values: The critic's, [B, T].
        returns: As many.
        mask: Valid tokens.
    """
    valid = values[mask.bool()]
    spread = masked_var(returns, mask, unbiased=False).item()
    rest = masked_var(returns - values, mask, unbiased=False).item()
    return {
        "critic/values/mean": masked_mean(values, mask).item(),
        "critic/values/max": valid.max().item() if valid.numel() else 0.0,
        "critic/values/min": valid.min().item() if valid.numel() else 0.0,
        "critic/vf_explained_var": 1.0 - rest / spread if spread else 0.0,
    }


def copy_rollout_log_probs(
    queue: QueueClient, partition_id: str, batch: SampledBatch
) -> dict[str, float]:
    """Write the engine's log-probs as `old_log_probs` (bypass mode); there are no metrics.

    Raises:
        DataError: a row is incomplete.
    """
    rows = queue.get(partition_id, batch.keys, ["rollout_log_probs"])
    queue.put(partition_id, batch.keys, {"old_log_probs": rows["rollout_log_probs"]})
    return {}


def _cut(values: Tensor, lengths: list[int], name: str) -> list[Tensor]:
    """One tensor per row, without padding, in the column's type."""
    typed = values.long() if name == "train_mask" else values.float()
    return [row[:length] for row, length in zip(typed, lengths, strict=True)]


def _baselines(batch: SampledBatch) -> Tensor:
    """Score of the greedy response to each row's prompt, [B]."""
    for row_key, tag in zip(batch.keys, batch.tags, strict=True):
        if BASELINE_TAG not in tag:
            raise DataError(
                f"row {row_key} has no baseline: its group was sampled without a greedy response"
            )
    return torch.tensor([tag[BASELINE_TAG] for tag in batch.tags], dtype=torch.float32)


def _score_matrix(batch: SampledBatch, keys: Sequence[str]) -> Tensor:
    """Named rewards of every row, [B, K]."""
    found: list[list[float]] = []
    for row_key, tag in zip(batch.keys, batch.tags, strict=True):
        extra = tag["reward_extra"]
        missing = [key for key in keys if key not in extra]
        if missing:
            raise DataError(
                f"row {row_key} lacks the rewards {', '.join(missing)} of "
                f"algorithm.gdpo_reward_keys; the reward function returned "
                f"{', '.join(extra) or 'none besides the score'}"
            )
        found.append([float(extra[key]) for key in keys])
    return torch.tensor(found, dtype=torch.float32)


def _metrics(advantages: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    valid = {"advantages": advantages[mask.bool()], "returns": returns[mask.bool()]}
    return {
        f"critic/{name}/{kind}": float(getattr(values, kind)()) if values.numel() else 0.0
        for name, values in valid.items()
        for kind in ("mean", "max", "min")
    }
