"""What the ledger knows, as a pure function of its journal.

`LedgerState.apply(event)` is the only place where a prompt changes state: a ledger that was
recovered from its journal has gone through the same calls as the one that wrote it.

    pending → running → finished | failure → sampled → trained
    exits: stale, filtered, failed (given up), discarded
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from rlcore.buffer.journal import Event
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

    def restart_window(self) -> None:
        """Count failures from here."""
        self.window_prompts = self.window_sessions = 0
        self.window_failed_sessions = self.window_failed_groups = 0


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
        self._num_fed = 0
        # Active prompts only, so that a claim does not walk through a long run's history.
        self._active: dict[tuple[str, PromptStatus], dict[str, Prompt]] = {}

    def partition(self, partition_id: str) -> Partition:
        """Return the counters of a partition, zeros for one never fed."""
        return self.partitions.get(partition_id) or Partition()

    def with_status(self, status: PromptStatus, partition_id: str | None = None) -> list[Prompt]:
        """Return the active prompts of a status, oldest dispatch step first, then as fed."""
        found = [
            prompt
            for (partition, held), prompts in self._active.items()
            if held == status and partition_id in (None, partition)
            for prompt in prompts.values()
        ]
        return sorted(found, key=lambda prompt: (prompt.global_step, prompt.order))

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

    def _apply_claim(self, event: Event) -> None:
        for uid in event["uids"]:
            prompt = self._move(uid, "running")
            prompt.owner = event["worker"]
            prompt.claims += 1

    def _apply_return(self, event: Event) -> None:
        self._return(event["uids"])

    def _apply_settle(self, event: Event) -> None:
        prompt = self._move(event["uid"], event["status"])
        prompt.sessions = [SessionRecord(**values) for values in event["sessions"]]
        failed = [session for session in prompt.sessions if session.is_failed]
        partition = self.partitions[prompt.partition_id]
        partition.window_prompts += 1
        partition.window_sessions += len(prompt.sessions)
        partition.window_failed_sessions += len(failed)
        if failed:
            partition.last_error = f"{failed[-1].error_type}: {failed[-1].error_message}"

    def _apply_give_up(self, event: Event) -> None:
        for uid in event["uids"]:
            partition = self.partitions[self._move(uid, event["status"]).partition_id]
            partition.num_owed += 1
            partition.window_failed_groups += event["status"] == "failed"

    def _apply_sample(self, event: Event) -> None:
        lease = Lease(**event["lease"])
        self.leases[lease.lease_id] = lease
        for uid in lease.uids:
            self._move(uid, "sampled").lease_id = lease.lease_id
        partition = self.partitions[lease.partition_id]
        partition.restart_window()

    def _apply_trained(self, event: Event) -> None:
        uids = [uid for lease_id in event["lease_ids"] for uid in self.leases.pop(lease_id).uids]
        self.trained_step = event["global_step"]
        self.trained_keys = [key for uid in uids for key in self.prompts[uid].keys]
        for uid in uids:
            self._move(uid, "trained")

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
        self._num_fed = saved["num_fed"]
        for name, values in saved["partitions"].items():
            counts = Counter[str](values["counts"])
            self.partitions[name] = Partition(**{**values, "counts": counts})
        for values in saved["final_prompts"]:
            self._add(Prompt(**dict(zip(FINAL_FIELDS, values, strict=True)), since=self._clock()))
        for values in saved["active_prompts"]:
            self._add(_prompt_from(values, self._clock()))
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
                # A validation prompt is fed again after it was discarded: its history is a count.
                is_right = counted >= found if status == "discarded" else counted == found
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
            self._active.setdefault((prompt.partition_id, prompt.status), {})[prompt.uid] = prompt

    def _move(self, uid: str, status: PromptStatus) -> Prompt:
        prompt = self.prompts[uid]
        counts = self.partitions[prompt.partition_id].counts
        counts[prompt.status] -= 1
        counts[status] += 1
        del self._active[prompt.partition_id, prompt.status][uid]
        prompt.status = status
        prompt.since = self._clock()
        prompt.lease_id = ""
        if status in ACTIVE:
            self._active.setdefault((prompt.partition_id, status), {})[uid] = prompt
        else:
            prompt.spec, prompt.sessions, prompt.owner = None, [], ""
        return prompt

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


def _prompt_to(prompt: Prompt) -> dict[str, Any]:
    values = asdict(prompt)
    del values["since"]
    return values


def _prompt_from(values: dict[str, Any], since: float) -> Prompt:
    values = dict(values)
    spec = PromptSpec(**values.pop("spec"))
    sessions = [SessionRecord(**session) for session in values.pop("sessions")]
    return Prompt(**values, since=since, spec=spec, sessions=sessions)
