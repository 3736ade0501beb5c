"""What a person sees of a run in Prefect's UI: names, tries, logs, images and the form.

In Debian's headless Chromium, over the long run while it goes on. `make pages` keeps the pictures.
"""

import contextlib
import io
import os
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.on_server]

FLAGS = (
    "--headless",
    "--no-sandbox",  # it refuses to run as root otherwise
    "--disable-gpu",
    "--enable-unsafe-swiftshader",  # the run's graph is drawn by WebGL
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)
WAIT_S = 40
MAX_BYTES = 200_000
RETRIED = "step-0002/update_weights"


class Browser:
    """A browser that looks at one server's UI."""

    def __init__(self, driver: webdriver.Chrome, address: str, pictures: Path) -> None:
        self.driver = driver
        self.address = address
        self.pictures = pictures

    def open(self, path: str, *expected: str) -> None:
        """Open a page and wait until it shows all the texts."""
        self.driver.get(f"{self.address}/v2{path}")
        self.until_shown(*expected)

    def text(self) -> str:
        try:
            return self.driver.find_element(By.TAG_NAME, "body").text
        except StaleElementReferenceException:
            return ""

    def until(self, what: str, true):
        """Wait until `true()` returns something, and return it."""
        ends = time.monotonic() + WAIT_S
        while not (found := true()):
            assert time.monotonic() < ends, f"{what}; the page shows:\n{self.text()[:3000]}"
            time.sleep(0.2)
        return found

    def until_shown(self, *expected: str) -> None:
        for text in expected:
            self.until(f"{text!r} is not shown", lambda text=text: text in self.text())

    def find(self, css: str):
        return self.until(css, lambda: self.driver.find_elements(By.CSS_SELECTOR, css))

    def after(self, label: str, element: str):
        """Return the first element of a kind that follows a label, in a list."""
        path = f"(//label[contains(., '{label}')]/following::{element})[1]"
        return self.until(f"no {label!r}", lambda: self.driver.find_elements(By.XPATH, path))

    def keep(self, name: str) -> None:
        """Keep a picture of the page, in few enough colours for a README."""
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png()))
        file = self.pictures / f"{name}.png"
        picture.convert("RGB").quantize(128).save(file, optimize=True)
        assert 10_000 < file.stat().st_size < MAX_BYTES, file.stat().st_size


@pytest.fixture(scope="module")
def browser(long_run, tmp_path_factory):
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    assert all(programs), "Debian's chromium and chromium-driver: `make setup-system`"
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=programs[1])
    driver = webdriver.Chrome(options=options, service=service)
    kept = os.environ.get("ROLLFLOW_PAGES")
    pictures = Path(kept) if kept else tmp_path_factory.mktemp("pages")
    pictures.mkdir(parents=True, exist_ok=True)
    site = long_run.site
    browser = Browser(driver, site.env["PREFECT_API_URL"].removesuffix("/api"), pictures)
    try:
        # The server wants to know who looks.
        browser.open("/", "Login")
        field = browser.find("input[type=password]")[0]
        field.send_keys(site.env["PREFECT_API_AUTH_STRING"], Keys.ENTER)
        browser.until_shown("Dashboard")
        yield browser
    finally:
        driver.quit()


def page_of(run, step):
    """Return the id of the page of a step of a run."""
    ((found,),) = run.site.query(
        "select r.id from flow_run r join task_run t on r.parent_task_run_id = t.id "
        "where t.flow_run_id = ? and r.name = ?",
        run.flow_run_id,
        step,
    )
    return found


def open_artifact(run, browser, key, *expected):
    """Open the page of the newest artifact of a key of a run, on which its content stands."""
    rows = run.site.query(
        "select a.id from artifact a join flow_run r on a.flow_run_id = r.id "
        "left join task_run t on r.parent_task_run_id = t.id "
        "where a.key = ? and ? in (r.id, t.flow_run_id) order by a.created desc limit 1",
        key,
        run.flow_run_id,
    )
    ((found,),) = rows
    browser.open(f"/artifacts/artifact/{found}", *expected)


def test_the_runs_page_names_its_steps(long_run, browser):
    page = f"/runs/flow-run/{long_run.flow_run_id}"
    newest = long_run.site.steps_done(long_run.root)
    browser.open(f"{page}?tab=SubflowRuns", "long", "Running", f"step-{newest:04d}")
    assert browser.find("canvas")
    time.sleep(2)  # its graph unfolds
    browser.keep("run")
    # The newest are listed; the others are found by their names.
    field = browser.find("input[placeholder='Search by run name']")[0]
    for name in ("rollout-producer-0", "start-after-0000", "step-0001"):
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(name)
        browser.until_shown(name)


def test_a_steps_page_shows_phases_and_the_task_run_its_tries_and_logs(long_run, browser):
    page = page_of(long_run, "step-0002")
    ((retried,),) = long_run.site.query(
        "select id from task_run where flow_run_id = ? and name = ?", page, RETRIED
    )
    browser.open(f"/runs/flow-run/{page}?tab=TaskRuns", "step-0002", "Completed", RETRIED)
    browser.until_shown("step-0002/sample_batch", "step-0002/update_actor")
    browser.keep("step")
    browser.open(f"/runs/task-run/{retried}?tab=Logs", RETRIED)
    browser.until_shown("the network went away", "Try 1 failed", "weight version")
    assert "Run Count\n2" in browser.text()
    browser.keep("tries")


def test_artifacts_are_on_the_runs_page_and_a_curve_is_an_image(long_run, browser):
    page = f"/runs/flow-run/{long_run.flow_run_id}"
    browser.open(f"{page}?tab=Artifacts", "metrics", "curve-reward", "curve-accuracy")
    open_artifact(long_run, browser, "metrics", "metrics of run", "reward", "s/step")
    open_artifact(long_run, browser, "generations", "validation of step", "responses")
    open_artifact(long_run, browser, "checkpoint", "checkpoint", "global_step_")
    open_artifact(long_run, browser, "curve-reward", "reward of run")
    image = browser.find("img[src^='data:image/png']")[0]
    width = "return arguments[0].complete ? arguments[0].naturalWidth : 0"
    assert browser.until("no image", lambda: browser.driver.execute_script(width, image)) > 500
    browser.keep("curve")


def test_the_form_of_a_deployment_describes_its_parameters_with_choices_and_bounds(
    long_run, browser
):
    ((deployment,),) = long_run.site.query("select id from deployment where name = 'nightly'")
    browser.open(f"/deployments/deployment/{deployment}/run", "Parameters", "overrides")
    browser.until_shown("Dotted key to value, over preset and config", "Run id: continue that run")
    browser.until_shown("Max Wall S", "End the attempt after the step in which this many seconds")
    browser.keep("form")
    (size,) = browser.after("Train Batch Size", "input[@type='number']")
    assert size.get_attribute("min") == "1"
    (choice,) = browser.after("Truncation", "button[@aria-haspopup='listbox']")
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", choice)
    choice.click()
    shown = set()

    def choices():
        # The list opens by and by, and shows what is scrolled to.
        with contextlib.suppress(StaleElementReferenceException):
            for option in browser.find("[role='option']"):
                browser.driver.execute_script("arguments[0].scrollIntoView()", option)
                shown.add(option.text)
        return {"error", "left", "right", "middle"} <= shown

    browser.until("not every choice is shown", choices)
