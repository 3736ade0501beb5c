"""What the ledger knows, as a pure function of its journal.

`LedgerState.apply(event)` is the only place where a prompt changes state: a ledger that was
recovered from its journal has gone through the same calls as the one that wrote it.

    pending → running → finished | failure → sampled → trained
    exits: stale, filtered, failed (given up), discarded

One file, though a long one: every event and the counts that it moves have to be read together, and
nothing else may change them.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from rlcore.buffer.journal import Event
from rlcore.buffer.prompt_queue import PromptQueue
from rlcore.errors import CheckpointError
from rlcore.types import PromptSpec, PromptStatus, SessionRecord

FORMAT = 1
STATUSES: tuple[PromptStatus, ...] = get_args(PromptStatus)
WAITING: frozenset[PromptStatus] = frozenset({"finished", "failure"})
ACTIVE: frozenset[PromptStatus] = frozenset(
    {"pending", "running", "finished", "failure", "sampled"}
)
"""The others are final: such a prompt keeps its name and drops what it carried."""
FINAL_FIELDS = (
    "uid", "partition_id", "global_step", "order", "validate", "num_sessions", "status", "claims",
)  # fmt: skip
"""What a final prompt keeps of `Prompt`."""
MAX_ROW_FAILURES = 3
"""A row of the data whose groups failed this often is quarantined: it is not run again."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One fed prompt and what became of it."""

    uid: str
    partition_id: str
    global_step: int
    """Dispatch step."""
    order: int
    """Position among all prompts ever fed: breaks ties between prompts of one step."""
    validate: bool
    num_sessions: int
    status: PromptStatus
    since: float
    """When it came to this status, by the ledger's clock; not part of the saved state."""
    claims: int = 0
    owner: str = ""
    """The worker that runs it, or that settled it."""
    lease_id: str = ""
    """The batch it is sampled into."""
    spec: PromptSpec | None = None
    sessions: list[SessionRecord] = field(default_factory=list[SessionRecord])

    @property
    def keys(self) -> list[str]:
        """Row keys of the sessions that went well."""
        return [key for session in self.sessions if not session.is_failed for key in session.keys]

    @property
    def min_version(self) -> int | None:
        """The oldest weight version among the sampled tokens; None where no tag tells."""
        versions = [
            tag.get("min_global_steps", -1)
            for session in self.sessions
            if not session.is_failed
            for tag in session.tags
        ]
        return min((version for version in versions if version >= 0), default=None)

    @property
    def num_tokens(self) -> int:
        """Response tokens of the good sessions."""
        return sum(
            int(tag.get("response_len", 0))
            for session in self.sessions
            if not session.is_failed
            for tag in session.tags
        )


@dataclass(kw_only=True, slots=True)
class Lease:
    """A batch that was sampled and is not yet trained."""

    lease_id: str
    partition_id: str
    global_step: int
    inner_step: int
    batch_size: int
    uids: list[str]
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True)
class Partition:
    """Counters of one partition; `window` counts restart at each sampled batch."""

    validate: bool = False
    """Validation groups are never given up, and their leases are not a training step's."""
    fed: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    num_owed: int = 0
    """Groups given up and not yet replaced."""
    window_prompts: int = 0
    window_sessions: int = 0
    window_failed_sessions: int = 0
    window_failed_groups: int = 0
    last_error: str = ""
    window_evicted: dict[str, int] = field(default_factory=dict[str, int])
    """Groups evicted since the last sampled batch, by status."""
    window_stale_spans: list[int] = field(default_factory=list[int])
    window_stale_tokens: int = 0
    row_failures: dict[str, int] = field(default_factory=dict[str, int])
    """Index of a row of the data to how often its groups failed."""

    def is_quarantined(self, index: int) -> bool:
        """Whether the groups of a row failed too often to run it again."""
        return self.row_failures.get(str(index), 0) >= MAX_ROW_FAILURES

    def restart_window(self) -> None:
        """Count failures from here."""
        self.window_prompts = self.window_sessions = 0
        self.window_failed_sessions = self.window_failed_groups = 0
        self.window_evicted, self.window_stale_spans, self.window_stale_tokens = {}, [], 0


