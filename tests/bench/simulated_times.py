"""An engine that makes tokens by sleeping, and training that takes a given time.

A user module for bench_modes.py, which copies it into a folder with a file `times.json`: seconds of
a token, sigma of the lengths, seconds of training a step.
"""

import json
import math
import random
import time
from pathlib import Path

from rlcore.rollout.engine import ENGINES, EngineSpec
from rlcore.testing.scripted_engine import ScriptedEngine
from rlcore.trainer.base import PPOTrainer
from rlcore.trainer.phases import Metrics
from rlcore.types import BatchRef, TokenOutput

TIMES = json.loads(Path(__file__).with_name("times.json").read_text())
MEDIAN = 100
LONGEST = 4 * MEDIAN
WORD = 5
"""A token of the tiny model."""


def length_of(seed: int) -> int:
    """Return the length of a request's response: log-normal, cut at 4 times the median."""
    drawn = math.exp(random.Random(seed).gauss(math.log(MEDIAN), TIMES["sigma"]))
    return max(1, round(min(LONGEST, drawn)))


@ENGINES.register("sleeping")
class SleepingEngine(ScriptedEngine):
    """Gives every running request a token per `token_s`, as many as its seed says."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.max_num_seqs)
        self._next_at = 0.0

    def step(self) -> list[tuple[str, TokenOutput]]:
        """Sleep until the next token is due; it is the same for all."""
        # By the clock: what the rest of a step takes is part of the token's time.
        now = time.monotonic()
        self._next_at = max(self._next_at, now - TIMES["token_s"]) + TIMES["token_s"]
        time.sleep(max(0.0, self._next_at - now))
        finished: list[tuple[str, TokenOutput]] = []
        for request_id, (request, output) in list(self._outputs.items())[: self.max_num_seqs]:
            output.token_ids.append(WORD)
            output.log_probs.append(-1.0)
            output.weight_versions.append(self.weight_version)
            self.num_tokens += 1
            made = request.params.position + len(output.token_ids)
            if made >= length_of(request.params.seed):
                output.stop_reason = "stop"
                finished.append((request_id, output))
                del self._outputs[request_id]
        return finished


_old_log_prob, _update = PPOTrainer._compute_old_log_prob, PPOTrainer._update_actor


def _begin_training(self: PPOTrainer, batch: BatchRef) -> Metrics:
    self.state["training_began"] = time.time()
    return _old_log_prob(self, batch)


def _end_training(self: PPOTrainer, batch: BatchRef) -> Metrics:
    metrics = _update(self, batch)
    left = self.state["training_began"] + TIMES["train_s"] - time.time()
    time.sleep(max(0.0, left))
    return {**metrics, "bench/overtime_s": max(0.0, -left)}


# The modes themselves, by their own names: log-probs and update together take `train_s`.
PPOTrainer._compute_old_log_prob = _begin_training
PPOTrainer._update_actor = _end_training
