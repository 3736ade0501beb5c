"""From an event to a candidate that waits for a decision, with a training that is a stand-in."""

import json

import pyarrow.parquet as pq
import pytest
from real_parts.beside import begin

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.first,
    pytest.mark.timeout(900),  # its set-up may wait for a training that begins
]


@pytest.fixture(scope="module")
def site(request, operated_site):
    begin(request, "outage_begun")  # at another site, whose server is away meanwhile
    rows = pq.read_table(operated_site.root / "data" / "tiny" / "train.parquet")
    for name, part in (("a", rows[:32]), ("b", rows[32:48]), ("c", rows[48:])):
        pq.write_table(part, operated_site.root / f"{name}.parquet")
    return operated_site


def ended(site, state, number):
    def found():
        runs = [run for run in site.flow_runs("retrain") if run["state"] == state]
        return runs if len(runs) == number else None

    return site.until(f"no {number} are {state}: {site.flow_runs('retrain')}", found)


def trained(site):
    return json.loads((site.root / "retrained" / "trained.json").read_text())


def test_an_event_trains_on_the_payloads_files_and_a_person_is_asked(site):
    site.emit("rollflow.data.updated", "rollflow.data.x", {"files": ["a.parquet"]})
    (run,) = ended(site, "Completed", 1)
    assert run["parameters"]["files"] == ["a.parquet"]
    ((data_hash, candidate),) = trained(site).items()
    asked = json.loads((site.root / "runs" / candidate / "asked.json").read_text())
    assert asked["data.train_files"] == [f"retrained/snapshots/{data_hash}/train.parquet"]
    assert asked["actor_rollout_ref.model.path"] == "models/tiny"  # the base: none is promoted
    promotion = site.until_state("promote", "Paused")
    assert promotion["name"] == f"promote-{candidate}"
    lineage = json.loads((site.root / "retrained" / "lineage" / f"{candidate}.json").read_text())
    assert lineage["data_hash"] == data_hash
    assert lineage["data_files"] == ["a.parquet"]
    assert "16 better, 0 worse" in lineage["evaluation"][0]
    artifacts = site.query("select data from artifact where key = 'lineage'")
    assert any(data_hash in data for (data,) in artifacts)
    site.resume(promotion["id"], decision="approve", reason="for the next one")
    site.until_state("promote", "Completed")


def test_data_that_was_trained_before_is_skipped(site):
    before = trained(site)
    site.start_run("retrain/on-new-data", files=["a.parquet"])
    ended(site, "Skipped", 1)
    assert trained(site) == before


def test_a_second_one_marks_dirty_and_exactly_one_more_follows_from_the_promoted_model(site):
    (site.root / "hold").touch()
    site.start_run("retrain/on-new-data", files=["b.parquet"])
    site.until("no training", lambda: site.flow_runs("fake-train")[1:])
    for _ in range(2):
        site.start_run("retrain/on-new-data", files=["c.parquet"])
    ended(site, "Dirty", 2)
    (site.root / "hold").unlink()
    # The one that was active, and one more; neither beats the promoted model, which is as good.
    rejected = ended(site, "Rejected", 2)
    assert [run["parameters"]["files"] for run in rejected] == [["b.parquet"], ["c.parquet"]]
    assert len(trained(site)) == 3
    assert len(site.flow_runs("retrain")) == 6
    asked = sorted((site.root / "runs").glob("trained-*/asked.json"))
    starts = {json.loads(file.read_text())["actor_rollout_ref.model.path"] for file in asked}
    (first,) = starts - {"models/tiny"}
    assert "/in_use/versions/trained-" in first
