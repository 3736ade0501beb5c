"""Validation: generate for the held-out prompts, score, report, write the generations."""

import json
import math
from collections import defaultdict
from pathlib import Path

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.cluster.ledger import LedgerClient
from rlcore.trainer.prompt_source import PromptSource
from rlcore.types import CallKey, PromptSpec, SessionRecord


def run_validation(
    *,
    prompts: PromptSource,
    ledger: LedgerClient,
    queue: QueueClient,
    key: CallKey,
    partition_id: str,
    folder: Path,
    deadline_s: float,
) -> dict[str, float]:
    """Run the held-out prompts through the replicas that serve now.

    A failed session counts as wrong; it has no reward and is not in the mean reward. What an
    earlier try of this validation left is removed first.

    Args:
        prompts: Gives the held-out prompts.
        ledger: Takes the prompts and says how their sessions ended.
        queue: Holds the responses.
        key: Of this phase.
        partition_id: `{run_id}/val`.
        folder: The run folder; generations go to `generations/step-NNNN.jsonl` in it.
        deadline_s: Seconds until the whole set must have settled.

    Returns:
        verl's `val-core/{data_source}/acc/mean@N` and `val-aux/...`.

    Raises:
        DeadlineExceededError: prompts have not settled; names them.
    """
    queue.clear(partition_id, ledger.discard(key, partition_id))
    specs = prompts.val_specs(global_step=key.global_step)
    ledger.feed(key, specs)
    settled = ledger.wait_settled(key, partition_id, deadline_s)
    texts = _response_texts(prompts, queue, partition_id, settled)
    _write_generations(folder, key.global_step, specs, settled, texts)
    queue.clear(partition_id, ledger.discard(key, partition_id))
    return validation_metrics(specs, settled)


def validation_metrics(
    specs: list[PromptSpec], settled: dict[str, list[SessionRecord]]
) -> dict[str, float]:
    """Return accuracy and reward per data source, and over all prompts with standard error.

    The standard error treats prompts as independent: sqrt(p (1 - p) / n) for one session each.
    """
    accuracy: dict[str, list[float]] = defaultdict(list)
    reward: dict[str, list[float]] = defaultdict(list)
    num_failed = 0
    sessions_per_prompt = max((spec.num_sessions for spec in specs), default=1)
    for spec in specs:
        source = str(spec.fields.get("data_source", "unknown"))
        records = settled[spec.uid]
        num_failed += sum(record.is_failed for record in records)
        scored = [_accuracy(record) for record in records]
        accuracy[source].append(sum(scored) / len(scored))
        reward[source] += [r.reward for r in records if r.reward is not None]
    metrics: dict[str, float] = {}
    for source in accuracy:
        metrics[f"val-core/{source}/acc/mean@{sessions_per_prompt}"] = _mean(accuracy[source])
        if reward[source]:
            metrics[f"val-aux/{source}/reward/mean@{sessions_per_prompt}"] = _mean(reward[source])
    everything = [value for values in accuracy.values() for value in values]
    mean = _mean(everything)
    metrics["val-aux/accuracy"] = mean
    metrics["val-aux/accuracy_stderr"] = math.sqrt(
        sum((value - mean) ** 2 for value in everything) / len(everything) ** 2
    )
    metrics["val-aux/num_prompts"] = float(len(everything))
    metrics["val-aux/failed_sessions"] = float(num_failed)
    return metrics


def _accuracy(record: SessionRecord) -> float:
    if record.is_failed:
        return 0.0
    return float(record.reward_extra.get("acc", record.reward or 0.0))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _response_texts(
    prompts: PromptSource,
    queue: QueueClient,
    partition_id: str,
    settled: dict[str, list[SessionRecord]],
) -> dict[str, str]:
    keys = [key for records in settled.values() for record in records for key in record.keys]
    if not keys:
        return {}
    responses = queue.get(partition_id, keys, ["responses"])["responses"]
    tokenizer = prompts.tokenizer()
    return {
        key: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        for key, ids in zip(keys, responses, strict=True)
    }


def _write_generations(
    folder: Path,
    global_step: int,
    specs: list[PromptSpec],
    settled: dict[str, list[SessionRecord]],
    texts: dict[str, str],
) -> None:
    path = folder / "generations" / f"step-{global_step:04d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for spec in specs:
            for record in settled[spec.uid]:
                line = {
                    "step": global_step,
                    "index": spec.index,
                    "data_source": spec.fields.get("data_source"),
                    "prompt": spec.raw_prompt[-1]["content"],
                    "ground_truth": (spec.fields.get("reward_model") or {}).get("ground_truth"),
                    "responses": [texts[key] for key in record.keys],
                    "score": record.reward,
                    **record.reward_extra,
                    "error": record.error_message or None,
                }
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
