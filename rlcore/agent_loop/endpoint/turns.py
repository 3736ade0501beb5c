"""What a session has sampled: turns that continue each other, and the trajectories they make.

A turn is what the model was told since the turn before, and what it sampled then. Turns form trees:
whoever asks twice after the same turn gets two trajectories, which share the turns up to there. A
shared turn is trained in the first of them and is context in the others, so that nothing is
trained twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.agent_loop.transcript import Transcript
from rlcore.types import AgentLoopOutput, TokenOutput


@dataclass(kw_only=True, slots=True, eq=False)
class Turn:
    """One finished request."""

    context_ids: list[int]
    """The prompt; of a turn that continues another, only what came after that one's tokens."""
    output: TokenOutput
    parent: "Turn | None"
    """The turn that this one continues."""
    generate_s: float = 0.0
    num_begun: int = 0
    """Requests that have begun to continue it."""

    def path(self) -> "list[Turn]":
        """Return the turns from the first one to this one."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def ids(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        return [token for turn in self.path() for token in turn.context_ids + turn.output.token_ids]

    def num_response_tokens(self) -> int:
        """Return how many of these come after the prompt."""
        path = self.path()
        num_tokens = sum(len(turn.context_ids) + len(turn.output.token_ids) for turn in path)
        return num_tokens - len(path[0].context_ids)


def trajectories(turns: Sequence[Turn]) -> list[AgentLoopOutput]:
    """Return one trajectory for every turn that none continues, in the order in which they ended.

    Args:
        turns: Of a session, in the order in which they ended.
    """
    continued = {id(turn.parent) for turn in turns}
    trained: set[int] = set()
    return [_trajectory(leaf, trained) for leaf in turns if id(leaf) not in continued]


def _trajectory(leaf: Turn, trained: set[int]) -> AgentLoopOutput:
    path = leaf.path()
    transcript = Transcript(prompt_ids=list(path[0].context_ids))
    num_requests = 0
    for turn in path:
        if turn.parent is not None:
            transcript.add_context(turn.context_ids)
        is_new = id(turn) not in trained
        transcript.add_sampled(turn.output, is_trained=is_new)
        if is_new:
            trained.add(id(turn))
            transcript.generate_s += turn.generate_s
            num_requests += 1
    transcript.stop = leaf.output.stop_reason
    metrics = {"num_requests": float(num_requests), "num_trajectories": 1.0}
    return transcript.output(metrics, {})
