"""How the rows of a micro-batch are laid out for one forward pass of the model.

Two layouts with the same answer. *Packed* (default): all tokens in one line without padding, every
shared piece once - the tokens all prompts begin with (chat template), the rest of each prompt,
then its responses. A token attends to the pieces it descends from and to its own piece up to
itself; positions restart after the prompt; the first response token is predicted from the prompt's
last position. On groups of 8 short responses this is a third of the padded tokens. *Padded*: one
right-padded row per trajectory, for models whose attention the packed form cannot express.

Legend: K tokens of the line, M response tokens of all rows, R rows of an attention block, Q and L
its queries and keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Packing = Literal["shared_prefix", "padded"]

MAX_BLOCK_PAIRS = 1 << 20
"""Query-key pairs of one attention block: bounds the scores in memory (4 bytes each per head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlock:
    """Queries that are computed together, and the keys each row of them may see."""

    queries: Int[Tensor, "R Q"]
    """Positions in the line; padding repeats position 0."""
    is_query: Bool[Tensor, "R Q"]
    keys: Int[Tensor, "R L"]
    bias: Float[Tensor, "R Q L"]
    """0 where the query sees the key, else -inf."""

    def to(self, device: torch.device) -> "AttentionBlock":
        """Return the block on `device`."""
        return AttentionBlock(
            queries=self.queries.to(device),
            is_query=self.is_query.to(device),
            keys=self.keys.to(device),
            bias=self.bias.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One forward pass: the model's inputs, and where its hidden states predict responses."""

    model_inputs: dict[str, Any]
    predictors: Int[Tensor, " M"]
    """Index into the flattened hidden states of the position that predicts each target."""
    targets: Int[Tensor, " M"]
    """Response tokens, row after row."""
    num_tokens: int
    """Tokens that go through the model, padding included."""

    def to(self, device: torch.device) -> "Layout":
        """Return the layout on `device`; layouts are made on the CPU."""
        if device.type == "cpu":
            return self
        moved = {
            name: tuple(block.to(device) for block in value)
            if name == "attention_blocks"
            else value.to(device)
            for name, value in self.model_inputs.items()
        }
        return Layout(
            model_inputs=moved,
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            num_tokens=self.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of the line: its positions, and those of the pieces before it (its context)."""

    context: Tensor
    own: Tensor


def padded_layout(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Layout:
    """Return one right-padded row per trajectory."""
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    width = max(len(row) for row in rows)
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(width) < lengths[:, None]).long()
    predictors = [
        index * width + len(prompt) - 1 + torch.arange(len(response))
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    return Layout(
        model_inputs={"input_ids": input_ids, "attention_mask": attention_mask},
        predictors=torch.cat(predictors),
        targets=torch.cat(list(responses)),
        num_tokens=input_ids.numel(),
    )


def packed_layout(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    *,
    max_block_pairs: int = MAX_BLOCK_PAIRS,
) -> Layout:
    """Return all rows in one line in which every shared piece of a prompt stands once."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt.tolist()), []).append(row)
    num_shared = _shared_length(list(groups))
    first = prompts[0][:num_shared]
    pieces, positions, cursor = [first], [torch.arange(num_shared)], num_shared
    shared = torch.arange(num_shared)
    segments = [[_Segment(torch.arange(0), shared)] if num_shared else [], [], []]
    predictors: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(prompts)
    for rows in groups.values():
        rest = prompts[rows[0]][num_shared:]
        start = num_shared + len(rest)
        own = cursor + torch.arange(len(rest))
        pieces.append(rest)
        positions.append(num_shared + torch.arange(len(rest)))
        if len(rest):
            segments[1].append(_Segment(shared, own))
        cursor += len(rest)
        context = torch.cat([shared, own])
        for row in rows:
            length = len(responses[row])
            own = cursor + torch.arange(length)
            pieces.append(responses[row])
            positions.append(start + torch.arange(length))
            if length:
                segments[2].append(_Segment(context, own))
            predictors[row] = torch.cat([context[-1:], own[:-1]])[:length]
            cursor += length
    blocks = [block for level in segments for block in _blocks(level, max_block_pairs)]
    return Layout(
        model_inputs={
            "input_ids": torch.cat(pieces)[None],
            "position_ids": torch.cat(positions)[None],
            "attention_blocks": tuple(blocks),
        },
        predictors=torch.cat(predictors),
        targets=torch.cat(list(responses)),
        num_tokens=cursor,
    )


def _shared_length(prompts: list[tuple[int, ...]]) -> int:
    """Number of tokens that all prompts begin with."""
    shortest = min(len(prompt) for prompt in prompts)
    for index in range(shortest):
        if any(prompt[index] != prompts[0][index] for prompt in prompts):
            return index
    return shortest


def _blocks(segments: list[_Segment], max_pairs: int) -> list[AttentionBlock]:
    """Batch segments of similar length; long ones are cut along their queries."""
    pending = sorted(segments, key=lambda s: (len(s.own), len(s.context)), reverse=True)
    blocks: list[AttentionBlock] = []
    while pending:
        num_keys = len(pending[0].context) + len(pending[0].own)
        num_queries = len(pending[0].own)
        if num_queries * num_keys > max_pairs:
            step = max(max_pairs // num_keys, 1)
            starts = range(0, num_queries, step)
            blocks += [_block(pending[:1], start, start + step) for start in starts]
            pending = pending[1:]
            continue
        taken = 1
        for segment in pending[1:]:
            num_keys = max(num_keys, len(segment.context) + len(segment.own))
            # A segment of under half the queries would be mostly padding.
            fits = (taken + 1) * num_queries * num_keys <= max_pairs
            if not fits or 2 * len(segment.own) < num_queries:
                break
            taken += 1
        blocks.append(_block(pending[:taken], 0, num_queries))
        pending = pending[taken:]
    return blocks


def _block(segments: list[_Segment], start: int, stop: int) -> AttentionBlock:
    """Build the block of queries `start` to `stop` of every segment."""
    rows = len(segments)
    stop = min(stop, max(len(segment.own) for segment in segments))
    num_keys = max(len(s.context) + min(len(s.own), stop) for s in segments)
    queries = torch.zeros(rows, stop - start, dtype=torch.long)
    is_query = torch.zeros(rows, stop - start, dtype=torch.bool)
    keys = torch.zeros(rows, num_keys, dtype=torch.long)
    bias = torch.full((rows, stop - start, num_keys), float("-inf"))
    # A padding query sees one key, so that its softmax is a number; its result is dropped.
    bias[:, :, 0] = 0.0
    for row, segment in enumerate(segments):
        own = segment.own[start:stop]
        seen = torch.cat([segment.context, segment.own[:stop]])
        queries[row, : len(own)] = own
        is_query[row, : len(own)] = True
        keys[row, : len(seen)] = seen
        last = len(segment.context) + start + torch.arange(len(own))
        bias[row, : len(own)].masked_fill_(torch.arange(num_keys) <= last[:, None], 0.0)
    return AttentionBlock(queries=queries, is_query=is_query, keys=keys, bias=bias)
