"""Reading is streaming: three times the rows take the same memory."""

import importlib.util
from pathlib import Path

import pytest

GROWTH_MIB = 10
"""What 32,000 rows more may take."""
BENCH = Path(__file__).parents[2] / "bench" / "measure_data_check.py"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("measure_data_check", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_memory_does_not_grow_with_the_rows(measure, tiny_root, suffix):
    model = tiny_root / "models" / "tiny"
    # From 16,000 rows on: up to there the buffers of a parquet reader fill, 8 to 11 MiB.
    few = measure(16_000, model=model, suffix=suffix)
    many = measure(48_000, model=model, suffix=suffix)
    assert (few["rows"], many["rows"]) == (16_000, 48_000)
    # 32,000 rows more are over 60 MB as Python objects. What may grow is 32 bytes per row (index,
    # digests) and the noise of the allocator.
    assert many["mib_peak"] - few["mib_peak"] < GROWTH_MIB, (few, many)
    # At that pace a million rows stay within 1 GiB.
    steps_to_a_million = (1_000_000 - 48_000) / 32_000
    assert many["mib_peak"] + steps_to_a_million * GROWTH_MIB < 1024, many
