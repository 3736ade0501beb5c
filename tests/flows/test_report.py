"""What a run's page shows under Artifacts: one of each, brought up to date in place."""

import asyncio
import base64
import json

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from tasks.artifacts import MAX_IMAGE_BYTES, image_artifact
from tasks.attempts import this_flow_run
from tasks.report import Reporter

pytestmark = pytest.mark.integration

METRICS = {"critic/score/mean": 0.25, "timing_s/step": 1.5}


async def artifacts_of(flow_run_id):
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    async with get_client() as client:
        return {artifact.key: artifact for artifact in await client.read_artifacts(
            artifact_filter=wanted)}  # fmt: skip


@pytest.fixture
def shown(prefect_session, tmp_path):
    """Artifacts of a run of three steps on pages of their own, and of the page of step 2."""

    @flow(persist_result=False)
    async def page(reporter, step):
        metrics = dict(METRICS)
        if step > 1:
            metrics |= {"val-aux/accuracy": 0.5, "val-aux/accuracy_stderr": 0.1}
        await reporter.step(step, metrics)
        if step == 2:
            await reporter.checkpoint(step, tmp_path / "global_step_2")
        return this_flow_run().flow_run_id

    @flow(persist_result=False)
    async def run():
        own = this_flow_run().flow_run_id
        reporter = Reporter(
            run_id="r", flow_run_id=own, folder=tmp_path, total_steps=3, trackers=["file"],
            labels={},
        )  # fmt: skip
        await reporter.begin(0)
        pages = [
            await page.with_options(validate_parameters=False)(reporter, step) for step in (1, 2, 3)
        ]
        await reporter.curves()
        await reporter.end(None)
        return await artifacts_of(own), await artifacts_of(pages[1])

    return asyncio.run(run())


def test_metrics_and_curves_are_on_the_runs_page_and_a_checkpoint_on_its_steps(shown):
    of_run, of_page = shown
    assert set(of_run) == {None, "metrics", "curve-reward", "curve-accuracy"}
    assert of_run[None].data == 100.0
    rows = json.loads(of_run["metrics"].data)
    assert [row["step"] for row in rows] == [1, 2, 3]
    # The UI shows the columns of the first row.
    assert {tuple(row) for row in rows} == {("step", "reward", "accuracy", "s/step")}
    assert [row["accuracy"] for row in rows] == [None, 0.5, 0.5]
    image = of_run["curve-reward"]
    assert image.type == "image"
    kind, text = image.data.split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(text).startswith(b"\x89PNG")
    assert len(image.data) < MAX_IMAGE_BYTES
    assert set(of_page) == {"checkpoint"}
    assert "global_step_2" in of_page["checkpoint"].data
    assert of_page["checkpoint"].description == "checkpoint 2 of run r"


def test_an_image_that_is_too_large_is_left_out_and_said_so(tmp_path, caplog):
    file = tmp_path / "x.png"
    file.write_bytes(bytes(MAX_IMAGE_BYTES))
    assert image_artifact(file, key="x", description="x") is None
    assert "x.png is not shown" in caplog.text
