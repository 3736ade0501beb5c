"""The type of a deployment's `config` parameter: the tree of `RunConfig` with every key optional.

Prefect turns it into the JSON Schema of the deployment. From that the UI draws its form, and the
server refuses wrong types, values out of bounds and unknown keys before a run exists. Only the keys
that were set count, so no key has a default in the schema: a form that filled defaults in would
overrule the preset with them. The default is told in the description instead.
"""

from collections.abc import Mapping
from typing import Annotated, Any, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
    create_model,
    model_serializer,
)
from pydantic.fields import FieldInfo

from rlcore.config import RunConfig
from rlcore.config.base import Section
from rlcore.config.problems import show
from rlcore.config.tree import honoured_fields, section_of

_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
"""pydantic's names, which stay in the schema of a number that may be null, to JSON Schema's."""


class PartialSection(BaseModel):
    """One level of a partial configuration."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )

    @model_serializer(mode="plain")
    def _only_what_is_set(self) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            fields[n].alias or n: getattr(self, n) for n in fields if n in self.model_fields_set
        }

    def as_tree(self) -> dict[str, Any]:
        """Return the keys that were set, with verl's names, as JSON values."""
        return self.model_dump(mode="json")


def as_tree(config: "PartialSection | Mapping[str, Any] | None") -> dict[str, Any] | None:
    """Return a flow's `config` parameter as a plain tree; None stays None."""
    if isinstance(config, PartialSection):
        return config.as_tree()
    return None if config is None else dict(config)


def _as_form(schema: dict[str, Any]) -> None:
    """Take the default out, and name the bounds of nullable numbers as JSON Schema does."""
    schema.pop("default", None)
    for choice in schema.get("anyOf", []):
        for ours, theirs in _BOUNDS.items():
            if ours in choice:
                choice[theirs] = choice.pop(ours)


def _partial(section: type[Section], prefix: str) -> type[PartialSection]:
    """Return `section` with every key optional; keys that are refused anyway are not in it."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = section_of(field)
        if inner is not None:
            below = _partial(inner, f"{path}.")
            if below.model_fields:
                fields[name] = (below, _optional(field, field.description))
        elif path in honoured_fields():
            fields[name] = (_annotation(field), _optional(field, _told(field)))
    name = f"Partial{section.__name__.removesuffix('Config')}"
    made = create_model(name, __base__=PartialSection, __doc__=section.__doc__, **fields)
    return cast("type[PartialSection]", made)


def _annotation(field: FieldInfo) -> Any:
    """Return the type of a key with its bounds."""
    kind = field.annotation
    if _is_list(kind):
        kind = Annotated[kind, WithJsonSchema(_list_schema(kind))]
    for note in field.metadata:
        kind = Annotated[kind, note]
    return kind


def _optional(field: FieldInfo, description: str | None) -> Any:
    return Field(
        default=None,
        validate_default=False,
        alias=field.alias,
        description=description,
        json_schema_extra=_as_form,
    )


def _told(field: FieldInfo) -> str:
    if field.is_required():
        return str(field.description)
    return f"{field.description} Default: {show(field.get_default(call_default_factory=True))}."


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _list_schema(kind: Any) -> dict[str, Any]:
    """Return the schema of a tuple of words of any length, or of a fixed number of values."""
    arguments = get_args(kind)
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": TypeAdapter(arguments[0]).json_schema()}
    items = TypeAdapter(arguments[0]).json_schema()
    length = len(arguments)
    return {"type": "array", "items": items, "minItems": length, "maxItems": length}


class PartialConfig(_partial(RunConfig, "")):
    """What `train` and `evaluate_policy` take as `config`: only the keys that are set count."""
