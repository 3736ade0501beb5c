"""Keys and values of a fixed number of slots, and the attention that reads them.

Legend: S slots, L columns, H key/value heads, G query heads per key/value head, D head size, W
block width. At decode every slot writes its token's key and value into its own next column and
attends to its own columns; the tensors have S rows whatever runs, so that each row's numbers do not
depend on the others.

The number of columns must not leak into a row's numbers either. A matrix product over more columns
than a row needs adds zeros only, but its kernel may group the additions differently (seen with MKL
in float32 from 208 columns on, with 4 or more query rows). So attention works on blocks of W
columns, each the same product every time, and joins them in a fixed order; a block without a column
of the row has weight zero exactly. The last block is cut to the columns in use where that was seen
to give the same bits on this machine (`narrow_widths`): memory traffic is what attention costs.

Nor must the slot's index. With several threads each has a part of the slots, and a scratch buffer
of its own whose alignment follows from G; MKL's products in float32 differ between alignments (seen
with 2 threads and G = 3: the first half of the slots against the second, 0.1 % of the numbers in
the last bit). So attention takes as many query rows per head as were seen to give the same bits in
every slot on this machine (`query_rows`), the rows beyond G being zeros.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from rlcore.errors import ConfigError, RolloutError

logger = logging.getLogger(__name__)

BLOCK_WIDTH = 128
_NARROW = (32, 64, 96)
"""Widths that the last block may be cut to."""
_ROWS = (4, 8, 16)
"""Numbers of query rows that are tried beside the model's own."""
_NUM_COMPARED = 200_000
"""Results that are compared to tell whether two ways to compute them give the same bits."""
ATTENTION_NAME = "rollflow_slots"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Attention arguments of some model families that this one does not honour."""


class SlotCache(Cache):
    """Key/value store of the slots, in the form a transformers model writes to and reads from.

    | call | consumes | produces |
    |---|---|---|
    | `begin_prefill` | prompt rows, the slots each goes to | model writes these columns |
    | `begin_decode` | a position per slot | model writes one column, reads whole blocks |
    | `copy_prefix` | source and target slots | targets hold the sources' first columns |
    """

    def __init__(
        self, *, num_layers: int, num_slots: int, num_columns: int, num_heads: int, group: int,
        head_size: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.num_columns = -(-num_columns // BLOCK_WIDTH) * BLOCK_WIDTH
        self._num_layers = num_layers
        self._shape = (num_slots, num_heads, self.num_columns, head_size)
        self._dtype = dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask = torch.empty(0)
        threads = torch.get_num_threads()
        rows = query_rows(num_slots, num_heads, group, head_size, dtype, threads)
        self._last_widths = (
            *narrow_widths(num_slots, num_heads, rows, head_size, dtype, threads),
            BLOCK_WIDTH,
        )
        self._row_offsets = torch.arange(num_slots) * self.num_columns
        self._head_offsets = torch.arange(num_slots * num_heads) * self.num_columns
        self._decoding = False
        self._write_at = torch.empty(0)
        self._rows = torch.empty(0)
        self._slots = torch.empty(0)
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        """Whether the store holds memory."""
        return bool(self._keys)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def allocate(self) -> None:
        """Get memory; every slot is empty. Does nothing when there is some."""
        if self.is_allocated:
            return
        # Zeros, not garbage: a masked column still takes part in sums, multiplied by zero.
        self._keys = [torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._num_layers)]
        self._values = [torch.zeros(self._shape, dtype=self._dtype) for _ in self._keys]
        self._mask = torch.full((self.num_slots, self.num_columns), torch.finfo(self._dtype).min)
        self._mask = self._mask.to(self._dtype)

    def release(self) -> None:
        """Give the memory back."""
        self._keys, self._values, self._mask = [], [], torch.empty(0)

    def start_slot(self, slot: int, prefix_length: int) -> None:
        """Let `slot` see its first `prefix_length` columns and no others."""
        self._mask[slot] = torch.finfo(self._dtype).min
        self._mask[slot, :prefix_length] = 0

    def begin_prefill(self, rows: list[int], slots: list[int]) -> None:
        """Expect keys of whole prompts: row `rows[i]` of the next forward goes to `slots[i]`."""
        self._decoding = False
        self._rows, self._slots = torch.tensor(rows), torch.tensor(slots)

    def begin_decode(self, positions: Tensor, width: int) -> Tensor:
        """Expect one key per slot, for column `positions[slot]`; return the mask of the forward.

        Args:
            positions: [S], the next column of each slot.
            width: columns that any slot needs, the new one included.

        Returns:
            [S, 1, 1, columns]: 0 where a slot may look, the type's minimum elsewhere.
        """
        self._decoding = True
        num_heads = self._shape[1]
        self._write_at = (
            self._head_offsets.view(-1, num_heads) + positions[:, None]
        ).view(-1)  # fmt: skip
        self._mask.view(-1).index_fill_(0, self._row_offsets + positions, 0)
        whole, rest = divmod(width - 1, BLOCK_WIDTH)
        last = next(w for w in self._last_widths if w > rest)
        return self._mask[:, None, None, : whole * BLOCK_WIDTH + last]

    def copy_prefix(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` columns from slot to slot; reads all before it writes any."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for store in (*self._keys, *self._values):
            store[target, :, :length] = store[source, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed and return what it attends to (called by the model).

        Raises:
            RolloutError: the store is released.
        """
        if not self.is_allocated:
            raise RolloutError("the key/value store is asleep: wake the engine up first")
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._decoding:
            head_size = self._shape[-1]
            keys.view(-1, head_size).index_copy_(
                0, self._write_at, key_states.reshape(-1, head_size)
            )
            values.view(-1, head_size).index_copy_(
                0, self._write_at, value_states.reshape(-1, head_size)
            )
            return keys, values
        length = key_states.shape[2]
        keys[self._slots, :, :length] = key_states[self._rows]
        values[self._slots, :, :length] = value_states[self._rows]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given, per slot."""
        return 0


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a transformers layer over a SlotCache (transformers' attention interface).

    Query heads that share a key/value head are taken as G query rows of one head: keys and values
    are read once and never repeated, a third of the memory traffic of `sdpa` at G = 3 and less.

    Args:
        module: the layer; unused.
        query: [rows, H*G, tokens, D].
        key: [S, H, L, D] at decode, [rows, H, tokens, D] at prefill.
        value: like `key`.
        attention_mask: what `begin_decode` returned; None at prefill, which is causal.
        scaling: factor of the scores.
        kwargs: what else transformers passes.

    Raises:
        ConfigError: the model's attention has a feature that is not implemented here.
    """
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported:
        raise ConfigError(
            f"rollout engine transformers: attention with {', '.join(unsupported)} is not "
            "supported; use a model with plain causal attention"
        )
    rows, num_query_heads, _, head_size = query.shape
    num_heads = key.shape[1]
    group = num_query_heads // num_heads
    if attention_mask is None:
        if group > 1:
            key, value = (
                t[:, :, None].expand(-1, -1, group, -1, -1).reshape(query.shape)
                for t in (key, value)
            )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return out.transpose(1, 2), None
    grouped = query.reshape(rows, num_heads, group, head_size)
    num_rows = query_rows(
        rows, num_heads, group, head_size, query.dtype, torch.get_num_threads()
    )  # fmt: skip
    if num_rows > group:
        grouped = torch.nn.functional.pad(grouped, (0, 0, 0, num_rows - group))
    out = _blockwise_attention(grouped, key, value, attention_mask, scaling)[:, :, :group]
    return out.reshape(rows, 1, num_query_heads, head_size), None