class LedgerState:
    """Prompts, leases and counters; changed by `apply` alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reset("", 0)

    def _reset(self, run_id: str, attempt: int) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.prompts: dict[str, Prompt] = {}
        self.leases: dict[str, Lease] = {}
        self.partitions: dict[str, Partition] = {}
        self.trained_step = 0
        self.trained_keys: list[str] = []
        """Rows of the last trained step: a repeat of mark_trained returns them again."""
        self.evicted_keys: dict[str, list[str]] = {}
        """Rows of evicted groups, per partition: cleared with those of the next trained step."""
        self._num_fed = 0
        self.num_rows = 0
        """Rows that active prompts have stored or may store soon, over all partitions."""
        # Active prompts only, so that a claim does not walk through a long run's history.
        self._queues: dict[tuple[str, PromptStatus], PromptQueue[Prompt]] = {}
        self._by_version: dict[str, PromptQueue[Prompt]] = {}
        self._unjudged: dict[str, dict[str, Prompt]] = {}
        # Uids that became final, by dispatch step: forgotten once that step is long trained.
        self._final: defaultdict[int, list[str]] = defaultdict(list)

    def partition(self, partition_id: str) -> Partition:
        """Return the counters of a partition, zeros for one never fed."""
        return self.partitions.get(partition_id) or Partition()

    def with_status(self, status: PromptStatus, partition_id: str | None = None) -> list[Prompt]:
        """Return the active prompts of a status, oldest dispatch step first, then as fed."""
        found = [
            prompt
            for (partition, held), prompts in self._queues.items()
            if held == status and partition_id in (None, partition)
            for prompt in prompts
        ]
        return sorted(found, key=lambda prompt: (prompt.global_step, prompt.order))

    def oldest(self, status: PromptStatus, count: int) -> list[Prompt]:
        """Return the first `count` prompts of a status over all partitions, in order."""
        found = [
            prompt
            for (_, held), prompts in self._queues.items()
            if held == status
            for prompt in prompts.first(count)
        ]
        return sorted(found, key=lambda prompt: (prompt.global_step, prompt.order))[:count]

    def queue(self, status: PromptStatus, partition_id: str) -> PromptQueue[Prompt]:
        """Return the prompts of a status in a partition; not to be changed."""
        return self._queues.get((partition_id, status)) or PromptQueue()

    def by_version(self, partition_id: str) -> PromptQueue[Prompt]:
        """Return the finished prompts, those with the oldest token first; not to be changed."""
        return self._by_version.get(partition_id) or PromptQueue()

    def unjudged(self, partition_id: str) -> list[Prompt]:
        """Return the finished prompts whose metric nobody has looked at, as they finished."""
        return list(self._unjudged.get(partition_id, {}).values())

    def judged(self, partition_id: str) -> None:
        """The metric of every finished prompt was looked at; asking again would change nothing."""
        self._unjudged.pop(partition_id, None)

    def apply(self, event: Event) -> None:
        """Change the state as `event` says; it was checked by the ledger that wrote it.

        Raises:
            CheckpointError: an event of a newer format.
        """
        handler = getattr(self, f"_apply_{event['op']}", None)
        if handler is None:
            raise CheckpointError(f"the ledger journal holds an unknown event {event['op']!r}")
        handler(event)

    def _apply_open(self, event: Event) -> None:
        if event["format"] != FORMAT:
            raise CheckpointError(f"ledger format {event['format']}, this version reads {FORMAT}")
        self._reset(event["run_id"], event["attempt"])

    def _apply_fence(self, event: Event) -> None:
        self.attempt = event["attempt"]
        self._return(prompt.uid for prompt in self.with_status("running"))

    def _apply_feed(self, event: Event) -> None:
        for values in event["specs"]:
            spec = PromptSpec(**values)
            self._num_fed += 1
            prompt = Prompt(
                uid=spec.uid,
                partition_id=spec.partition_id,
                global_step=spec.global_step,
                order=self._num_fed,
                validate=spec.validate,
                num_sessions=spec.num_sessions,
                status="pending",
                since=self._clock(),
                spec=spec,
            )
            self._add(prompt)
            partition = self.partitions[spec.partition_id]
            partition.validate = spec.validate
            partition.fed += 1
            partition.counts["pending"] += 1
            partition.num_owed = max(0, partition.num_owed - 1)
            if not spec.validate and partition.is_quarantined(spec.index):
                self._move(spec.uid, "failed")
                partition.num_owed += 1

    def _apply_claim(self, event: Event) -> None:
        for uid in event["uids"]:
            prompt = self._move(uid, "running")
            prompt.owner = event["worker"]
            prompt.claims += 1

    def _apply_return(self, event: Event) -> None:
        self._return(event["uids"])
        if event.get("is_blameless"):
            for uid in event["uids"]:
                self.prompts[uid].claims -= 1

    def _apply_settle(self, event: Event) -> None:
        prompt = self.prompts[event["uid"]]
        prompt.sessions = [SessionRecord(**values) for values in event["sessions"]]
        self._move(prompt.uid, event["status"])
        failed = [session for session in prompt.sessions if session.is_failed]
        partition = self.partitions[prompt.partition_id]
        partition.window_prompts += 1
        partition.window_sessions += len(prompt.sessions)
        partition.window_failed_sessions += len(failed)
        if failed:
            partition.last_error = f"{failed[-1].error_type}: {failed[-1].error_message}"

    def _apply_evict(self, event: Event) -> None:
        status: PromptStatus = event["status"]
        for uid, span in zip(event["uids"], event["spans"], strict=True):
            prompt = self.prompts[uid]
            partition = self.partitions[prompt.partition_id]
            self.evicted_keys.setdefault(prompt.partition_id, []).extend(prompt.keys)
            if status == "stale":
                partition.window_stale_spans.append(span)
                partition.window_stale_tokens += prompt.num_tokens
            if status == "failed":
                partition.window_failed_groups += 1
                index = str(prompt.spec.index if prompt.spec else -1)
                partition.row_failures[index] = partition.row_failures.get(index, 0) + 1
            evicted = partition.window_evicted
            evicted[status] = evicted.get(status, 0) + 1
            partition.num_owed += event["owed"]
            self._move(uid, status)

    def _apply_sample(self, event: Event) -> None:
        lease = Lease(**event["lease"])
        self.leases[lease.lease_id] = lease
        for uid in lease.uids:
            self._move(uid, "sampled").lease_id = lease.lease_id
        partition = self.partitions[lease.partition_id]
        partition.restart_window()
        if event["settles_debt"]:
            partition.num_owed = 0

    def _apply_trained(self, event: Event) -> None:
        uids = [uid for lease_id in event["lease_ids"] for uid in self.leases.pop(lease_id).uids]
        self.trained_step = event["global_step"]
        self.trained_keys = [key for uid in uids for key in self.prompts[uid].keys]
        for uid in uids:
            self._move(uid, "trained")
        for partition_id in {self.prompts[uid].partition_id for uid in uids}:
            self.trained_keys += self.evicted_keys.pop(partition_id, [])
        self._forget()

    def _apply_discard(self, event: Event) -> None:
        for uid in event["uids"]:
            self.leases.pop(self.prompts[uid].lease_id, None)
            prompt = self._move(uid, "discarded")
            # A validation is judged by its own sessions, not by those of earlier ones.
            self.partitions[prompt.partition_id].restart_window()

    def _apply_load(self, event: Event) -> None:
        saved = event["state"]
        if saved["format"] != FORMAT:
            raise CheckpointError(f"ledger format {saved['format']}, this version reads {FORMAT}")
        self._reset(saved["run_id"], max(saved["attempt"], event["attempt"]))
        self.trained_step = saved["trained_step"]
        self.trained_keys = list(saved["trained_keys"])
        self.evicted_keys = {name: list(keys) for name, keys in saved["evicted_keys"].items()}
        self._num_fed = saved["num_fed"]
        for name, values in saved["partitions"].items():
            counts = Counter[str](values["counts"])
            self.partitions[name] = Partition(**{**values, "counts": counts})
        for values in saved["final_prompts"]:
            self._add(Prompt(**dict(zip(FINAL_FIELDS, values, strict=True)), since=self._clock()))
        for values in saved["active_prompts"]:
            prompt = _prompt_from(values, self._clock())
            if not event["keep_running"]:
                _reissue(prompt, self.trained_step + 1)
            self._add(prompt)
        self.leases = {values["lease_id"]: Lease(**values) for values in saved["leases"]}
        if not event["keep_running"]:
            # The workers that ran them belonged to the process that wrote the state.
            self._return(prompt.uid for prompt in self.with_status("running"))

    def to_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values; equal states give equal dicts."""
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "trained_step": self.trained_step,
            "trained_keys": list(self.trained_keys),
            "evicted_keys": {name: list(keys) for name, keys in self.evicted_keys.items()},
            "num_fed": self._num_fed,
            "partitions": {
                name: {**asdict(partition), "counts": dict(+partition.counts)}
                for name, partition in self.partitions.items()
            },
            # As rows: a long run has many, and they are in every checkpoint.
            "final_prompts": [
                [getattr(prompt, name) for name in FINAL_FIELDS]
                for prompt in self.prompts.values()
                if prompt.status not in ACTIVE
            ],
            "active_prompts": [
                _prompt_to(prompt) for prompt in self.prompts.values() if prompt.status in ACTIVE
            ],
            "leases": [asdict(lease) for lease in self.leases.values()],
        }

    def check_conservation(self) -> None:
        """Hold counters, prompts and leases against each other.

        Raises:
            AssertionError: a prompt was lost, counted twice, or is in no lease though sampled.
        """
        for name, partition in self.partitions.items():
            total = sum(partition.counts.values())
            assert partition.fed == total, f"{name}: fed {partition.fed}, found {total}"
            held = Counter(p.status for p in self.prompts.values() if p.partition_id == name)
            for status in STATUSES:
                counted, found = partition.counts[status], held[status]
                # Final prompts of steps long trained are forgotten: their history is a count.
                is_right = counted == found if status in ACTIVE else counted >= found
                assert is_right, f"{name}: {counted} counted as {status}, {found} found"
        leased = [uid for lease in self.leases.values() for uid in lease.uids]
        assert len(leased) == len(set(leased)), "a prompt is in two leases"
        sampled = {prompt.uid for prompt in self.with_status("sampled")}
        assert set(leased) == sampled, f"leased {leased}, sampled {sorted(sampled)}"

    def _add(self, prompt: Prompt) -> None:
        # A validation prompt that was discarded is fed again under its uid: it moves to the end.
        self.prompts.pop(prompt.uid, None)
        self.prompts[prompt.uid] = prompt
        self.partitions.setdefault(prompt.partition_id, Partition())
        if prompt.status in ACTIVE:
            self._enqueue(prompt)
        else:
            self._final[prompt.global_step].append(prompt.uid)

    def _move(self, uid: str, status: PromptStatus) -> Prompt:
        prompt = self.prompts[uid]
        counts = self.partitions[prompt.partition_id].counts
        counts[prompt.status] -= 1
        counts[status] += 1
        self._dequeue(prompt)
        prompt.status = status
        prompt.since = self._clock()
        prompt.lease_id = ""
        if status not in ACTIVE:
            prompt.spec, prompt.sessions, prompt.owner = None, [], ""
            self._final[prompt.global_step].append(uid)
        else:
            self._enqueue(prompt)
        return prompt

    def _queue_of(self, prompt: Prompt) -> PromptQueue[Prompt]:
        return self._queues.setdefault((prompt.partition_id, prompt.status), PromptQueue())

    def _enqueue(self, prompt: Prompt) -> None:
        self._queue_of(prompt).add(prompt)
        self.num_rows += _rows_of(prompt)
        if prompt.status == "finished":
            self._by_version.setdefault(prompt.partition_id, PromptQueue(_version_key)).add(prompt)
            self._unjudged.setdefault(prompt.partition_id, {})[prompt.uid] = prompt

    def _dequeue(self, prompt: Prompt) -> None:
        self._queue_of(prompt).remove(prompt.uid)
        self.num_rows -= _rows_of(prompt)
        if prompt.status == "finished":
            self._by_version[prompt.partition_id].remove(prompt.uid)
            self._unjudged.get(prompt.partition_id, {}).pop(prompt.uid, None)

    def _forget(self) -> None:
        """Drop the names of final prompts of steps before the last trained one.

        Nobody feeds them again: a feed of such a step adds nothing (see Ledger.feed), so that
        memory and checkpoints stay as small as they were after the first steps.
        """
        for step in [step for step in self._final if step < self.trained_step]:
            for uid in self._final.pop(step):
                prompt = self.prompts.get(uid)
                # Validation prompts may have been fed again under the same uid.
                if prompt is not None and prompt.status not in ACTIVE:
                    del self.prompts[uid]

    def _return(self, uids: Iterable[str]) -> None:
        """Back to pending; a batch that loses a prompt is dissolved, its others wait again."""
        for uid in list(uids):
            lease = self.leases.pop(self.prompts[uid].lease_id, None)
            for other in lease.uids if lease else []:
                self._move(other, _settled_status(self.prompts[other]))
            prompt = self._move(uid, "pending")
            prompt.owner, prompt.sessions = "", []


