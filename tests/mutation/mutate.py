"""Mutants of rlcore/algorithms against its unit tests: `make mutation`.

The mutations are Cosmic Ray's, and one of ours that takes a mask away; the runs are not: its runner
starts pytest anew for each of about a thousand mutants, 5 seconds of importing torch each time, and
edits the working tree. Here a process that has imported torch forks for each mutant, and the child
gets the mutated module from an import hook. (mutmut, the other well-kept tool, leaves decorated
functions alone, which here are most, and turns no sign.)

Annotations and decorators are not mutated: they are no maths, and such mutants mostly die at import
and would flatter the figure. Exit status 1
if fewer than 90 % die. A mutant may survive because it is equivalent; look at the list.
"""

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hypothesis  # noqa: F401 - imported once, for all children
import numpy  # noqa: F401
import parso
import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlcore" / "algorithms"
TESTS = ROOT / "tests" / "unit" / "algorithms"
LAST = "test_properties.py"
"""The slow file: what it alone kills takes longest."""

FIRST = {
    "test_advantages.py": ("advantages", "batch_advantages", "groups"),
    "test_distillation.py": ("distillation",),
    "test_kl_and_value.py": ("kl", "value", "offpolicy", "logits"),
    "test_losses.py": ("aggregate", "ppo", "ratio", "sequence_losses", "weighted_losses"),
    "test_masked.py": ("masked", "choices"),
    "test_registries.py": ("bypass", "estimators", "loss_metrics", "losses"),
    "test_returns.py": ("returns",),
    "test_rewards.py": ("rewards",),
    "test_rollout_correction.py": ("correction", "rollout_correction"),
    "test_sessions.py": ("sessions",),
}
"""Which file most likely kills a module's mutants: it runs alone before the others."""

GOAL = 0.9
LIMIT_S = 900

OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in (
        "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "BitAnd_BitOr", "BitOr_BitAnd")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in (
        "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_Gt", "LtE_Lt", "LtE_GtE", "Gt_GtE", "Gt_Lt",
        "GtE_Gt", "GtE_LtE", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceUnaryOperator_Delete_{sign}" for sign in ("USub", "Invert", "Not")),
    "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "AddNot", "NumberReplacer",
]  # fmt: skip


class DropMask(Operator):
    """Takes `select` and `constant` away: values at masked positions are read."""

    def mutation_positions(self, node: parso.tree.NodeOrLeaf) -> Iterator[tuple]:
        """Yield the position of the node if it is such a call."""
        if node.type in ("power", "atom_expr") and len(node.children) == 2:
            name, trailer = node.children
            is_call = trailer.type == "trailer" and trailer.children[0].value == "("
            if is_call and getattr(name, "value", "") in ("select", "constant"):
                yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        """Return the call's first argument."""
        assert index == 0
        argument = node.children[1].children[1].children[0].get_code()
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Name(f"({argument})", node.start_pos, prefix)

    @classmethod
    def examples(cls) -> tuple:
        """Return none: the tests of Cosmic Ray are not run on it."""
        return ()


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    operator: str
    line: int
    code: str

    @property
    def module(self) -> str:
        """Name of the module that it replaces."""
        return f"rlcore.algorithms.{self.path.stem}"

    def __str__(self) -> str:
        """Return the changed line."""
        before, after = (text.splitlines() for text in (self.path.read_text(), self.code))
        changed = [new for old, new in zip(before, after, strict=False) if old != new]
        text = changed[0].strip() if changed else ""
        return f"{self.path.name}:{self.line} {self.operator}: {text}"


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Gives one module from memory."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return this loader for the mutated module."""
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.mutant.path))

    def get_filename(self, fullname: str) -> str:
        """Return where the original lies."""
        return str(self.mutant.path)

    def get_data(self, path: str) -> bytes:
        """Return the mutated source."""
        return self.mutant.code.encode()


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = path.read_text()
    untouched = _annotation_spans(source)
    nodes = list(ast_nodes(get_ast(source)))
    operators = {name: get_operator(f"core/{name}")() for name in OPERATORS}
    for name, operator in {**operators, "DropMask": DropMask()}.items():
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            if any(first <= start < last for first, last in untouched):
                continue
            if name.endswith("Delete_USub") and _is_axis(source, start):
                continue
            code = mutate_code(source, operator, occurrence)
            if code is not None and code != source:
                yield Mutant(path=path, operator=name, line=start[0], code=code)


def _is_axis(source: str, start: tuple[int, int]) -> bool:
    """Whether a -1 stands there: as an axis of [B, T] it is the same as 1, so nothing can tell."""
    line = source.splitlines()[start[0] - 1]
    return re.match(r"-1\b(?![.e])", line[start[1] :]) is not None


def _annotation_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Positions of annotations, decorators and type aliases."""
    tree = ast.parse(source)
    nodes: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            nodes += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            nodes += node.decorator_list
        elif isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
    nodes += [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
    ]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
        if node is not None
    ]


def run_tests(mutant: Mutant | None) -> int:
    """Run the tests in this process; return pytest's exit status."""
    if mutant is not None:
        sys.meta_path.insert(0, MutantFinder(mutant))
    files = sorted(TESTS.glob("test_*.py"), key=lambda path: (path.name == LAST, path.name))
    stages = [files]
    if mutant is not None:
        first = [path for path in files if mutant.path.stem in FIRST.get(path.name, ())]
        stages = [first, [path for path in files if path not in first]]
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", f"--confcutdir={TESTS}"]
    for stage in stages:
        status = int(pytest.main([*options, *map(str, stage)])) if stage else 0
        if status:
            return status
    return 0


def start(mutant: Mutant | None) -> int:
    """Fork a child that runs the tests; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(LIMIT_S)
    silent = os.open(os.devnull, os.O_WRONLY)
    if mutant is not None:
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    os._exit(run_tests(mutant) % 256)


def run_all(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Return the survivors."""
    running: dict[int, Mutant] = {}
    survivors: list[Mutant] = []
    begun, done = time.monotonic(), 0
    pending = list(reversed(mutants))
    while pending or running:
        while pending and len(running) < jobs:
            mutant = pending.pop()
            running[start(mutant)] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        done += 1
        if status == 0:
            survivors.append(mutant)
            print(f"survived  {mutant}", flush=True)
        if done % 50 == 0:
            seconds = time.monotonic() - begun
            print(f"{done} of {len(mutants)}, {seconds / 60:.1f} minutes", flush=True)
    return survivors


def main() -> int:
    """Run all mutants and report; see the module."""
    parser = argparse.ArgumentParser(description="Mutants of rlcore/algorithms")
    parser.add_argument("files", nargs="*", help="names of files in rlcore/algorithms; all if none")
    parser.add_argument("--sample", type=int, help="that many mutants, drawn with seed 0")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paths = sorted(PACKAGE.glob("*.py"))
    if arguments.files:
        paths = [path for path in paths if path.name in arguments.files]
    _, status = os.waitpid(start(None), 0)
    if status != 0:
        print("the tests fail without a mutant")
        return 1
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    if arguments.sample is not None and arguments.sample < len(mutants):
        mutants = random.Random(0).sample(mutants, arguments.sample)
    survivors = run_all(mutants, arguments.jobs)
    by_operator = Counter(mutant.operator.split("_")[0] for mutant in mutants)
    alive = Counter(mutant.operator.split("_")[0] for mutant in survivors)
    for operator, count in by_operator.most_common():
        print(f"{operator:28} {count - alive[operator]:5} of {count:5} killed")
    killed = 1 - len(survivors) / max(len(mutants), 1)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed: {killed:.1%}")
    return 0 if killed >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