def _blockwise_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """[S, H, G, D]: softmax over all columns of `mask`, block by block in order."""
    total = log_total = None
    width = mask.shape[-1]
    for start in range(0, width, BLOCK_WIDTH):
        block = slice(start, min(start + BLOCK_WIDTH, width))
        out, log_sum = _attend(
            query, keys[:, :, block], values[:, :, block], attn_mask=mask[..., block], scale=scaling
        )
        if width <= BLOCK_WIDTH:
            return out
        out, log_sum = out.float(), log_sum[..., None]
        if total is None or log_total is None:
            total, log_total = out, log_sum
            continue
        joined = torch.logaddexp(log_total, log_sum)
        total = total * (log_total - joined).exp_() + out * (log_sum - joined).exp_()
        log_total = joined
    if total is None:
        raise RolloutError("attention over no column")
    return total.to(query.dtype)


@cache
def query_rows(
    num_slots: int, num_heads: int, group: int, head_size: int, dtype: torch.dtype, threads: int
) -> int:
    """Query rows per head, `group` or a few more, that give the same bits whatever the slot.

    Tried on random numbers that are the same in every slot, as many as in `narrow_widths`.
    `threads` is the process's thread count: a part of the question only.
    """
    for rows in (group, *(r for r in _ROWS if r > group)):
        if _is_same_in_every_slot((num_slots, num_heads, rows, head_size), dtype):
            return rows
    logger.warning(
        "%d threads, %s: attention differs between slots on this machine, so that a response may "
        "differ in the last bits with the slot it gets; ray.num_threads=1 prevents it",
        threads, dtype,
    )  # fmt: skip
    return group


