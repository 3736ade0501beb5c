"""How a trainer feeds prompts: a step's own, refills, warm-up, and what a resume left.

The order of training is a position in an endless sequence; the ledger knows how far it was fed,
also by a try that died. A part of `PPOTrainer`, whose attributes these are.
"""

import logging
from typing import Any, ClassVar

from rlcore.buffer.policy import SamplePolicy
from rlcore.buffer.transfer_queue import attached_queue
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.config import RunConfig
from rlcore.trainer.prompt_source import PromptSource
from rlcore.trainer.run_folder import RunFolder
from rlcore.trainer.snapshots import saved_at
from rlcore.trainer.supply import (
    check_generated,
    num_missing_warmup,
    num_outstanding,
    sample_policy,
)
from rlcore.trainer.waiting_rows import restore_waiting_rows
from rlcore.types import CallKey

logger = logging.getLogger(__name__)


class PromptFeeding:
    """See PPOTrainer for the attributes."""

    is_async: ClassVar[bool]
    inner_steps: int
    config: RunConfig
    global_steps: int
    state: dict[str, Any]
    total_steps: int | None
    run_id: str
    attempt: int
    folder: RunFolder
    ledger: LedgerClient
    prompts: PromptSource
    call_key: CallKey | None

    def _feed(self, count: int, key: CallKey | None = None) -> int:
        """Feed the next `count` prompts of the training order; return how many were new."""
        key = key or self._key()
        start = self.state["train_position"]
        sampler = self.prompts.begin(self.state.get("sampler"), start=start, count=count)
        specs = self.prompts.train_specs(
            start=start, count=count, global_step=key.global_step, sampler=sampler
        )
        fed = self.ledger.feed(key, specs)
        self.state |= {"train_position": start + count, "sampler": sampler}
        return fed

    def _refill(self, count: int) -> int:
        """Feed prompts in the place of `count` evicted groups."""
        position = self._fed_position()
        before = self.state.get("fed_before_step", position)
        check_generated(self.config, fed_for_step=position - before, count=count)
        self.state["train_position"] = position
        return self._feed(count)

    def _warm_up(self, num_batches: float) -> int:
        """Feed `num_batches` batches before the first step, less what a resume restored.

        For `on_train_begin`. Their dispatch step is the one that comes next.
        """
        counts = self.ledger.counts(self._partition("train"))
        steps_left = self._steps_left(self.global_steps + 1)
        count = num_missing_warmup(
            self.config, counts, num_batches=num_batches, steps_left=steps_left
        )
        self.state["train_position"] = counts["fed"]
        fed = self._feed(count, self._hook_key("warm_up"))
        logger.info("warm-up: %d prompts fed, %d on their way before", fed, num_outstanding(counts))
        return fed

    def _restore_rows(self) -> None:
        """Make queue and ledger agree after a resume (verl: reissue of in-flight prompts)."""
        if self.global_steps == 0:
            return
        saved = saved_at(self.folder, self.global_steps)
        restore_waiting_rows(
            self.ledger,
            attached_queue(self.config.deadlines.queue),
            self._hook_key("restore_rows"),
            self._partition("train"),
            None if saved is None else saved.path,
        )

    def _hook_key(self, phase: str) -> CallKey:
        return CallKey(
            run_id=self.run_id,
            attempt=self.attempt,
            global_step=self.global_steps + 1,
            phase=phase,
        )

    def _steps_left(self, step: int) -> int | None:
        return None if self.total_steps is None else self.total_steps - step + 1

    def _fed_position(self) -> int:
        """How far the order was fed, also by a try that died and whose `state` was lost."""
        return self.ledger.counts(self._partition("train"))["fed"]

    def _policy(
        self, trainer_version: int | None = None, skipped_versions: tuple[int, ...] = ()
    ) -> SamplePolicy:
        key = self._key()
        return sample_policy(
            self.config,
            is_async=self.is_async,
            inner_steps=self.inner_steps,
            inner_step=key.inner_step,
            trainer_version=trainer_version,
            skipped_versions=skipped_versions,
        )

    def _key(self) -> CallKey:
        assert self.call_key is not None, "a phase runs by run_phase, which sets the key"
        return self.call_key

    def _partition(self, name: str) -> str:
        return f"{self.run_id}/{name}"
