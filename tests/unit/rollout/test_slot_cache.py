"""Blockwise attention against plain attention, and its independence of other rows."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlcore.errors import ConfigError, RolloutError
from rlcore.rollout.slot_cache import (
    BLOCK_WIDTH,
    SlotCache,
    narrow_widths,
    query_rows,
    slot_attention,
)

SLOTS, HEADS, GROUP, SIZE = 16, 2, 4, 32


def _cache(columns, dtype=torch.float32):
    return SlotCache(
        num_layers=1, num_slots=SLOTS, num_columns=columns, num_heads=HEADS, group=GROUP,
        head_size=SIZE, dtype=dtype,
    )  # fmt: skip


def _fill(cache, lengths, generator):
    """Prefill every slot with random keys of the given length; return them."""
    stored = []
    for slot, length in enumerate(lengths):
        keys, values = (torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(2))
        cache.begin_prefill([0], [slot])
        cache.update(keys, values, 0)
        cache.start_slot(slot, length)
        stored.append((keys[0], values[0]))
    return stored


def _decode(cache, lengths, query, key, value):
    positions = torch.tensor(lengths)
    mask = cache.begin_decode(positions, max(lengths) + 1)
    keys, values = cache.update(key, value, 0)
    out, _ = slot_attention(torch.nn.Identity(), query, keys, values, mask)
    return out, mask.shape[-1]


@pytest.mark.parametrize("longest", [20, 100, 3 * BLOCK_WIDTH])
def test_decode_equals_plain_attention_over_each_slots_own_columns(longest):
    generator = torch.Generator().manual_seed(longest)
    lengths = [1 + (i * longest) // SLOTS for i in range(SLOTS)]
    cache = _cache(longest + 1)
    stored = _fill(cache, lengths, generator)
    query = torch.randn(SLOTS, HEADS * GROUP, 1, SIZE, generator=generator)
    key, value = (torch.randn(SLOTS, HEADS, 1, SIZE, generator=generator) for _ in range(2))
    out, _ = _decode(cache, lengths, query, key, value)
    for slot, (keys, values) in enumerate(stored):
        keys = torch.cat([keys, key[slot]], 1).repeat_interleave(GROUP, 0)
        values = torch.cat([values, value[slot]], 1).repeat_interleave(GROUP, 0)
        expected = scaled_dot_product_attention(query[slot], keys, values)
        torch.testing.assert_close(out[slot, 0], expected[:, 0], atol=2e-6, rtol=1e-5)


def test_a_row_is_bitwise_the_same_however_long_the_others_are():
    query, key, value = (
        torch.randn(SLOTS, heads, 1, SIZE, generator=torch.Generator().manual_seed(i))
        for i, heads in enumerate((HEADS * GROUP, HEADS, HEADS))
    )
    results, widths = [], set()
    for others in (1, 40, 90, 140, 300, 500):
        lengths = [23] + [others] * (SLOTS - 1)
        cache = _cache(512)
        # Slot 0 gets the same keys every time, the others random ones.
        _fill(cache, lengths, torch.Generator().manual_seed(5))
        out, width = _decode(cache, lengths, query, key, value)
        results.append(out[0].clone())
        widths.add(width)
    assert len(widths) >= 5
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_prefill_is_causal_and_grouped():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS * GROUP, 8, SIZE, generator=generator)
    key, value = (torch.randn(2, HEADS, 8, SIZE, generator=generator) for _ in range(2))
    out, _ = slot_attention(torch.nn.Identity(), query, key, value, None)
    for position in range(8):
        seen = slice(0, position + 1)
        expected = scaled_dot_product_attention(
            query[:, :, position : position + 1],
            key[:, :, seen].repeat_interleave(GROUP, 1),
            value[:, :, seen].repeat_interleave(GROUP, 1),
        )
        torch.testing.assert_close(out[:, position], expected[:, :, 0], atol=2e-6, rtol=1e-5)


def test_copy_prefix_reads_before_it_writes():
    cache = _cache(32)
    stored = _fill(cache, [8] * SLOTS, torch.Generator().manual_seed(1))
    cache.copy_prefix([0, 1], [1, 2], 8)
    cache.begin_decode(torch.full((SLOTS,), 8), 9)
    keys, values = cache.update(*(torch.zeros(SLOTS, HEADS, 1, SIZE) for _ in range(2)), 0)
    for slot, source in ((0, 0), (1, 0), (2, 1), (3, 3)):
        assert torch.equal(keys[slot, :, :8], stored[source][0])
        assert torch.equal(values[slot, :, :8], stored[source][1])


def test_release_frees_and_a_forward_then_is_an_error():
    cache = _cache(64)
    assert cache.num_bytes == 2 * SLOTS * HEADS * BLOCK_WIDTH * SIZE * 4
    cache.release()
    assert cache.num_bytes == 0
    with pytest.raises(RolloutError, match="asleep"):
        cache.update(torch.zeros(1, HEADS, 8, SIZE), torch.zeros(1, HEADS, 8, SIZE), 0)
    cache.allocate()
    assert cache.is_allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_widths_are_below_the_block(dtype):
    widths = narrow_widths(SLOTS, HEADS, GROUP, SIZE, dtype, torch.get_num_threads())
    assert widths == tuple(sorted(widths))
    assert all(0 < width < BLOCK_WIDTH for width in widths)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [2, 3])
def test_the_same_contents_give_the_same_bits_in_every_slot(dtype, threads, group):
    """Three query rows do not in float32 at two threads, where MKL is what multiplies."""
    torch.set_num_threads(threads)
    slots, heads, size, width = 16, 2, 16, 96
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        query, key, value = (
            torch.randn(1, *shape, generator=generator).to(dtype).expand(slots, -1, -1, -1)
            for shape in ((heads * group, 1, size), (heads, width, size), (heads, width, size))
        )
        mask = torch.zeros(slots, 1, 1, width, dtype=dtype)
        out, _ = slot_attention(torch.nn.Identity(), query, key, value, mask)
        assert torch.equal(out, out[:1].expand_as(out))
    rows = query_rows(slots, heads, group, size, dtype, threads)
    assert group <= rows <= 16


def test_attention_of_other_kinds_is_refused():
    tensor = torch.zeros(1, HEADS, 2, SIZE)
    with pytest.raises(ConfigError, match="sliding_window"):
        slot_attention(torch.nn.Identity(), tensor, tensor, tensor, None, sliding_window=4)
