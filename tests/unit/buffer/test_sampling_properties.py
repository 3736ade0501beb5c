"""A run with a simulated engine under any delays, failures and restarts.

Held at every moment: no token is trained beyond the staleness bound, no prompt twice, nothing is
lost, as many prompts are on their way as the pipeline is deep; and the run can always go on.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlcore.buffer.ledger import Ledger
from rlcore.buffer.policy import SamplePolicy, num_admitted
from rlcore.testing.ledger import FakeClock, good_session, prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"


class RunMachine(RuleBasedStateMachine):
    """The trainer's side is a loop of draw, train, feed; the engine's side claims and settles."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="run-"))
        self.clock = FakeClock()
        self.attempt = 1
        self.step = 1
        self.num_fed = 0
        self.began_with: dict[str, int] = {}
        self.trained: set[str] = set()
        self.ledger: Ledger | None = None

    @initialize(
        threshold=st.integers(1, 4),
        strategy=st.sampled_from(["drop", "wait", "pace"]),
        basis=st.sampled_from(["dispatch", "tokens"]),
        filters=st.booleans(),
        batch=st.integers(1, 3),
        data=st.data(),
    )
    def begin(self, threshold, strategy, basis, filters, batch, data):
        self.batch = batch
        self.warmup = data.draw(st.integers(0, threshold - 1))
        self.threshold = threshold
        self.policy = {
            "max_off_policy_threshold": threshold,
            "strategy": strategy,
            "basis": basis,
            "filter_metric": "reward" if filters else None,
            "keeps_supply": True,
        }
        self.ledger = self.open("attempt-1")
        self.feed(self.warmup * batch)
        self.begin_step()

    def open(self, name):
        return Ledger(
            "run-1",
            self.folder / name,
            self.attempt,
            clock=self.clock,
            claim_lease_s=10,
            max_failure_ratio=1.0,
        )

    @property
    def version(self):
        """Published after each step."""
        return self.step - 1

    def sample_policy(self):
        return SamplePolicy(**self.policy, trainer_version=self.version)

    def key(self, phase="sample"):
        return CallKey(run_id="run-1", attempt=self.attempt, global_step=self.step, phase=phase)

    def outstanding(self):
        counts = self.ledger.counts(TRAIN)
        return counts["pending"] + counts["running"] + counts["waiting"]

    def feed(self, count):
        specs = [
            prompt_spec(f"p{self.num_fed + i}", global_step=self.step, index=self.num_fed + i)
            for i in range(count)
        ]
        self.num_fed += self.ledger.feed(self.key("feed"), specs)

    def begin_step(self):
        policy = self.sample_policy()
        self.feed(
            num_admitted(
                self.batch, outstanding=self.outstanding(), per_step=self.batch, policy=policy
            )
        )

    def running(self):
        return self.ledger.view(TRAIN)["running"]

    def claim_some(self, limit):
        for spec in self.ledger.claim(self.attempt, "w0", limit):
            assert spec.uid not in self.trained
            self.began_with[spec.uid] = self.version

    @rule(limit=st.integers(1, 4))
    def claim(self, limit):
        self.claim_some(limit)

    @precondition(lambda self: self.ledger and self.running())
    @rule(data=st.data(), kind=st.sampled_from(["good", "good", "good", "same", "failed"]))
    def settle(self, data, kind):
        uid = data.draw(st.sampled_from(self.running()))
        self.settle_as(uid, kind)

    def settle_as(self, uid, kind):
        if kind == "failed":
            sessions = sessions_of(uid, num=2, num_failed=1)
        else:
            versions = {
                "response_len": 1,
                "min_global_steps": self.began_with[uid],
                "max_global_steps": self.version,
            }
            rewards = (1.0, 1.0) if kind == "same" else (1.0, 0.0)
            sessions = [
                good_session(uid, i, tags=[versions], reward=reward)
                for i, reward in enumerate(rewards)
            ]
        self.ledger.settle("w0", uid, sessions)

    @rule(times=st.integers(1, 3))
    def the_youngest_finish_first(self, times):
        """What bounds have to stand up to: old prompts that take longest."""
        for _ in range(times):
            self.claim_some(100)
            for uid in self.running()[-self.batch :]:
                self.settle_as(uid, "good")
            self.try_step()

    @rule()
    def worker_dies(self):
        self.ledger.release_worker("w0")

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)
        self.ledger.expire()

    @rule()
    def ledger_dies(self):
        self.ledger.close()
        self.ledger = Ledger.recover(
            self.folder / f"attempt-{self.attempt}",
            clock=self.clock,
            claim_lease_s=10,
            max_failure_ratio=1.0,
        )

    @rule()
    def attempt_dies(self):
        """The next one continues from the checkpoint of the last step."""
        saved = self.ledger.state_dict(released_step=self.step - 1)
        self.ledger.close()
        self.attempt += 1
        self.ledger = self.open(f"attempt-{self.attempt}")
        self.ledger.load_state_dict(self.key("restore"), saved)
        self.feed(0)

    @rule()
    def train(self):
        self.try_step()

    def try_step(self):
        policy = self.sample_policy()
        for _ in range(20):
            batch = self.ledger.sample(self.key(), TRAIN, self.batch, policy)
            if batch is not None:
                break
            owed = self.ledger.needs_refill(TRAIN, policy)
            if not owed:
                return False
            self.feed(owed)
        assert batch is not None
        assert not self.trained & set(batch.uids), "trained twice"
        for tag in batch.tags:
            staleness = self.version - tag["min_global_steps"]
            assert 0 <= staleness <= self.threshold - 1, "beyond the bound"
        assert self.ledger.sample(self.key(), TRAIN, self.batch, policy) == batch
        self.trained |= set(batch.uids)
        self.ledger.mark_trained(self.key("commit"), self.step)
        self.step += 1
        self.begin_step()
        return True

    @invariant()
    def nothing_is_lost_and_the_pipeline_is_as_deep_as_it_was(self):
        if self.ledger is None:
            return
        self.ledger.check_conservation()
        counts = self.ledger.counts(TRAIN)
        assert counts["fed"] == self.num_fed
        owed = self.ledger.needs_refill(TRAIN)
        assert self.outstanding() + owed == (self.warmup + 1) * self.batch
        if self.policy["strategy"] != "drop":
            assert counts["stale"] == 0

    def teardown(self):
        if self.ledger is not None:
            for _ in range(2):
                self.finish_a_step()
            self.ledger.close()
        shutil.rmtree(self.folder)

    def finish_a_step(self):
        """When everybody works, a step ends."""
        for _ in range(50):
            if self.try_step():
                return
            self.claim_some(100)
            for uid in self.running():
                self.settle_as(uid, "good")
        raise AssertionError(f"no step in the end: {self.ledger.overdue(TRAIN)}")


TestRun = RunMachine.TestCase
TestRun.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
