"""Validation: generate for the held-out prompts, score, report, write the generations."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.reward.extraction import ANSWER_EXTRACTORS
from rlcore.trainer.dumps import dump_validation
from rlcore.trainer.late_rewards import LateScorer
from rlcore.trainer.prompt_source import PromptSource
from rlcore.trainer.run_folder import write_atomically
from rlcore.trainer.validation_metrics import accuracy_of, question_key, validation_metrics
from rlcore.types import CallKey, PromptSpec, SessionRecord


def run_validation(  # noqa: PLR0913  the options of a phase
    *,
    prompts: PromptSource,
    ledger: LedgerClient,
    queue: QueueClient,
    key: CallKey,
    partition_id: str,
    folder: Path,
    deadline_s: float,
    scorer: LateScorer | None = None,
    data_dir: str | None = None,
) -> dict[str, float]:
    """Run the held-out prompts through the replicas that serve now.

    A failed session counts as wrong; it has no reward and is not in the mean reward. What an
    earlier try of this validation left is removed first. Where the weights that the run started
    with were validated (step 0), later validations are compared with them.

    Args:
        prompts: Gives the held-out prompts.
        ledger: Takes the prompts and says how their sessions ended.
        queue: Holds the responses.
        key: Of this phase.
        partition_id: `{run_id}/val`.
        folder: The run folder; generations go to `generations/step-NNNN.jsonl` in it.
        deadline_s: Seconds until the whole set must have settled.
        scorer: Scores the sessions, where agent loop workers do not.
        data_dir: Folder of the user's for all responses.

    Returns:
        verl's `val-core/{data_source}/acc/mean@N` and `val-aux/...`; see validation_metrics.py.

    Raises:
        DeadlineExceededError: prompts have not settled; names them.
    """
    queue.clear(partition_id, ledger.discard(key, partition_id))
    specs = prompts.val_specs(global_step=key.global_step)
    ledger.feed(key, specs)
    settled = ledger.wait_settled(key, partition_id, deadline_s)
    texts = _response_texts(prompts, queue, partition_id, settled)
    if scorer is not None:
        settled = scorer.score_settled(specs, settled, texts)
    write_generations(folder, key.global_step, specs, settled, texts)
    if data_dir is not None:
        dump_validation(data_dir, key.global_step, specs, settled, texts)
    queue.clear(partition_id, ledger.discard(key, partition_id))
    base = base_accuracies(folder) if key.global_step > 0 else None
    return validation_metrics(specs, settled, base, answers_of(specs, settled, texts))


def answers_of(
    specs: Sequence[PromptSpec],
    settled: Mapping[str, list[SessionRecord]],
    texts: Mapping[str, str],
) -> dict[str, str | None]:
    """Return row key -> answer, where a row says how it is found (`extra_info.extraction`).

    A session answers by its last trajectory.
    """
    answers: dict[str, str | None] = {}
    for spec in specs:
        name = (spec.fields.get("extra_info") or {}).get("extraction")
        if not isinstance(name, str) or name not in ANSWER_EXTRACTORS:
            continue
        extract = ANSWER_EXTRACTORS.get(name)
        last_keys = [record.keys[-1] for record in settled[spec.uid] if record.keys]
        answers |= {key: extract(texts[key]) for key in last_keys}
    return answers


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


def write_generations(
    folder: Path,
    global_step: int,
    specs: Sequence[PromptSpec],
    settled: Mapping[str, list[SessionRecord]],
    texts: Mapping[str, str],
) -> None:
    """Write one line per session, failed ones with their error, or no file at all.

    Args:
        folder: The run folder.
        global_step: Names the file, `generations/step-NNNN.jsonl`.
        specs: The held-out prompts.
        settled: Uid -> how its sessions ended.
        texts: Row key -> response.
    """
    path = generations_path(folder, global_step)
    path.parent.mkdir(exist_ok=True)
    lines = [
        json.dumps(_line(global_step, spec, record, texts), ensure_ascii=False, default=str)
        for spec in specs
        for record in settled[spec.uid]
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def generations_path(folder: Path, global_step: int) -> Path:
    """Return where a validation's generations are."""
    return folder / "generations" / f"step-{global_step:04d}.jsonl"


def base_accuracies(folder: Path) -> dict[str, float]:
    """Return the accuracy per held-out prompt of the validation before step 1; empty if none was.

    Sessions of one prompt are averaged.
    """
    path = generations_path(folder, 0)
    if not path.is_file():
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            key = question_key(record["index"], [{"content": record["prompt"]}])
            found[key].append(record["acc"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def _line(
    global_step: int, spec: PromptSpec, record: SessionRecord, texts: Mapping[str, str]
) -> dict[str, Any]:
    return {
        **record.reward_extra,
        "step": global_step,
        "index": spec.index,
        "session": record.session_id,
        "data_source": spec.fields.get("data_source"),
        "prompt": spec.raw_prompt[-1]["content"],
        "ground_truth": (spec.fields.get("reward_model") or {}).get("ground_truth"),
        "responses": [texts[key] for key in record.keys],
        "score": record.reward,
        "acc": accuracy_of(record),
        "error": record.error_message or None,
    }
