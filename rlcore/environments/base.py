"""What a text environment is, and which libraries of them there are.

An environment is entered with a seed and answers actions, both sides in text. A row names one in
`extra_info.environment`, as JSON:

    {"library": "textarena", "name": "FrozenLake-v0-random", "seed": 7, "settings": {"size": 4}}

A library of one's own is a function in a file of `trainer.user_modules`:

    @ENVIRONMENTS.register("mine")
    def make(name, **settings):
        return MyEnvironment(name, **settings)
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.errors import DataError
from rlcore.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment says after its reset or an action."""

    text: str
    """For the model; not shown when the episode is over."""
    is_done: bool = False
    """Whether the episode is over."""
    reward: float = 0.0
    """Of the episode so far."""
    is_solved: bool = False
    """Whether the episode counts as a success: the accuracy."""


class TextEnvironment(Protocol):
    """One episode at a time. May draw from the random sources of Python and numpy."""

    def reset(self, seed: int) -> Observation:
        """Begin the episode that the seed names."""
        ...

    def step(self, action: str) -> Observation:
        """Answer what the model wrote."""
        ...


ENVIRONMENTS: Registry[Callable[..., TextEnvironment]] = Registry("environment library")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """Names an episode; the same one every time."""

    library: str
    name: str
    """Of the environment, in its library."""
    seed: int
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment."""

    def to_json(self) -> str:
        """Return what a row holds."""
        return json.dumps(
            {
                "library": self.library,
                "name": self.name,
                "seed": self.seed,
                "settings": self.settings,
            }
        )

    def make(self) -> TextEnvironment:
        """Return the environment, not yet entered.

        Raises:
            ConfigError: the library is unknown or not installed.
            DataError: the library has no such environment or setting.
        """
        return ENVIRONMENTS.get(self.library)(self.name, **self.settings)


def read_spec(extra_info: Mapping[str, Any] | None) -> EnvironmentSpec:
    """Return the environment that a row names.

    Raises:
        DataError: it names none, or not as JSON with library, name and seed.
    """
    text = (extra_info or {}).get("environment")
    try:
        content = json.loads(text or "")
        return EnvironmentSpec(
            library=str(content["library"]),
            name=str(content["name"]),
            seed=int(content["seed"]),
            settings=dict(content.get("settings") or {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "extra_info.environment must be JSON with library, name and seed, is "
            f"{str(text)[:80]!r}: {type(error).__name__}: {error}"
        ) from error


@ENVIRONMENTS.register("textarena")
def _textarena(name: str, **settings: Any) -> TextEnvironment:
    # Imported on use: a library is needed only where its environments are played.
    from rlcore.environments.textarena import TextArenaGame

    return TextArenaGame(name, **settings)
