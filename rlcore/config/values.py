"""Values of honoured keys: pydantic's verdict, told with dotted paths and fixes."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlcore.config.problems import CROSS_FIELD, Problem, show
from rlcore.config.refused_values import REFUSED_VALUES
from rlcore.config.run import RunConfig
from rlcore.config.tree import Tree, all_fields, get, put, remove


def validate_tree(tree: Tree) -> tuple[RunConfig | None, list[Problem]]:
    """Check values, and with wrong ones out of the way the rules between keys as well."""
    checked, problems, rules = _validate_once(tree)
    if checked is not None or rules:
        return checked, problems + rules
    wrong = {problem.path for problem in problems}
    mended = tree
    for path in wrong:
        field = all_fields()[path]
        mended = put(mended, path, "?") if field.is_required() else remove(mended, path)
    _, _, rules = _validate_once(mended)
    # What a rule says about a default that stands in for a wrong value is of no use.
    told = [rule for rule in rules if not wrong & {rule.path, *rule.involves}]
    return None, problems + told


def _validate_once(tree: Tree) -> tuple[RunConfig | None, list[Problem], list[Problem]]:
    """Return the configuration, or problems of single values, or of the rules between them."""
    try:
        return RunConfig.model_validate(tree), [], []
    except ValidationError as error:
        details = error.errors(include_url=False)
    if details[0]["type"] == CROSS_FIELD:
        return None, [], list(details[0].get("ctx", {})["problems"])
    found: dict[str, Problem] = {}
    for detail in details:
        for problem in _problems_of(tree, detail):
            found.setdefault(problem.path, problem)  # one for a list with several wrong items
    return None, list(found.values()), []


def _problems_of(tree: Tree, detail: ErrorDetails) -> list[Problem]:
    path = _honoured_prefix(detail["loc"])
    value = get(tree, path)
    if detail["type"] == "missing" and value is None:
        return [_missing(key) for key in _required_at(path)]
    refused = REFUSED_VALUES.get(path)
    if refused is not None and refused.names(value):
        return [
            Problem(
                path=path,
                value=value,
                reason=refused.reason,
                fix=refused.fix,
                is_unsupported=True,
            )
        ]
    reason = "it holds too few values" if detail["type"] == "missing" else detail["msg"]
    reason = reason.removeprefix("Value error, ")
    field = all_fields()[path]
    default = field.get_default(call_default_factory=True)
    shown = "" if field.is_required() else f" (default {show(default)})"
    return [
        Problem(
            path=path,
            value=value,
            reason=reason[0].lower() + reason[1:],
            fix=f"give a valid value{shown}: {field.description}",
        )
    ]


def _missing(path: str) -> Problem:
    return Problem(
        path=path,
        has_value=False,
        reason="it is missing and has no default",
        fix=f"set it: {all_fields()[path].description}",
    )


def _honoured_prefix(location: tuple[int | str, ...]) -> str:
    """Return the key of an error's place, without positions in lists."""
    path = ""
    for part in location:
        path = f"{path}.{part}".lstrip(".")
        if path in all_fields():
            break
    return path


def _required_at(path: str) -> list[str]:
    """Return the keys without a default at `path`, or below it where it is a section."""
    return [
        key
        for key, field in all_fields().items()
        if field.is_required() and (key == path or key.startswith(f"{path}."))
    ]
