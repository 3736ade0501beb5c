"""Any order of calls: nothing is lost, nothing is leased twice, and the journal tells it all."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlcore.buffer.ledger import Ledger
from rlcore.errors import FencedError
from rlcore.testing.ledger import FakeClock, prompt_spec, sessions_of
from rlcore.types import CallKey, SampledBatch

TRAIN = "run-1/train"
VAL = "run-1/val"
WORKERS = st.sampled_from(["w0", "w1", "w2"])
STEPS = st.integers(1, 4)


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger and a plain model of who holds what."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.clock = FakeClock()
        # Failures may be frequent here; the limit has tests of its own.
        self.options = {"clock": self.clock, "claim_lease_s": 10, "max_failure_ratio": 1.0}
        self.ledger = Ledger("run-1", self.folder / "ledger.jsonl", 1, **self.options)
        self.num_fed = {TRAIN: 0, VAL: 0}
        self.holder: dict[str, str] = {}
        self.until: dict[str, float] = {}
        self.batches: dict[int, SampledBatch] = {}
        self.gone: set[str] = set()
        self.trained_step = 0

    def key(self, step):
        return CallKey(run_id="run-1", attempt=self.ledger.attempt, global_step=step)

    def has(self, status):
        return any(self.ledger.counts(partition)[status] for partition in (TRAIN, VAL))

    def drop_lapsed(self):
        for uid in [uid for uid, until in self.until.items() if until <= self.clock.now]:
            del self.holder[uid], self.until[uid]

    @initialize()
    def feed_some(self):
        self.feed(set(range(6)), 1, False)

    @rule(
        indexes=st.sets(st.integers(0, 30), min_size=1, max_size=6),
        step=STEPS,
        validate=st.booleans(),
    )
    def feed(self, indexes, step, validate):
        partition, prefix = (VAL, "v") if validate else (TRAIN, "t")
        # A training prompt has one place in the order of prompts, and so one dispatch step.
        specs = [
            prompt_spec(
                f"{prefix}{i}",
                partition_id=partition,
                global_step=step if validate else 1 + i % 4,
                validate=validate,
            )
            for i in sorted(indexes)
        ]
        self.num_fed[partition] += self.ledger.feed(self.key(self.trained_step), specs)

    @precondition(lambda self: self.has("pending"))
    @rule(worker=WORKERS, limit=st.integers(1, 4))
    def claim(self, worker, limit):
        self.drop_lapsed()
        for spec in self.ledger.claim(self.ledger.attempt, worker, limit):
            assert spec.uid not in self.holder, "leased twice"
            assert spec.uid not in self.gone or spec.validate, "a final prompt came back"
            self.holder[spec.uid] = worker
            self.until[spec.uid] = self.clock.now + 10

    @precondition(lambda self: self.has("pending"))
    @rule(worker=WORKERS, limit=st.integers(1, 6))
    def work(self, worker, limit):
        self.claim(worker, limit)
        for uid in [uid for uid, owner in self.holder.items() if owner == worker]:
            self.settle_as(worker, uid, 0)

    @precondition(lambda self: self.holder)
    @rule(worker=WORKERS, data=st.data())
    def renew(self, worker, data):
        uids = data.draw(st.lists(st.sampled_from(sorted(self.holder)), unique=True))
        self.ledger.expire()
        self.drop_lapsed()
        lost = self.ledger.renew(worker, uids)
        assert lost == [uid for uid in uids if self.holder.get(uid) != worker]
        self.until.update({uid: self.clock.now + 10 for uid in uids if uid not in lost})

    @precondition(lambda self: self.holder)
    @rule(num_failed=st.integers(0, 2), data=st.data())
    def settle(self, num_failed, data):
        uid = data.draw(st.sampled_from(sorted(self.holder)))
        worker = data.draw(st.sampled_from([self.holder[uid]] * 3 + ["w9"]))
        self.settle_as(worker, uid, num_failed)

    def settle_as(self, worker, uid, num_failed):
        self.ledger.expire()
        self.drop_lapsed()
        try:
            status = self.ledger.settle(worker, uid, sessions_of(uid, num=2, num_failed=num_failed))
        except FencedError:
            assert self.holder.get(uid) != worker
            return
        if self.holder.get(uid) == worker:
            needed = 1 if uid.startswith("v") else 2
            assert status == ("finished" if 2 - num_failed >= needed else "failure")
            del self.holder[uid], self.until[uid]

    @precondition(lambda self: self.holder)
    @rule(worker=WORKERS)
    def release(self, worker):
        self.ledger.release_worker(worker)
        for uid in [uid for uid, owner in self.holder.items() if owner == worker]:
            del self.holder[uid], self.until[uid]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(ahead=st.integers(1, 2), size=st.integers(1, 3))
    def sample(self, ahead, size):
        step = self.trained_step + ahead
        known = self.batches.get(step)
        key = self.key(step)
        if known is not None:
            assert self.ledger.sample(key, TRAIN, len(known.uids)) == known
            return
        batch = self.ledger.sample(key, TRAIN, size)
        if batch is None:
            return
        taken = {uid for other in self.batches.values() for uid in other.uids}
        assert not taken & set(batch.uids), "sampled twice"
        assert not self.gone & set(batch.uids), "sampled after it was trained"
        assert len(batch.uids) == size
        assert batch.keys == [f"{uid}_{i}_0" for uid in batch.uids for i in range(2)]
        self.batches[step] = batch

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def train(self, data):
        step = data.draw(st.sampled_from(sorted(self.batches)))
        released = [s for s in sorted(self.batches) if s <= step]
        keys = self.ledger.mark_trained(self.key(step), step)
        trained = {k for s in released for k in self.batches[s].keys}
        assert trained <= set(keys), "a trained row stays in the queue"
        # The others are rows of groups that were given up: those of no prompt that is still held.
        others = {k.split("_")[0] for k in set(keys) - trained}
        held = {uid for s, b in self.batches.items() if s not in released for uid in b.uids}
        assert not others & (held | set(self.ledger.waiting_rows(TRAIN)) | self.holder.keys())
        assert self.ledger.mark_trained(self.key(step), step) == keys
        for s in released:
            self.gone.update(self.batches.pop(s).uids)
        self.trained_step = step

    @precondition(lambda self: self.num_fed[VAL])
    @rule()
    def discard_validation(self):
        self.ledger.discard(self.key(self.trained_step), VAL)
        for uid in [uid for uid in self.holder if uid.startswith("v")]:
            del self.holder[uid], self.until[uid]

    @precondition(lambda self: self.ledger.waiting_rows(TRAIN) or self.batches)
    @rule(data=st.data())
    def lose_rows(self, data):
        sampled = [uid for batch in self.batches.values() for uid in batch.uids]
        uid = data.draw(st.sampled_from([*self.ledger.waiting_rows(TRAIN), *sampled]))
        self.ledger.return_to_pending(self.key(self.trained_step), [uid])
        # A batch that lost a group is dissolved: its step samples anew.
        self.batches = {s: b for s, b in self.batches.items() if uid not in b.uids}

    @rule()
    def next_attempt(self):
        old = self.ledger.attempt
        self.ledger.fence(old + 1)
        self.holder.clear()
        self.until.clear()
        try:
            self.ledger.claim(old, "w0", 1)
            raise AssertionError("an old attempt got a prompt")
        except FencedError:
            pass

    @rule()
    def restart(self):
        before = self.ledger.state_dict()
        self.ledger.close()
        self.ledger = Ledger.recover(self.folder / "ledger.jsonl", **self.options)
        assert self.ledger.state_dict() == before
        self.until = dict.fromkeys(self.holder, self.clock.now + 10)

    @invariant()
    def nothing_is_lost(self):
        self.ledger.check_conservation()
        for partition, num_fed in self.num_fed.items():
            counts = self.ledger.counts(partition)
            assert counts["fed"] == num_fed
            parts = ("pending", "running", "waiting", "sampled", "trained", "stale", "filtered",
                     "failed", "discarded")  # fmt: skip
            assert num_fed == sum(counts[part] for part in parts)

    def teardown(self):
        self.restart()
        self.ledger.close()
        shutil.rmtree(self.folder)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=70, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
