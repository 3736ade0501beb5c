"""One check for every argument that names a variant."""

from collections.abc import Sequence


def check_choice(what: str, value: object, known: Sequence[object]) -> None:
    """Check that `value` is one of `known`.

    Raises:
        ValueError: it is not; the message lists what is known.
    """
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(map(str, known))}")
