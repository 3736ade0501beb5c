"""TextArena's games for one player as text environments.

What the model reads is what the game says to it, without a copy of its own moves: those it has
read as its own tokens. So the game is made without TextArena's wrappers (`-raw`).

TextArena and not `verifiers`: its environments are functions of action to text. Those of verifiers
drive the model themselves through a client of OpenAI's, so tokens, log-probs and weight versions
would be theirs to keep, and the package brings clients of its vendor's cloud along.

It is an extra (`rollflow[textarena]`): it brings python-chess, whose licence is GPL-3.0.
"""

from typing import Any

from rlcore.environments.base import Observation
from rlcore.errors import ConfigError, DataError

RAW = "-raw"
PLAYER = 0


class TextArenaGame:
    """One game; wins pay 1, TextArena's own parts of 1 are kept."""

    def __init__(self, name: str, **settings: Any) -> None:
        """Make the game.

        Raises:
            ConfigError: TextArena is not installed.
            DataError: there is no such game, or it has no such setting.
        """
        try:
            import textarena
        except ImportError as error:
            raise ConfigError(
                f"environments of textarena need the package textarena: {error}; install it "
                "(`pip install 'rollflow[textarena]'`)"
            ) from error
        try:
            self._game = textarena.make(env_id=name.removesuffix(RAW) + RAW, **settings)
        except (ValueError, TypeError, KeyError, ImportError) as error:
            raise DataError(f"textarena has no game {name!r} with {settings}: {error}") from error

    def reset(self, seed: int) -> Observation:
        """Begin a game.

        Raises:
            DataError: it is not for one player.
        """
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise DataError(f"only games for one player can be played: {error}") from error
        return Observation(text=self._messages())

    def step(self, action: str) -> Observation:
        """Make a move."""
        is_done, _ = self._game.step(action=action)
        if not is_done:
            return Observation(text=self._messages())
        rewards, _ = self._game.close()
        reward = float(rewards[PLAYER])
        return Observation(text="", is_done=True, reward=reward, is_solved=reward >= 1)

    def _messages(self) -> str:
        _, messages = self._game.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender != PLAYER)
