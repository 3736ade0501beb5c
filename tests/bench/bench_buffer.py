"""Cost of `claim` and `sample` with many stored keys; gain of asynchrony under a virtual clock.

The simulation has the real ledger, policy, feeding rules and router; only tokens and training are
virtual: a slot makes one token per unit of time, training takes a share of the time that sync needs
to generate a batch. It prints T_async against its bound max(G, T_train), where G is the batch's
tokens over all slots kept full, and against sync.
"""

import asyncio
import heapq
import logging
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

from rlcore.buffer.ledger import Ledger
from rlcore.buffer.policy import SamplePolicy, num_admitted
from rlcore.rollout.router import Router
from rlcore.testing.ledger import prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"
SMALL_LEDGERS = 6
PAIRS = 12 * SMALL_LEDGERS
BATCH, SESSIONS, SLOTS, REPLICAS, STEPS, SKIPPED = 32, 4, 16, 2, 16, 4
MEDIAN = 100


def key(step: int, phase: str = "bench", try_number: int = 1) -> CallKey:
    """Return a caller."""
    return CallKey(run_id="run-1", attempt=1, global_step=step, phase=phase, try_number=try_number)


def filled(folder: Path, count: int) -> Ledger:
    """Return a ledger with `count` pending and `count` finished prompts."""
    ledger = Ledger("run-1", folder / f"{count}-{time.time_ns()}", 1, claim_lease_s=1e9)
    ledger.feed(key(1), [prompt_spec(f"f{i}") for i in range(count)])
    for spec in ledger.claim(1, "w0", count):
        ledger.settle("w0", spec.uid, sessions_of(spec.uid, num=2))
    ledger.feed(key(1), [prompt_spec(f"p{i}") for i in range(count)])
    return ledger


def cost(action) -> float:
    """Return seconds of `action`."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def bench_many_keys() -> bool:
    """Claim and sample 8 prompts with 100 and with 100,000 stored keys, in turns.

    A ledger of 100 keys is empty after 12 claims, so there are several, taken in turns: none of
    them is in the processor's caches only because it is the one that was used last.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small = [filled(Path(folder), 100) for _ in range(SMALL_LEDGERS)]
        large = filled(Path(folder), 100_000)
        for i in range(PAIRS):
            turns = [("few", small[i % SMALL_LEDGERS]), ("many", large)]
            for size, ledger in turns if i % 2 else reversed(turns):
                claim = cost(lambda ledger=ledger: ledger.claim(1, "w1", 8))
                step = key(i + 1, "sample")
                sample = cost(
                    lambda ledger=ledger, step=step: ledger.sample(
                        step, TRAIN, 8, SamplePolicy(max_off_policy_threshold=PAIRS + 1)
                    )
                )
                seconds.setdefault(("claim", size), []).append(claim)
                seconds.setdefault(("sample", size), []).append(sample)
    passed = True
    for what in ("claim", "sample"):
        few, many = (statistics.median(seconds[what, size]) for size in ("few", "many"))
        pairs = zip(seconds[what, "few"], seconds[what, "many"], strict=True)
        ratios = sorted(b / a for a, b in pairs)
        passed &= many / few <= 1.3
        print(f"{what:6s}  100 keys {few * 1e6:7.0f} us   100,000 keys {many * 1e6:7.0f} us   "
              f"ratio {many / few:.2f} (at most 1.3; {PAIRS} pairs, quartiles "
              f"{ratios[PAIRS // 4]:.2f} to {ratios[3 * PAIRS // 4]:.2f})")  # fmt: skip
    return passed


