"""The main loop: one attempt of one training run. Read this file first.

`python -m flows.train PRESET key=value …` runs it without the CLI.
"""

import asyncio
import os
import sys
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Crashed

from flows.rollout_producer import rollout_producers
from flows.train_step import end_run, start_run, train_step
from tasks.lifecycle import open_run
from tasks.retry import is_transient


@flow(name="train", retries=0, persist_result=False)
async def train(
    preset: str | None,
    overrides: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    resume: str | None = None,
) -> dict[str, Any] | State:
    """Train a language model by reinforcement learning.

    Args:
        preset: Name of a preset in deployments/runs, or the path of a YAML file; null: `config`
            alone, as for a script of verl's.
        overrides: Dotted key to value, over the preset.
        config: Partial configuration tree, merged key by key over the preset.
        resume: Run id: continue that run from its last checkpoint as a new attempt.

    Returns:
        Where the results are and how accuracy went; or the Crashed state of an attempt that a fault
        of the infrastructure ended, which a new attempt with `resume` can continue.
    """
    try:
        async with open_run(preset, overrides, config, resume) as run, rollout_producers(run):
            await start_run.with_options(task_runner=run.runner)(step=run.trainer.global_steps)
            for first, last in run.pages():
                page = train_step.with_options(
                    task_runner=run.runner, flow_run_name=run.page_name(first, last)
                )
                await page(first_step=first, last_step=last)
            await end_run.with_options(task_runner=run.runner)(step=run.trainer.global_steps)
            return await run.finish()
    except asyncio.CancelledError:
        return Cancelled(message="cancelled; `rollflow resume` continues it")
    except Exception as error:
        if not is_transient(error):
            raise
        return Crashed(message=f"{type(error).__name__}: {error}")


def main() -> None:
    """Run `python -m flows.train PRESET key=value …`: the same as `rollflow train`.

    In a process of its own image: Prefect, imported above, has read its settings already.
    """
    command = [sys.executable, "-m", "flows.cli", "train", *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
