"""What every section of the configuration shares: frozen, closed, with docstrings as descriptions.

Sections import nothing but pydantic, so that a configuration is checked in a fraction of a second.
"""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """One level of the configuration tree."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        # `model` is a key of verl's; pydantic reserves the prefix `model_` only.
        protected_namespaces=(),
    )


def _refuse_bool(value: Any) -> Any:
    # pydantic reads True as 1: `rollout.n=true` would pass as a group of one.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a truth value")  # noqa: TRY004  pydantic's protocol
    return value


def as_tuple(value: Any) -> Any:
    """Return a lone string as a tuple of one, and anything else as it is."""
    return (value,) if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path; `~` is the user's home, as in verl's own defaults."""
Paths = Annotated[tuple[PathText, ...], BeforeValidator(as_tuple)]
"""One path or a list of them; always a tuple when read."""
