"""The advantage phase: rewards of a leased batch to per-token advantages in the queue."""

from collections.abc import Callable
from typing import Any

import torch

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.types import SampledBatch


def compute_advantage(
    queue: QueueClient,
    partition_id: str,
    batch: SampledBatch,
    *,
    estimator: Callable[..., Any],
    norm_by_std: bool,
) -> dict[str, float]:
    """Write `advantages` and `returns` of every row; return their metrics.

    Rows of one uid are a group; advantages are 0 where `response_mask` is 0.

    Raises:
        DataError: a row is incomplete.
    """
    masks = queue.get(partition_id, batch.keys, ["response_mask"])["response_mask"]
    lengths = [len(mask) for mask in masks]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)  # [B, T]
    scores = torch.tensor([tag["reward"] for tag in batch.tags], dtype=torch.float32)  # [B]
    groups = [tag["uid"] for tag in batch.tags]
    advantages = estimator(scores, groups, mask, norm_by_std=norm_by_std)  # [B, T]
    rows = [row[:length] for row, length in zip(advantages.float(), lengths, strict=True)]
    queue.put(partition_id, batch.keys, {"advantages": rows, "returns": rows})
    valid = advantages[mask.bool()]
    return {
        f"critic/{name}/{kind}": float(getattr(valid, kind)()) if valid.numel() else 0.0
        for name in ("advantages", "returns")
        for kind in ("mean", "max", "min")
    }
