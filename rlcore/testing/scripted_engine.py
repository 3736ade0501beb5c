"""An engine without a model, for tests of whatever stands around engines.

It follows `rlcore.rollout.engine.Engine`: a step gives every running request its next token, which
is a function of its seed and position, and records what was called in which order.
"""

import threading
import time

from rlcore.errors import ConfigError
from rlcore.rollout.engine import EngineRequest
from rlcore.types import TokenOutput, WeightMeta


class ScriptedEngine:
    """Samples `seed + position` for `max_tokens` steps.

    Args:
        max_num_seqs: requests that run at a time.
        gate: when given, each step waits until it is set: freezes the engine's thread.
        fail_at_step: raise RuntimeError in this step.
        breaks_on: raise RuntimeError while the prompt of a request begins with this token.
        step_s: how long a step takes.
    """

    def __init__(
        self,
        max_num_seqs: int = 16,
        *,
        gate: threading.Event | None = None,
        fail_at_step: int | None = None,
        breaks_on: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.calls: list[str] = []
        """What was called, steps left out."""
        self.num_steps = 0
        self.has_cache = True
        self.weight_version = 0
        self.num_tokens = 0
        self._gate = gate
        self._fail_at_step = fail_at_step
        self._breaks_on = breaks_on
        self._step_s = step_s
        self._staged: int | None = None
        self._outputs: dict[str, tuple[EngineRequest, TokenOutput]] = {}

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that run or wait."""
        return list(self._outputs)

    def check(self, request: EngineRequest) -> None:
        """Refuse a request without a prompt.

        Raises:
            ConfigError: there is none.
        """
        if not request.prompt_ids:
            raise ConfigError(f"request {request.request_id} has no prompt")

    def add(self, request: EngineRequest) -> None:
        """Take a request."""
        assert self.has_cache, "added while asleep"
        self.calls.append(f"add {request.request_id}")
        output = TokenOutput(token_ids=[], log_probs=[], weight_versions=[], stop_reason="")
        self._outputs[request.request_id] = (request, output)

    def step(self) -> list[tuple[str, TokenOutput]]:
        """Give the oldest `max_num_seqs` requests one token each."""
        if self._gate is not None:
            assert self._gate.wait(timeout=60), "the test never opened the gate"
        time.sleep(self._step_s)
        self.num_steps += 1
        if self.num_steps == self._fail_at_step:
            raise RuntimeError("scripted failure")
        if any(request.prompt_ids[0] == self._breaks_on for request, _ in self._outputs.values()):
            raise RuntimeError("a prompt that breaks the engine")
        finished: list[tuple[str, TokenOutput]] = []
        for request_id, (request, output) in list(self._outputs.items())[: self.max_num_seqs]:
            position = request.params.position + len(output.token_ids)
            output.token_ids.append(request.params.seed + position)
            output.log_probs.append(-float(position))
            output.weight_versions.append(self.weight_version)
            self.num_tokens += 1
            if len(output.token_ids) == request.params.max_tokens:
                output.stop_reason = "length"
                finished.append((request_id, output))
                del self._outputs[request_id]
        return finished

    def hold(self) -> None:
        """Note it."""
        self.calls.append("hold")

    def go_on(self) -> None:
        """Note it."""
        self.calls.append("go on")

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request."""
        self.calls.append(f"abort {request_id}")
        entry = self._outputs.pop(request_id, None)
        if entry is None:
            return None
        entry[1].stop_reason = "aborted"
        return entry[1]

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return a copy of what a request has."""
        if request_id not in self._outputs:
            return None
        output = self._outputs[request_id][1]
        return TokenOutput(
            token_ids=list(output.token_ids),
            log_probs=list(output.log_probs),
            weight_versions=list(output.weight_versions),
            stop_reason="",
        )

    def stage_weights(self, meta: WeightMeta) -> str:
        """Remember the version."""
        self.calls.append(f"stage {meta.version}")
        self._staged = meta.version
        return meta.checksum

    def commit_weights(self, version: int) -> None:
        """Use the staged version."""
        assert self._staged == version, "committed what was not staged"
        self.calls.append(f"commit {version}")
        self.weight_version = version

    def release_cache(self) -> None:
        """Note it."""
        self.calls.append("release")
        self.has_cache = False

    def restore_cache(self) -> None:
        """Note it."""
        self.calls.append("restore")
        self.has_cache = True

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")
