"""AgentLoopWorker: claims prompts, runs their sessions, stores rows, settles the groups.

    loop       claim (long poll) -> one task per prompt -> all its sessions at once
    prompt     sessions end -> rows are stored -> the ledger settles the group
    thread     renews the leases, whatever user code does to the loop

A failed session is data. A fault of a collaborator ends `run_forever`: the leases go back to
pending and the producer starts another worker.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.clients import LeaseRenewer, WorkerLedger, WorkerQueue
from rlcore.agent_loop.session import SessionResult, SessionRunner, describe, with_baseline
from rlcore.agent_loop.writer import RowWriter
from rlcore.config import RunConfig
from rlcore.data.tokenizer import stop_token_ids
from rlcore.errors import FencedError
from rlcore.reward.loop import RewardScorer
from rlcore.rollout.client import LLMServerClient
from rlcore.types import PromptSpec

__all__ = ["AgentLoopWorker", "WorkerStatus", "WorkerTimes"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTimes:
    """Rhythm of a worker, in seconds; tests use shorter ones."""

    claim_wait_s: float = 2.0
    """Long poll for prompts; also how long a stop may go unnoticed."""
    renew_interval_s: float = 10.0
    """Well below the ledger's lease of 60 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What a worker has done so far."""

    worker_id: str
    active_prompts: int
    active_sessions: int
    claimed: int
    finished: int
    """Prompts settled with every session good."""
    failed: int
    """Prompts settled with a failed session."""
    failed_sessions: int
    tokens: int
    tokens_per_s: float
    """Since the first claim."""
    in_flight: dict[str, int]
    """Requests per replica."""
    last_error: str = ""
    """Message of the last failed session."""

    def line(self) -> str:
        """Return the status as one line for a log."""
        replicas = ", ".join(f"{name} {count}" for name, count in self.in_flight.items()) or "none"
        return (
            f"{self.worker_id}: {self.active_prompts} prompts and {self.active_sessions} sessions "
            f"running, {self.finished} finished, {self.failed} with failed sessions, "
            f"{self.tokens} tokens ({self.tokens_per_s:.0f}/s); in flight: {replicas}"
        )

    def counters(self) -> dict[str, float]:
        """Return the totals."""
        return {
            "claimed": float(self.claimed),
            "finished": float(self.finished),
            "failed": float(self.failed),
            "failed_sessions": float(self.failed_sessions),
            "tokens": float(self.tokens),
        }


