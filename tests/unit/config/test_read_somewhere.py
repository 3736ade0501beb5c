"""No honoured key is read nowhere: the code is searched for every field of the tree.

An access counts when the attribute is taken from an expression that ends in the key's section:
`config.data.seed`, or `actor.grad_clip` where `actor` was bound to `….actor` or annotated with the
section's class. Keys whose only legal value is the default are satisfied, not read.
"""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

from rlcore.config import PHASES, RunConfig
from rlcore.config.tree import all_fields, honoured_fields, section_of

ROOT = Path(__file__).resolve().parents[3]
# These show and check the tree; reading a key there has no effect on a run.
SHOWN_ONLY = {"report.py", "memory.py", "script.py", "docs.py", "schema.py"}


def files():
    for folder in ("rlcore", "tasks", "flows"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            is_check = path.parent.name == "config" and (
                path.name in SHOWN_ONLY or path.name.startswith("rules")
            )
            if not is_check:
                yield path


def class_names():
    """Name of every section's class -> the last part of its key ("" for the root)."""
    names = {"RunConfig": ""}
    pending = [RunConfig]
    while pending:
        for name, field in pending.pop().model_fields.items():
            inner = section_of(field)
            if inner is not None:
                names[inner.__name__] = field.alias or name
                pending.append(inner)
    return names


class Accesses(ast.NodeVisitor):
    """Collects (section, key) of every attribute that is read."""

    def __init__(self, classes):
        self.classes = classes
        self.aliases = {"config": {""}}
        self.found = set()

    def sections(self, node):
        """The last parts of the keys that an expression may stand for."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, set())
        if isinstance(node, ast.IfExp):
            return self.sections(node.body) | self.sections(node.orelse)
        if isinstance(node, ast.Attribute):
            kept = self.aliases.get(f"self.{node.attr}")  # a section that __init__ put away
            return kept or {"" if node.attr in {"config", "_config"} else node.attr}
        return set()

    def visit_FunctionDef(self, node):
        before = dict(self.aliases)
        for argument in node.args.args + node.args.kwonlyargs:
            note = argument.annotation
            name = note.id if isinstance(note, ast.Name) else getattr(note, "value", None)
            if name in self.classes:
                self.aliases[argument.arg] = {self.classes[name]}
        self.generic_visit(node)
        kept = {name: value for name, value in self.aliases.items() if name[:5] == "self."}
        self.aliases = {**before, **kept}

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        before = dict(self.aliases)
        if node.name in self.classes:
            self.aliases["self"] = {self.classes[node.name]}
        self.generic_visit(node)
        self.generic_visit(node)  # methods may come before the __init__ that binds
        self.aliases = before

    def visit_Assign(self, node):
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                sections = self.sections(value)
                if isinstance(name, ast.Name) and sections:
                    self.aliases[name.id] = sections
                if isinstance(name, ast.Attribute) and sections:
                    self.aliases[f"self.{name.attr}"] = sections

    def visit_Attribute(self, node):
        self.found |= {(section, node.attr) for section in self.sections(node.value)}
        self.generic_visit(node)


def accesses():
    found = set()
    for path in files():
        visitor = Accesses(class_names())
        visitor.visit(ast.parse(path.read_text()))
        found |= visitor.found
    return found


# Read by the section itself, when it is built: it fills the keys that follow it.
FILLS_OTHERS = {
    "actor_rollout_ref.actor.clip_ratio",
    "distillation.distillation_loss.clip_ratio",
}


def has_one_value(path):
    kind = all_fields()[path].annotation
    return get_origin(kind) is Literal and len(get_args(kind)) == 1


def is_pinned(path):
    """A number whose limits leave one value, such as `top_p` between 1 and 1."""
    limits = [getattr(m, side) for m in all_fields()[path].metadata for side in ("ge", "le")
              if getattr(m, side, None) is not None]  # fmt: skip
    return len(limits) == 2 and len(set(limits)) == 1


def unread(found):
    keys = [
        path
        for path in honoured_fields()
        if not (has_one_value(path) or is_pinned(path) or path in FILLS_OTHERS)
    ]
    missing = []
    for path in keys:
        section, _, key = f".{path}".rpartition(".")
        if section == ".deadlines" and key in PHASES:  # all by `for_phase`
            continue
        if (section.rpartition(".")[2], key) not in found:
            missing.append(path)
    return missing


def test_every_honoured_key_is_read():
    assert unread(accesses()) == []


def test_the_search_finds_what_is_missing():
    found = accesses()
    assert ("optim", "lr") in found
    missing = ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr"]
    assert unread(found - {("optim", "lr")}) == missing
    assert ("rollout", "no_such_key") not in found
