"""A copy of the weights at the start of a step, for the old log-probs of its later inner steps.

With several optimizer steps between two weight updates of the replicas, the proximal policy is the
one that the step began with (verl's DetachActorWorker): the copy is made once a step, and exchanged
with the current weights while log-probs are computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rlcore.errors import FencedError
from rlcore.types import CallKey


class StartWeights:
    """The copy and the step that it belongs to."""

    def __init__(self) -> None:
        self._step = 0
        self._copies: dict[str, torch.Tensor] = {}

    @contextmanager
    def of_step(self, key: CallKey, model: nn.Module, *, is_needed: bool) -> Iterator[None]:
        """Let the block see the weights at the start of the key's step.

        At inner step 0 these are the current ones, which are copied.

        Args:
            key: Names step and inner step.
            model: Its parameters are exchanged in place and come back in any case.
            is_needed: Off: the step has one inner step, nothing is copied.

        Raises:
            FencedError: the copy is of another step: the worker was restarted meanwhile.
        """
        if not is_needed:
            yield
            return
        if key.inner_step == 0:
            self._keep(key.global_step, model)
            yield
            return
        if self._step != key.global_step:
            raise FencedError(
                f"{key} was refused: the weights at the start of the step are not here (kept: step "
                f"{self._step or 'none'}); the step has to begin anew"
            )
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _keep(self, step: int, model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self._copies:
                    self._copies[name].copy_(parameter)
                else:
                    self._copies[name] = parameter.detach().clone()
        self._step = step

    def _exchange(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                current = parameter.detach().clone()
                parameter.copy_(self._copies[name])
                self._copies[name].copy_(current)
