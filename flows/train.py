"""The main loop: one attempt of one training run. Read this file first.

`python -m flows.train PRESET key=value …` runs it without the CLI.
"""

import asyncio
import os
import sys
from typing import Any

from prefect import State, flow
from prefect.exceptions import Pause
from prefect.states import Cancelled, Crashed

from flows.rollout_producer import rollout_producer, rollout_producers
from flows.train_step import end_run, save_run, start_run, train_step
from tasks.active_run import ActiveRun
from tasks.attempts import keep_earlier_pages, this_flow_run, was_cancelled
from tasks.lifecycle import open_run
from tasks.parameters import PartialConfig, as_tree
from tasks.retry import is_transient


@flow(name="train", retries=0, persist_result=False)
async def train(
    preset: str | None,
    overrides: dict[str, Any] = {},  # noqa: B006  the form shows an object; never changed
    config: PartialConfig | None = None,
    resume: str | None = None,
) -> dict[str, Any] | State:
    """Train a language model by reinforcement learning.

    Args:
        preset: Name of a preset in deployments/runs, or the path of a YAML file; null: `config`
            alone, as for a script of verl's.
        overrides: Dotted key to value, over preset and config: nightly, with one key changed.
        config: Partial configuration tree, merged key by key over the preset; only what is set
            counts.
        resume: Run id: continue that run from its last checkpoint as a new attempt. A flow run that
            Prefect starts again continues its own run.

    Returns:
        Where the results are and how accuracy went; or the Crashed state of an attempt that a fault
        of the infrastructure ended, which a new attempt with `resume` can continue.
    """
    keep_earlier_pages([start_run, train_step, save_run, end_run, rollout_producer])
    try:
        async with (
            open_run(preset, overrides, as_tree(config), resume) as run,
            rollout_producers(run),
        ):
            await start_run.with_options(task_runner=run.runner)(step=run.trainer.global_steps)
            for first, last in run.pages():
                await leave_if_suspended(run)
                page = train_step.with_options(
                    task_runner=run.runner, flow_run_name=run.page_name(first, last)
                )
                await page(first_step=first, last_step=last)
            await end_run.with_options(task_runner=run.runner)(step=run.trainer.global_steps)
            return await run.finish()
    except asyncio.CancelledError:
        if await was_cancelled(this_flow_run()):
            return Cancelled(message="cancelled; `rollflow resume` continues it")
        return Crashed(message="the process was asked to end; a new attempt can continue the run")
    except Exception as error:
        if not is_transient(error):
            raise
        return Crashed(message=f"{type(error).__name__}: {error}")


async def leave_if_suspended(run: ActiveRun) -> None:
    """Between two pages: wait while the run is paused; save and leave it when it is suspended.

    Raises:
        Pause: Prefect's way to end the process of a suspended run; on Resume a worker starts the
            flow run again, and it continues its run.
    """
    state = await run.between_steps.gate()
    if state is None:
        return
    if not run.has_checkpoint and run.trainer.global_steps > 0:
        await save_run.with_options(task_runner=run.runner)(step=run.trainer.global_steps)
    raise Pause(state=state)


def main() -> None:
    """Run `python -m flows.train PRESET key=value …`: the same as `rollflow train`.

    In a process of its own image: Prefect, imported above, has read its settings already.
    """
    command = [sys.executable, "-m", "flows.cli", "train", *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
