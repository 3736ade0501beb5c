"""The JSON Schema of presets, for editors: types, limits, descriptions, units, what is not there.

`rollflow schema` prints it; the file that presets refer to is written by `make docs`.
"""

from typing import Any

from rlcore.config.run import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole preset; nothing is required, since overrides can add to it."""
    schema = RunConfig.model_json_schema(by_alias=True, mode="validation")
    _require_nothing(schema)
    return {
        "$schema": DIALECT,
        "title": "rollflow preset",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def _require_nothing(node: Any) -> None:
    if isinstance(node, dict):
        node.pop("required", None)  # pyright: ignore[reportUnknownMemberType]
        for value in list(node.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _require_nothing(value)
    elif isinstance(node, list):
        for value in node:  # pyright: ignore[reportUnknownVariableType]
            _require_nothing(value)