def _is_same_in_every_slot(shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
    num_slots, num_heads, rows, head_size = shape
    generator = torch.Generator().manual_seed(0)

    def draw(num_rows: int) -> Tensor:
        one = torch.randn((1, num_heads, num_rows, head_size), generator=generator).to(dtype)
        return one.expand(num_slots, -1, -1, -1).contiguous()

    num_draws = -(-_NUM_COMPARED // (num_slots * num_heads * rows * head_size))
    for width in (*_NARROW, BLOCK_WIDTH):
        mask = torch.zeros(num_slots, 1, 1, width, dtype=dtype)
        for _ in range(num_draws):
            out, log_sum = _attend(draw(rows), draw(width), draw(width), attn_mask=mask)
            if not (torch.equal(out, out[:1].expand_as(out)) and torch.equal(
                log_sum, log_sum[:1].expand_as(log_sum)
            )):  # fmt: skip
                return False
    return True


@cache
def narrow_widths(
    num_slots: int, num_heads: int, group: int, head_size: int, dtype: torch.dtype, threads: int
) -> tuple[int, ...]:
    """Widths below W whose attention equals that over W columns bit for bit, on this machine.

    Tried on random numbers, enough of them: where a kernel adds in another order, about one result
    in 10 (float32) to 10,000 (bfloat16) differs, and _NUM_COMPARED and more are compared.
    `threads` is the process's thread count: a part of the question only.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (num_slots, num_heads, BLOCK_WIDTH, head_size)
    good = set(_NARROW)
    num_draws = -(-_NUM_COMPARED // (num_slots * num_heads * group * head_size))
    for _ in range(num_draws):
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        query = torch.randn((num_slots, num_heads, group, head_size), generator=generator).to(dtype)
        for width in sorted(good):
            mask = torch.zeros(num_slots, 1, 1, BLOCK_WIDTH, dtype=dtype)
            mask[..., width:] = torch.finfo(dtype).min
            mask[: num_slots // 2, ..., width // 2 :] = torch.finfo(dtype).min
            whole, whole_sum = _attend(query, keys, values, attn_mask=mask)
            part, part_sum = _attend(
                query, keys[:, :, :width], values[:, :, :width], attn_mask=mask[..., :width]
            )
            if not (torch.equal(whole, part) and torch.equal(whole_sum, part_sum)):
                good.discard(width)
    return tuple(sorted(good))


_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
AttentionInterface.register(ATTENTION_NAME, slot_attention)