class Simulation:
    """One run under a virtual clock."""

    def __init__(self, folder: Path, sigma: float, train_s: float, budget: int | None) -> None:
        self.random = random.Random(7)
        self.sigma, self.train_s = sigma, train_s
        self.overlaps = budget is not None
        self.policy = SamplePolicy(
            max_off_policy_threshold=(budget or 0) + 1, strategy="pace", keeps_supply=True
        )
        self.warmup = budget or 0
        self.now = 0.0
        self.ledger = Ledger(
            "run-1", folder / f"{time.time_ns()}", 1, clock=lambda: self.now, claim_lease_s=1e12
        )
        self.router = Router(dict.fromkeys([f"r{i}" for i in range(REPLICAS)], object()))
        self.events: list[tuple[float, int, str, int, str]] = []
        self.free = dict.fromkeys(self.router.names, SLOTS)
        self.parked: dict[str, list[tuple[str, int, object]]] = {n: [] for n in self.free}
        self.left: dict[str, int] = {}
        self.holds: dict[tuple[str, int], object] = {}
        self.num_fed = self.num_events = self.num_active = 0
        self.tokens = 0
        self.ends: list[float] = []
        self.step, self.training = 1, False

    def length(self) -> int:
        """Draw a response length: log-normal, cut at 4 times the median."""
        drawn = math.exp(self.random.gauss(math.log(MEDIAN), self.sigma))
        return max(1, round(min(4 * MEDIAN, drawn)))

    def feed(self, count: int) -> None:
        specs = [
            prompt_spec(
                f"p{self.num_fed + i}",
                global_step=self.step,
                index=self.num_fed + i,
                num_sessions=SESSIONS,
            )
            for i in range(count)
        ]
        self.num_fed += self.ledger.feed(key(self.step, "feed"), specs)

    def begin_step(self) -> None:
        counts = self.ledger.counts(TRAIN)
        outstanding = counts["pending"] + counts["running"] + counts["waiting"]
        self.feed(num_admitted(BATCH, outstanding=outstanding, per_step=BATCH, policy=self.policy))

    async def claim(self) -> None:
        """As a worker does: up to twice the slots' sessions."""
        limit = (2 * SLOTS * REPLICAS - self.num_active) // SESSIONS
        for spec in self.ledger.claim(1, "w0", limit):
            self.left[spec.uid] = SESSIONS
            self.num_active += SESSIONS
            for session in range(SESSIONS):
                hold = self.router.acquire(spec.uid)
                name, _ = await hold.__aenter__()
                self.holds[spec.uid, session] = hold
                self.parked[name].append((spec.uid, session, hold))
                self.admit(name)

    def admit(self, name: str) -> None:
        while self.free[name] and self.parked[name]:
            uid, session, _ = self.parked[name].pop(0)
            self.free[name] -= 1
            length = self.length()
            self.tokens += length
            self.push(self.now + length, uid, session, name)

    def push(self, at: float, uid: str, session: int, name: str) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (at, self.num_events, uid, session, name))

    async def session_ended(self, uid: str, session: int, name: str) -> None:
        await self.holds.pop((uid, session)).__aexit__(None, None, None)
        self.free[name] += 1
        self.num_active -= 1
        self.admit(name)
        self.left[uid] -= 1
        if not self.left[uid]:
            self.ledger.settle("w0", uid, sessions_of(uid, num=SESSIONS))

    def try_sample(self) -> None:
        if self.training:
            return
        batch = self.ledger.sample(key(self.step, "sample"), TRAIN, BATCH, self.policy)
        if batch is not None:
            self.training = True
            self.push(self.now + self.train_s, "", 0, "")

    async def run(self) -> tuple[float, float]:
        """Return time and tokens per step, after the first steps."""
        self.feed(self.warmup * BATCH)
        self.begin_step()
        await self.claim()
        tokens_before = 0
        while len(self.ends) < STEPS:
            self.now, _, uid, session, name = heapq.heappop(self.events)
            if uid:
                await self.session_ended(uid, session, name)
            else:
                self.training = False
                self.ledger.mark_trained(key(self.step, "commit"), self.step)
                self.ends.append(self.now)
                self.step += 1
                if len(self.ends) == SKIPPED:
                    tokens_before = self.tokens
                self.begin_step()
            await self.claim()
            self.try_sample()
        steps = STEPS - SKIPPED
        return (
            (self.ends[-1] - self.ends[SKIPPED - 1]) / steps,
            (self.tokens - tokens_before) / steps,
        )


def simulate(sigma: float, train_s: float, budget: int | None) -> tuple[float, float]:
    """Return time and tokens per step of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(Simulation(Path(folder), sigma, train_s, budget).run())


def bench_virtual_clock() -> bool:
    """The table of T_train / T_gen, spread of lengths and staleness budget."""
    passed = True
    print("T_train/T_gen  sigma   share of the bound at budget 0, 1, 2, 4   gain over sync at each")
    for sigma in (0.0, 0.5, 1.0, 1.5):
        generation_s, _ = simulate(sigma, 0.0, 0)
        for share in (0.25, 0.5, 1.0, 2.0):
            train_s = share * generation_s
            t_sync, tokens = simulate(sigma, train_s, 0)
            ideal = max(tokens / (SLOTS * REPLICAS), train_s)
            times = [simulate(sigma, train_s, budget)[0] for budget in (0, 1, 2, 4)]
            reached = [ideal / t for t in times]
            gains = [t_sync / t for t in times]
            passed &= all(r >= 0.92 for r in reached[2:]) and all(g >= 0.98 for g in gains)
            print(f"{share:13.2f}  {sigma:5.1f}   " + "  ".join(f"{r:4.2f}" for r in reached)
                  + "                      " + "  ".join(f"{g:4.2f}" for g in gains))  # fmt: skip
    return passed


def main() -> None:
    """Print both; exit with 1 when a bound is missed."""
    logging.disable(logging.CRITICAL)
    results = [bench_many_keys(), bench_virtual_clock()]
    print("passed" if all(results) else "FAILED")
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
