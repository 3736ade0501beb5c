"""One registry class for every extension point: refuses duplicates and lists the known names."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rlcore.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of thing.

    Example:
        >>> estimators = Registry[Callable[..., float]]("advantage estimator")
        >>> @estimators.register("grpo")
        ... def grpo(): ...
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`.

        Raises:
            ConfigError: `name` already belongs to another object. The same definition loaded a
                second time (same module and qualified name) replaces the first.
        """

        def add(entry: T) -> T:
            known = self._entries.get(name)
            if known is not None and known is not entry and _origin(known) != _origin(entry):
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: {_origin(known)} and "
                    f"{_origin(entry)}; give one of them another name"
                )
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry called `name`.

        Raises:
            ConfigError: there is none; the message lists the known names.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names()) or 'none'}"
            ) from None

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _origin(entry: object) -> str:
    module = getattr(entry, "__module__", type(entry).__module__)
    name = getattr(entry, "__qualname__", type(entry).__qualname__)
    return f"{module}.{name}"