class AgentLoopWorker:
    """One worker; lives in an event loop of its own (rlcore/cluster/agent_loop_worker.py)."""

    def __init__(
        self,
        config: RunConfig,
        worker_id: str,
        *,
        ledger: WorkerLedger,
        queue: WorkerQueue,
        client: LLMServerClient,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardScorer | None,
        times: WorkerTimes | None = None,
    ) -> None:
        """Make a worker; it does nothing until `run_forever`.

        Raises:
            ConfigError: the default agent loop is not registered.
        """
        rollout = config.actor_rollout_ref.rollout
        self.worker_id = worker_id
        self._times = times or WorkerTimes()
        self._ledger = ledger
        self._client = client
        self._writer = RowWriter(queue)
        self._leases = LeaseRenewer(ledger, worker_id, self._times.renew_interval_s)
        self._sessions = SessionRunner(
            config,
            client,
            tokenizer,
            rewards,
            stop_token_ids(config.actor_rollout_ref.model.path, tokenizer),
        )
        # Twice the slots of all replicas: enough that no slot waits for a prompt.
        slots = 2 * rollout.max_num_seqs * rollout.num_replicas
        self._max_sessions = max(1, slots // rollout.agent.num_workers)
        per_train_prompt = rollout.n + int(config.needs_baseline)
        self._sessions_per_prompt = max(per_train_prompt, rollout.val_kwargs.n)
        self._is_prepared = False
        self._stopping = asyncio.Event()
        self._drain_s = 0.0
        self._changed = asyncio.Event()
        self._active: dict[str, tuple[PromptSpec, asyncio.Task[None]]] = {}
        self._failure: BaseException | None = None
        self._counts = {"claimed": 0, "finished": 0, "failed": 0, "failed_sessions": 0}
        self._first_claim: float | None = None
        self._last_error = ""

    async def prepare(self) -> None:
        """Start what sessions need; `run_forever` does it where it was not done.

        Raises:
            ConfigError: the reward function, the tools or the agent loop cannot be used.
        """
        if not self._is_prepared:
            await self._sessions.start()
            self._is_prepared = True

    async def run_forever(self) -> None:
        """Work until `stop`; what is held at the end goes back to pending.

        Raises:
            TransientError: a collaborator is not there or does not answer.
            FencedError: a newer attempt of the run has begun.
            ConfigError: the reward function cannot be loaded.
        """
        self._leases.start()
        try:
            await self.prepare()
            while not self._stopping.is_set():
                self._raise_failure()
                self._drop_lost()
                limit = self._claim_limit()
                if limit == 0:
                    await self._wait_for_change()
                    continue
                specs = await self._ledger.claim(self.worker_id, limit, self._times.claim_wait_s)
                for spec in specs:
                    self._begin(spec)
            await self._drain()
            self._raise_failure()
        finally:
            self._leases.stop()
            await self._cancel_all()
            await self._sessions.close()
        await self._ledger.release_worker(self.worker_id)

    def stop(self, drain_s: float = 0.0) -> None:
        """Let `run_forever` end: no more claims, running prompts end for up to `drain_s`."""
        self._drain_s = drain_s
        self._stopping.set()
        self._changed.set()

    def status(self) -> WorkerStatus:
        """Return what was done so far."""
        elapsed = time.monotonic() - self._first_claim if self._first_claim is not None else 0.0
        tokens = self._client.tokens_generated
        return WorkerStatus(
            worker_id=self.worker_id,
            active_prompts=len(self._active),
            active_sessions=self._num_active_sessions(),
            tokens=tokens,
            tokens_per_s=tokens / elapsed if elapsed > 0 else 0.0,
            in_flight=self._client.router.in_flight,
            last_error=self._last_error,
            **self._counts,
        )

    def _num_active_sessions(self) -> int:
        return sum(self._num_sessions(spec) for spec, _ in self._active.values())

    def _num_sessions(self, spec: PromptSpec) -> int:
        return spec.num_sessions + int(self._sessions.has_baseline(spec))

    def _claim_limit(self) -> int:
        """Return how many more prompts fit; a lone prompt always fits."""
        free = self._max_sessions - self._num_active_sessions()
        return max(free // self._sessions_per_prompt, 0 if self._active else 1)

    async def _wait_for_change(self) -> None:
        """Wait until a prompt ends; not longer than a claim would, to notice lost leases."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self._times.claim_wait_s)

    def _begin(self, spec: PromptSpec) -> None:
        if self._first_claim is None:
            self._first_claim = time.monotonic()
        self._counts["claimed"] += 1
        if spec.uid in self._active:
            # The lease was lost and won again before the loss was noticed.
            self._active[spec.uid][1].cancel()
        self._leases.hold(spec.uid)
        task = asyncio.create_task(self._run_prompt(spec), name=spec.uid)
        self._active[spec.uid] = (spec, task)
        task.add_done_callback(lambda done: self._ended(spec.uid, done))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        if uid in self._active and self._active[uid][1] is task:
            del self._active[uid]
            self._leases.drop(uid)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._changed.set()

    async def _run_prompt(self, spec: PromptSpec) -> None:
        """Run all sessions of a prompt, store what they gave, settle the group."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._sessions.run(spec, session_id))
                    for session_id in range(self._num_sessions(spec))
                ]
        except ExceptionGroup as errors:
            # Siblings fall for the same reason; the first one names it.
            raise errors.exceptions[0] from errors
        results = [task.result() for task in running]
        if self._sessions.has_baseline(spec):
            results = with_baseline(results[:-1], results[-1])
        await self._store(spec, results)
        try:
            await self._ledger.settle(
                self.worker_id, spec.uid, [result.record for result in results]
            )
        except FencedError as error:
            # Another worker has the prompt now and writes the same keys.
            logger.warning("%s was settled too late: %s", describe(spec), error)
            return
        self._count(results)

    async def _store(self, spec: PromptSpec, results: list[SessionResult]) -> None:
        await self._writer.put(
            spec.partition_id,
            [key for result in results for key in result.record.keys],
            [row for result in results for row in result.rows],
            [tag for result in results for tag in result.record.tags],
        )

    def _count(self, results: list[SessionResult]) -> None:
        failed = [result.record for result in results if result.record.is_failed]
        self._counts["failed" if failed else "finished"] += 1
        self._counts["failed_sessions"] += len(failed)
        if failed:
            self._last_error = failed[-1].error_message

    def _drop_lost(self) -> None:
        for uid in self._leases.take_lost():
            if uid in self._active:
                spec, task = self._active[uid]
                logger.warning("lost the lease of %s; its sessions are cancelled", describe(spec))
                task.cancel()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _drain(self) -> None:
        running = [task for _, task in self._active.values()]
        if running and self._drain_s > 0:
            await asyncio.wait(running, timeout=self._drain_s)

    async def _cancel_all(self) -> None:
        running = [task for _, task in self._active.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
