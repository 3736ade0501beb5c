"""What runs in which slot: arrays over the slots, so that a step costs the same for any number.

Legend: S slots, T tokens of a turn at most. Idle slots keep their last values and are ignored.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlcore.rollout.engine import EngineRequest
from rlcore.rollout.stop_strings import StopStrings
from rlcore.types import TokenOutput

_NO_TOKEN = -1


@dataclass(kw_only=True, slots=True)
class _Occupant:
    request_id: str
    prefix: tuple[int, ...]
    num_replayed: int
    stops: StopStrings | None


class SlotTable:
    """The requests that hold a slot and what they have sampled."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._occupants: list[_Occupant | None] = [None] * num_slots
        self._slot_of: dict[str, int] = {}
        self._free = deque(range(num_slots))
        self._watched: set[int] = set()  # slots with stop strings
        self._rows = np.arange(num_slots)
        self.active = np.zeros(num_slots, dtype=np.bool_)
        """Whether the slot takes part in the next decode."""
        self.position = np.zeros(num_slots, dtype=np.int64)
        """Column and position of the token that is fed next."""
        self.next_token = np.zeros(num_slots, dtype=np.int64)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.do_sample = np.ones(num_slots, dtype=np.bool_)
        self.top_p = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.turn_position = np.zeros(num_slots, dtype=np.int64)
        """Position in its turn of the token that is sampled next: the random counter."""
        self._done = np.zeros(num_slots, dtype=np.int64)
        self._num_replayed = np.zeros(num_slots, dtype=np.int64)
        self._limit = np.zeros(num_slots, dtype=np.int64)
        self._stops = np.full((num_slots, 4), _NO_TOKEN, dtype=np.int64)
        self._tokens = np.zeros((num_slots, max_tokens + 1), dtype=np.int64)
        self._log_probs = np.zeros((num_slots, max_tokens + 1), dtype=np.float32)
        self._versions = np.zeros((num_slots, max_tokens + 1), dtype=np.int64)

    @property
    def has_free(self) -> bool:
        """Whether a request could start."""
        return bool(self._free)

    @property
    def request_ids(self) -> list[str]:
        """Requests that hold a slot."""
        return list(self._slot_of)

    @property
    def width(self) -> int:
        """Columns that the slots which run need, that of the next token included."""
        return int(self.position[self.active].max()) + 1

    def find(self, request_id: str) -> int | None:
        """Return the slot of a request."""
        return self._slot_of.get(request_id)

    def request_id(self, slot: int) -> str:
        """Return the request in `slot`."""
        return self._occupant(slot).request_id

    def prefix(self, slot: int) -> tuple[int, ...]:
        """Return the prompt in `slot` without its last token."""
        return self._occupant(slot).prefix

    def take(self, prefer: int | None) -> int:
        """Reserve a free slot: `prefer` if it is free, else the one that is free longest."""
        if prefer is not None and prefer in self._free:
            self._free.remove(prefer)
            return prefer
        return self._free.popleft()

    def start(
        self,
        slot: int,
        request: EngineRequest,
        prompt: list[int],
        num_replayed: int,
        eos_ids: tuple[int, ...],
        stops: StopStrings | None = None,
    ) -> None:
        """Let `request` hold `slot`, inactive until the keys of its prompt are there.

        Args:
            slot: a free one.
            request: what is to run.
            prompt: its tokens that are prefilled, but for the last.
            num_replayed: how many tokens after `prompt` are fed through decode again.
            eos_ids: the model's own.
            stops: watches the tokens that are sampled from now on.
        """
        params = request.params
        self._occupants[slot] = _Occupant(
            request_id=request.request_id,
            prefix=tuple(prompt[:-1]),
            num_replayed=num_replayed,
            stops=stops,
        )
        if stops is not None:
            self._watched.add(slot)
        self._slot_of[request.request_id] = slot
        self.position[slot] = len(prompt) - 1
        self.next_token[slot] = prompt[-1]
        self.temperature[slot] = params.temperature
        self.do_sample[slot] = params.do_sample
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = params.seed
        self.turn_position[slot] = params.position - num_replayed
        self._done[slot] = 0
        self._num_replayed[slot] = num_replayed
        self._limit[slot] = num_replayed + params.max_tokens
        self._tokens[slot, :num_replayed] = request.prompt_ids[len(prompt) :]
        self._set_stops(slot, params.stop_token_ids + (() if params.ignore_eos else eos_ids))

    def free(self, slot: int) -> None:
        """End the request in `slot`."""
        del self._slot_of[self._occupant(slot).request_id]
        self._occupants[slot] = None
        self._watched.discard(slot)
        self.active[slot] = False
        self._free.append(slot)

    def advance(
        self, tokens: npt.NDArray[np.int64], log_probs: npt.NDArray[np.float32], version: int
    ) -> tuple[list[tuple[int, str]], int]:
        """Take the sampled tokens of a decode; return the finished slots and how many were new.

        A replayed token takes the place of what was sampled for it.
        """
        rows = self._rows[self.active]
        done = self._done[rows]
        replaying = done < self._num_replayed[rows]
        new = np.where(replaying, self._tokens[rows, done], tokens[rows])
        self._tokens[rows, done] = new
        self._log_probs[rows, done] = log_probs[rows]
        self._versions[rows, done] = version
        self._done[rows] += 1
        self.turn_position[rows] += 1
        self.position[rows] += 1
        self.next_token[rows] = new
        stopped = (new[:, None] == self._stops[rows]).any(axis=1) & ~replaying
        if self._watched:
            stopped |= self._complete_texts(rows, new, replaying)
        ended = stopped | (done + 1 >= self._limit[rows])
        finished = [
            (int(rows[i]), "completed" if stopped[i] else "length") for i in np.flatnonzero(ended)
        ]
        return finished, len(rows) - int(replaying.sum())

    def output(self, slot: int, stop_reason: str) -> TokenOutput:
        """Return what the request in `slot` has sampled; replayed tokens are not repeated."""
        new = slice(self._occupant(slot).num_replayed, int(self._done[slot]))
        return TokenOutput(
            token_ids=self._tokens[slot, new].tolist(),
            log_probs=self._log_probs[slot, new].tolist(),
            weight_versions=self._versions[slot, new].tolist(),
            stop_reason=stop_reason,
        )

    def _complete_texts(
        self,
        rows: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        replaying: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Return per row whether its new token completes a stop string."""
        found = np.zeros(len(rows), dtype=np.bool_)
        for i, slot in enumerate(rows):
            if slot in self._watched and not replaying[i]:
                stops = self._occupant(int(slot)).stops
                found[i] = stops is not None and stops.feed(int(tokens[i]))
        return found

    def _occupant(self, slot: int) -> _Occupant:
        occupant = self._occupants[slot]
        assert occupant is not None, f"slot {slot} is free"
        return occupant

    def _set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self._stops[slot] = _NO_TOKEN
        self._stops[slot, : len(ids)] = ids
