"""Reads, checks and measures the rows of a data set once, as a stream, into a store."""

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlcore.config.data import DataConfig
from rlcore.data.duplicates import find_duplicates
from rlcore.data.rows import OURS, check_columns, check_row, tidy_messages
from rlcore.data.sources import Source, open_source
from rlcore.data.store import RowStore, StoreWriter, open_store, staged_store
from rlcore.data.tokenizer import count_tokens, render_chat
from rlcore.errors import DataError

logger = logging.getLogger(__name__)

FORMAT = 1
CHUNK_ROWS = 512
MAX_PROBLEMS = 20
"""So many wrong rows are listed; reading stops there."""
TOKENIZER_FILES = ("*token*", "*.jinja", "vocab*", "merges.txt", "*.model", "*.py", "config.json")


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What a store is made of."""

    sources: Sequence[Source]
    data: DataConfig
    max_samples: int = -1
    """Rows to use at most; -1 for all."""
    sample_seed: int | None = None
    """Chooses which, at random; None takes the first."""
    extra: Any = None
    """What else the rows depend on."""


@dataclass
class _Found:
    """Counters of one pass."""

    num_read: int = 0
    num_truncated: int = 0
    num_overlong: int = 0
    first_overlong: str = ""
    sum_tokens: int = 0
    min_tokens: int = 1 << 62
    max_tokens: int = 0
    data_sources: dict[str, str] = field(default_factory=dict[str, str])
    agent_names: dict[str, str] = field(default_factory=dict[str, str])
    hidden: set[str] = field(default_factory=set[str])
    problems: list[str] = field(default_factory=list[str])

    def problem(self, error: DataError) -> None:
        self.problems.append(str(error))
        if len(self.problems) >= MAX_PROBLEMS:
            self.raise_problems()

    def raise_problems(self) -> None:
        if len(self.problems) == 1:
            raise DataError(self.problems[0])
        if self.problems:
            stopped = " (reading stopped there)" if len(self.problems) >= MAX_PROBLEMS else ""
            listed = "\n  ".join(self.problems)
            raise DataError(f"{len(self.problems)} rows are wrong{stopped}:\n  {listed}")


def open_sources(paths: Sequence[str | Path]) -> list[Source]:
    """Open all files; all that are wrong are named at once.

    Raises:
        DataError: a file is missing, empty, damaged or of another kind.
    """
    opened: list[Source] = []
    problems: list[str] = []
    for path in paths:
        try:
            opened.append(open_source(Path(path)))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return opened


def build_store(
    request: BuildRequest, tokenizer: PreTrainedTokenizerBase, model_folder: Path
) -> RowStore:
    """Return the store of the request's usable rows; made now unless it is there.

    Memory does not grow with the number of rows but for 8 bytes per row.

    Raises:
        DataError: a file or row is wrong (named), or no prompt is short enough.
    """
    cache = Path(request.data.cache_dir)
    name = fingerprint(request, model_folder)
    ready = open_store(cache, name)
    if ready is not None:
        return ready
    files = [str(source.path) for source in request.sources]
    with staged_store(cache, name, files) as writer:
        found = _Found()
        for chunk in _chunks(_chosen_rows(request)):
            _take(chunk, request, tokenizer, writer, found)
        _conclude(request.data, writer, found)
        writer.finish(
            num_read=found.num_read,
            num_overlong=found.num_overlong,
            num_truncated=found.num_truncated,
            data_sources=found.data_sources,
            agent_names=found.agent_names,
            hidden_columns=sorted(found.hidden),
            tokens={
                "min": found.min_tokens,
                "mean": round(found.sum_tokens / found.num_read, 1),
                "max": found.max_tokens,
            },
        )
        find_duplicates(writer.folder)
    built = open_store(cache, name)
    assert built is not None, "a store that was just written is there"
    return built


def fingerprint(request: BuildRequest, model_folder: Path) -> str:
    """Return a name for everything that the kept rows depend on."""
    data = request.data
    settings = {
        "format": FORMAT,
        "transformers": version("transformers"),
        "files": [_stamps(source.path) for source in request.sources],
        "tokenizer": [
            _stamp(path)
            for pattern in TOKENIZER_FILES
            for path in sorted(model_folder.glob(pattern))
        ],
        "keys": [data.prompt_key, data.reward_fn_key, data.max_prompt_length, data.truncation],
        "filter": data.filter_overlong_prompts,
        "template": data.apply_chat_template_kwargs,
        "samples": [request.max_samples, request.sample_seed],
        "extra": request.extra,
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _stamps(path: Path) -> list[Any]:
    if path.is_dir():
        return [_stamp(file) for file in sorted(path.rglob("*")) if file.is_file()]
    return _stamp(path)


def _stamp(path: Path) -> list[Any]:
    facts = path.stat()
    return [str(path.resolve()), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


@dataclass(frozen=True, slots=True)
class _Read:
    file: int
    number: int
    origin: str
    row: dict[str, Any]


def _chosen_rows(request: BuildRequest) -> Iterator[_Read]:
    """Yield the rows to use, in file order."""
    keys = {
        "prompt_key": request.data.prompt_key,
        "data_source_key": request.data.reward_fn_key,
    }
    for source in request.sources:
        if source.schema is not None:
            check_columns(source.schema, str(source.path), **keys)
    position = 0
    chosen = _choose(request)
    for file, source in enumerate(request.sources):
        for number, row in source.rows():
            if chosen is None or chosen[position]:
                yield _Read(file, number, f"{source.path} row {number}", row)
            position += 1
            if chosen is not None and position == len(chosen):
                return


def _choose(request: BuildRequest) -> np.ndarray | None:
    """Return per row whether it is used, up to the last one that is; None for all."""
    if request.max_samples < 0:
        return None
    total = sum(source.count() for source in request.sources)
    if request.max_samples >= total:
        return None
    if request.sample_seed is None:
        return np.ones(request.max_samples, dtype=bool)
    generator = np.random.default_rng(request.sample_seed)
    chosen = np.zeros(total, dtype=bool)
    chosen[generator.choice(total, size=request.max_samples, replace=False)] = True
    return chosen[: int(np.flatnonzero(chosen)[-1]) + 1]


def _chunks(rows: Iterator[_Read]) -> Iterator[list[_Read]]:
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield chunk


def _take(
    chunk: list[_Read],
    request: BuildRequest,
    tokenizer: PreTrainedTokenizerBase,
    writer: StoreWriter,
    found: _Found,
) -> None:
    """Check, measure and write one chunk."""
    data = request.data
    good: list[_Read] = []
    texts: list[str] = []
    for read in chunk:
        try:
            row = _checked(read, data)
            texts.append(_rendered(read.origin, row["raw_prompt"], data, tokenizer))
            good.append(_Read(read.file, read.number, read.origin, row))
        except DataError as error:
            found.problem(error)
    found.num_read += len(chunk)
    found.hidden |= {name for name in chunk[0].row if name in OURS and name != data.prompt_key}
    for read, length in zip(good, count_tokens(tokenizer, texts), strict=True):
        if _is_kept(read.origin, length, data, found):
            try:
                writer.append(read.row, read.file, read.number)
            except DataError as error:
                found.problem(error)
            found.data_sources.setdefault(read.row[data.reward_fn_key], read.origin)
            if read.row.get("agent_name"):
                found.agent_names.setdefault(read.row["agent_name"], read.origin)


def _checked(read: _Read, data: DataConfig) -> dict[str, Any]:
    check_row(read.row, read.origin, prompt_key=data.prompt_key, data_source_key=data.reward_fn_key)
    row = dict(read.row)
    row["raw_prompt"] = tidy_messages(row.pop(data.prompt_key))
    return row


def _rendered(
    origin: str,
    messages: list[dict[str, Any]],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    # Templates refuse e.g. an order of roles by errors of jinja2 and of their own.
    from jinja2 import TemplateError

    try:
        text = render_chat(tokenizer, messages, data.apply_chat_template_kwargs)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{origin}: the prompt holds a lone surrogate, which no UTF-8 can hold ({error.reason})"
        ) from error
    except (
        TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
    ) as error:  # fmt: skip
        raise DataError(f"{origin}: the chat template refuses the prompt: {error}") from error
    if not text.strip():
        raise DataError(f"{origin}: the chat template gives an empty prompt")
    return text


def _is_kept(origin: str, num_tokens: int, data: DataConfig, found: _Found) -> bool:
    """Count a prompt's length; tell whether the prompt is used."""
    found.sum_tokens += num_tokens
    found.min_tokens = min(found.min_tokens, num_tokens)
    found.max_tokens = max(found.max_tokens, num_tokens)
    if num_tokens <= data.max_prompt_length:
        return True
    if data.filter_overlong_prompts or data.truncation == "error":
        found.num_overlong += 1
        if not found.first_overlong:
            found.first_overlong = f"{origin}: the prompt has {num_tokens} tokens"
        return False
    found.num_truncated += 1
    return True


def _conclude(data: DataConfig, writer: StoreWriter, found: _Found) -> None:
    """Raise what the whole pass has found wrong."""
    found.raise_problems()
    if found.num_overlong and not data.filter_overlong_prompts:
        raise DataError(
            f"{found.first_overlong}, more than data.max_prompt_length={data.max_prompt_length} "
            f"({found.num_overlong} of {found.num_read} prompts are too long, the longest has "
            f"{found.max_tokens} tokens); raise it, set data.filter_overlong_prompts=True to leave "
            "them out, or data.truncation=left, right or middle to cut them"
        )
    files = ", ".join(writer.files)
    if writer.num_rows == 0:
        raise DataError(
            f"{files}: none of {found.num_read} prompts has at most "
            f"data.max_prompt_length={data.max_prompt_length} tokens"
        )
    for count, what in (
        (found.num_overlong, "are left out"),
        (found.num_truncated, f"will be cut (data.truncation={data.truncation})"),
    ):
        if count:
            logger.warning(
                "%d of %d prompts of %s have more than %d tokens and %s",
                count, found.num_read, files, data.max_prompt_length, what,
            )  # fmt: skip