def _settled_status(prompt: Prompt) -> PromptStatus:
    return "finished" if prompt.keys else "failure"


def _version_key(prompt: Prompt) -> tuple[int, ...]:
    oldest = prompt.min_version
    # Without versions nothing is known to be old.
    return (1 << 60 if oldest is None else oldest), prompt.global_step, prompt.order


def _rows_of(prompt: Prompt) -> int:
    """Return the rows of a prompt: one per session while it runs, then those that are there."""
    if prompt.status == "pending":
        return 0
    return prompt.num_sessions if prompt.status == "running" else len(prompt.keys)


def _reissue(prompt: Prompt, global_step: int) -> None:
    """Dispatch a prompt anew whose workers are gone: all of it is sampled after the restart."""
    if prompt.status in ("pending", "running") and not prompt.validate:
        prompt.global_step = max(prompt.global_step, global_step)
        if prompt.spec is not None:
            prompt.spec = replace(prompt.spec, global_step=prompt.global_step)


def _prompt_to(prompt: Prompt) -> dict[str, Any]:
    values = asdict(prompt)
    del values["since"]
    return values


def _prompt_from(values: dict[str, Any], since: float) -> Prompt:
    values = dict(values)
    spec = PromptSpec(**values.pop("spec"))
    sessions = [SessionRecord(**session) for session in values.pop("sessions")]
    return Prompt(**values, since=since, spec=spec, sessions=sessions)
