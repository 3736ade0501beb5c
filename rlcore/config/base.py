"""What every section of the configuration shares: frozen, closed, with docstrings as descriptions.

Sections import nothing but pydantic, so that a configuration is checked in a fraction of a second.
A number's type says its unit (`Tokens`, `Seconds`): the JSON Schema and `rollflow check` show it.
"""

import os
from abc import ABC, abstractmethod
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema


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


class SchemaNote(ABC):
    """Metadata of a field that adds words to its JSON Schema."""

    @abstractmethod
    def notes(self) -> dict[str, str]:
        """Return what is added."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), **self.notes()}


class Unit(SchemaNote):
    """What a number counts or measures."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def notes(self) -> dict[str, str]:
        """Return the unit."""
        return {"unit": self.name}


def _refuse_bool(value: Any) -> Any:
    # pydantic reads True as 1: `rollout.n=true` would pass as a group of one.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a truth value")  # noqa: TRY004  pydantic's protocol
    return value


def as_tuple(value: Any) -> Any:
    """Return a lone string as a tuple of one, and anything else as it is."""
    return (value,) if isinstance(value, str) else value


def falls_back(values: Any, given: str, *to: str) -> Any:
    """Return raw `values` of a section, with `given` in place of the keys `to` that are not set."""
    if not isinstance(values, dict) or given not in values:
        return values  # pyright: ignore[reportUnknownVariableType]
    known = cast("dict[str, Any]", values)
    return {**dict.fromkeys(to, known[given]), **known}


Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool)]

Tokens = Annotated[Int, Unit("tokens")]
Characters = Annotated[Int, Unit("characters")]
Prompts = Annotated[Int, Unit("prompts")]
Sessions = Annotated[Int, Unit("sessions per prompt")]
Trajectories = Annotated[Int, Unit("trajectories")]
Steps = Annotated[Int, Unit("steps")]
Epochs = Annotated[Int, Unit("passes over the data")]
Seed = Annotated[Int, Unit("seed")]
Count = Annotated[Int, Unit("count")]
Rank = Annotated[Int, Unit("rank")]
Hosts = Annotated[Int, Unit("hosts")]
Devices = Annotated[Int, Unit("devices per host")]
Processes = Annotated[Int, Unit("processes")]
Slots = Annotated[Int, Unit("slots per replica")]
Threads = Annotated[Int, Unit("threads per process")]
Cpus = Annotated[Int, Unit("logical CPUs")]
Megabytes = Annotated[Int, Unit("MiB")]
Bytes = Annotated[Int, Unit("bytes")]
Port = Annotated[Int, Unit("port")]
Batches = Annotated[Float, Unit("batches")]
Seconds = Annotated[Float, Unit("s")]
Share = Annotated[Float, Unit("share, 0 to 1")]
Factor = Annotated[Float, Unit("factor")]
LogProb = Annotated[Float, Unit("nats per token")]

PathText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path; `~` is the user's home, as in verl's own defaults."""
Paths = Annotated[
    tuple[PathText, ...],
    BeforeValidator(as_tuple, json_schema_input_type=PathText | tuple[PathText, ...]),
]
"""One path or a list of them; always a tuple when read."""
Words = Annotated[
    tuple[str, ...], BeforeValidator(as_tuple, json_schema_input_type=str | tuple[str, ...])
]
"""One word or a list of them; always a tuple when read."""
