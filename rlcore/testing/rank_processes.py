"""Training ranks as plain processes: a group without Ray, for tests of what ranks must agree on."""

import multiprocessing
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from rlcore.errors import RLCoreError
from rlcore.tcp_store import open_store
from rlcore.training.balance import balanced_rows
from rlcore.training.batches import Rows
from rlcore.training.ranks import Ranks, Rendezvous
from rlcore.training.sharding import whole
from rlcore.training.spec import TrainingSpec
from rlcore.training.worker import TrainingWorker
from rlcore.types import CallKey

HOST = "127.0.0.1"
Answer = tuple[bool, Any]
"""Whether the call returned, and what it returned or raised."""


class RankWorker:
    """One rank's worker, given whole batches: it takes its part of them, as the Ray actor does."""

    def __init__(self, spec: TrainingSpec, ranks: Ranks) -> None:
        self.worker = TrainingWorker(spec, ranks)
        self.ranks = ranks

    def update_actor(self, key: CallKey, rows: Rows, groups: list[str]) -> dict[str, float]:
        """See TrainingWorker.update_actor."""
        share = self.worker.share(key, groups, _lengths(rows))
        own = _chosen(rows, share.rows)
        return self.worker.update_actor(key, own, [groups[i] for i in share.rows], share.steps)

    def compute_log_prob(
        self, key: CallKey, rows: Rows, groups: list[str], keeps_start: bool = False
    ) -> tuple[list[int], Rows, dict[str, float]]:
        """Return the numbers of this rank's rows, their columns and the metrics."""
        chosen = self._own_rows(rows, groups)
        own = _chosen(rows, chosen)
        return chosen, *self.worker.compute_log_prob(key, own, keeps_start=keeps_start)

    def compute_teacher_log_prob(
        self, key: CallKey, rows: Rows, groups: list[str]
    ) -> tuple[list[int], Rows, dict[str, float]]:
        """Return the numbers of this rank's rows, their columns and the metrics."""
        chosen = self._own_rows(rows, groups)
        return chosen, *self.worker.compute_teacher_log_prob(key, _chosen(rows, chosen))

    def _own_rows(self, rows: Rows, groups: list[str]) -> list[int]:
        everything = range(len(groups))
        return balanced_rows(everything, groups, _lengths(rows), self.ranks.size)[self.ranks.rank]

    def update_critic(self, key: CallKey, rows: Rows, groups: list[str]) -> dict[str, float]:
        """See TrainingWorker.update_critic."""
        share = self.worker.share(key, groups, _lengths(rows), of="critic")
        own = _chosen(rows, share.rows)
        return self.worker.update_critic(key, own, [groups[i] for i in share.rows], share.steps)

    def compute_values(
        self, key: CallKey, rows: Rows, groups: list[str]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Return the numbers of this rank's rows and their values."""
        chosen = self._own_rows(rows, groups)
        return chosen, self.worker.compute_values(key, _chosen(rows, chosen))[0]["values"]

    def weights(self) -> torch.Tensor:
        """Return all weights in one line, whole."""
        parameters = self.worker.policy.model.parameters()
        return torch.cat([whole(p.detach()).flatten() for p in parameters]).clone()

    def local_elements(self) -> int:
        """Return how many weights this rank holds itself."""
        parameters = self.worker.policy.model.parameters()
        return sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in parameters)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the worker's own."""
        return getattr(self.worker, name)


class RankProcesses:
    """N processes that stay up for several specs.

    Example:
        >>> with RankProcesses(2) as ranks:
        ...     ranks.build(spec)
        ...     both = ranks.call("update_actor", key, rows, groups)
    """

    def __init__(self, size: int, *, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._store = open_store(HOST)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = Rendezvous(
                host=HOST, port=self._store.port, rank=rank, size=size, timeout_s=timeout_s
            )
            process = context.Process(target=_serve, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def build(self, spec: TrainingSpec) -> None:
        """Give every rank a new worker."""
        self._exchange(None, spec)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every RankWorker; return the answers in the order of ranks.

        Raises:
            RLCoreError: the first rank's that failed.
        """
        return self._exchange(method, args)

    def _exchange(self, method: str | None, content: Any) -> list[Any]:
        # By torch's own pickling tensors would travel as files of a server.
        message = pickle.dumps((method, content))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers: list[Answer] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout_s):
                raise TimeoutError(f"rank {rank} did not answer {method} in {self._timeout_s} s")
            answers.append(pickle.loads(pipe.recv_bytes()))
        for is_fine, answer in answers:
            if not is_fine:
                raise answer
        return [answer for _, answer in answers]

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
        for process in self._processes:
            process.join(10)


def _serve(place: Rendezvous, pipe: Connection) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.join(place)
    worker: RankWorker | None = None
    while True:
        try:
            method, content = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if method is None:
                worker = RankWorker(content, ranks)
                answer: Answer = (True, None)
            else:
                answer = (True, getattr(worker, method)(*content))
        except RLCoreError as error:
            answer = (False, error)
        pipe.send_bytes(pickle.dumps(answer))


def _lengths(rows: Rows) -> list[int]:
    pairs = zip(rows["prompts"], rows["responses"], strict=True)
    return [len(prompt) + len(response) for prompt, response in pairs]


def _chosen(rows: Rows, numbers: Sequence[int]) -> Rows:
    return {name: [values[i] for i in numbers] for name, values in rows.items()}
