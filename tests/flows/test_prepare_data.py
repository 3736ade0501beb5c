"""The flow `prepare_data`: a data set whole, shown and announced, or a Failed run and nothing."""

import asyncio

import pytest
from prefect.client.orchestration import get_client

from flows.prepare_data import prepare_data
from rlcore.errors import DataError

pytestmark = pytest.mark.integration


async def artifacts():
    async with get_client() as client:
        return {a.key: a.data for a in await client.read_artifacts() if a.key}


def test_a_data_set_is_made_and_shown(prefect_session, tmp_path):
    settings = {"size": 20, "test_size": 5}
    [report] = asyncio.run(prepare_data("chain_sum", str(tmp_path / "d"), settings))
    assert (report["num_train"], report["num_test"]) == (20, 5)
    assert (tmp_path / "d" / "train.parquet").is_file()
    shown = asyncio.run(artifacts())["prepared-data"]
    assert f"digest            {report['digest']}" in shown
    assert "![lengths](data:image/png;base64," in shown
    # Asked again it is left as it is, and told again.
    [again] = asyncio.run(prepare_data("chain_sum", str(tmp_path / "d"), settings))
    assert again == report


def test_a_failure_leaves_nothing_and_says_why(prefect_session, tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("question,answer\na,1\nb,\n")
    with pytest.raises(DataError, match=r"q.csv line 3: answer is empty"):
        asyncio.run(prepare_data("questions", str(tmp_path / "d"), {"file": str(path)}))
    assert [p.name for p in tmp_path.iterdir()] == ["q.csv"]
