"""All responses of a step or validation as files of the user's (verl's keys and names).

One JSON line per trajectory: input, output, gts, score, step, and what the reward function said
beside the score. `{step}.jsonl`; later inner steps of a step are `{step}.{inner_step}.jsonl`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.dataset import index_of_uid
from rlcore.errors import ConfigError
from rlcore.trainer.late_rewards import RowStore
from rlcore.trainer.prompt_source import PromptSource
from rlcore.trainer.run_folder import write_atomically
from rlcore.types import PromptSpec, SampledBatch, SessionRecord


def dump_batch(
    folder: str, queue: RowStore, partition_id: str, batch: SampledBatch, prompts: PromptSource
) -> None:
    """Write the trajectories of a scored batch; writing again replaces the file.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    rows = queue.get(partition_id, batch.keys, ["prompts", "responses"])
    tokenizer = prompts.tokenizer()
    texts = {
        name: [str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)) for ids in column]
        for name, column in rows.items()
    }
    lines = [
        {
            **tag["reward_extra"],
            "input": prompt,
            "output": response,
            "gts": prompts.train_fields(index_of_uid(tag["uid"]))["reward_model"]["ground_truth"],
            "score": tag["reward"],
            "step": batch.global_step,
            "key": key,
        }
        for key, tag, prompt, response in zip(
            batch.keys, batch.tags, texts["prompts"], texts["responses"], strict=True
        )
    ]
    part = f".{batch.inner_step}" if batch.inner_step else ""
    _write(Path(folder) / f"{batch.global_step}{part}.jsonl", lines, "rollout_data_dir")


def dump_validation(
    folder: str,
    global_step: int,
    specs: Sequence[PromptSpec],
    settled: Mapping[str, Sequence[SessionRecord]],
    texts: Mapping[str, str],
) -> None:
    """Write the trajectories of a validation, and failed sessions with their error.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    lines = [
        {
            **record.reward_extra,
            "input": "\n".join(str(message.get("content")) for message in spec.raw_prompt),
            "output": text,
            "gts": spec.fields["reward_model"]["ground_truth"],
            "score": record.reward,
            "step": global_step,
            "error": record.error_message or None,
        }
        for spec in specs
        for record in settled[spec.uid]
        for text in ([texts[key] for key in record.keys] or [None])
    ]
    _write(Path(folder) / f"{global_step}.jsonl", lines, "validation_data_dir")


def _write(path: Path, lines: Sequence[Mapping[str, Any]], key: str) -> None:
    text = "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"trainer.{key}={path.parent}: cannot be written to: {error}") from error
