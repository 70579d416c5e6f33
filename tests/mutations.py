"""Change the code at one place after the other, and print the changes that no test notices.

    python -m tests.mutations                       fifty changes, others each day
    python -m tests.mutations --seed 7 --count 10   these again

Each change swaps a comparison or a logical operator, or removes a `not`, in the rooms that keep the
promise: the engine, the journal, staging and storage, and in pools. The tests of these rooms and
random schedules run on a copy of the repository, then those of whole runs. What none notices is a
gap, or a place where both ways are right.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
_PACKAGE: Final = "snakemake_executor_plugin_mantik"
_ROOMS: Final = ("engine", "journal", "staging", "storage")
_POOLS: Final = "sites/pools.py"
_TESTS: Final = (
    (
        *(f"tests/{room}" for room in _ROOMS),
        "tests/sites/test_pools.py",
        "tests/faults/test_schedules.py",
    ),
    ("tests/views", "tests/cli", "tests/adapter", "tests/e2e"),
)
"""The second ones take longer: they run where the first ones notice nothing."""
_SEEDS: Final = "0-79"
_HANGS_S: Final = 300
"""Seconds after which a test hangs, which is noticed."""
_MOST: Final = 1 / 25
"""Share of changes that may go unnoticed: at some places both ways are right."""
_SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A change of one expression of a module, which is relative to the repository."""

    module: Path
    line: int
    before: str
    after: str
    text: str
    """The module's text with the change."""


def _changed(node: ast.AST) -> ast.AST | None:
    """Return the expression with another meaning; None if it is of no kind that is changed."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BoolOp():
            made = deepcopy(node)
            made.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
            return made
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            made_compare = deepcopy(node)
            made_compare.ops = [_SWAPS[type(op)]()]  # type: ignore[list-item]
            return made_compare
    return None


def mutations(module: Path) -> Iterator[Mutation]:
    """Yield all changes of a module."""
    text = (ROOT / module).read_text()
    begins = [0]
    for line in text.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if (made := _changed(node)) is None or not isinstance(node, ast.expr):
            continue
        before, after = ast.get_source_segment(text, node) or "", ast.unparse(made)
        first = begins[node.lineno - 1] + node.col_offset
        rest = text.encode()[first:].replace(before.encode(), f"({after})".encode(), 1)
        changed = text.encode()[:first] + rest
        yield Mutation(module, node.lineno, before, after, changed.decode())


def is_noticed(mutation: Mutation) -> bool:
    """Return whether a test fails with a change."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        left_out = shutil.ignore_patterns(".*", "build", "dist", "site", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
        (copy / mutation.module).write_text(mutation.text)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not software and not nightly"]
        environment = os.environ | {
            "MANTIK_SEEDS": _SEEDS, "TMPDIR": directory, "PYTHONPATH": str(copy),
        }  # fmt: skip
        words += ["-p", "no:cacheprovider", f"--timeout={_HANGS_S}", "--timeout-method=thread"]
        return any(
            subprocess.run(
                [*words, *tests], cwd=copy, env=environment, capture_output=True, check=False
            ).returncode
            for tests in _TESTS
        )


def main() -> int:
    """Try the changes; return 1 if the tests notice too few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400))
    chosen = parser.parse_args()
    package = ROOT / _PACKAGE
    paths = [path for r in _ROOMS for path in (package / r).rglob("*.py")]
    modules = sorted(path.relative_to(ROOT) for path in [*paths, package / _POOLS])
    found = [mutation for module in modules for mutation in mutations(module)]
    picked = random.Random(chosen.seed).sample(found, chosen.count)
    unnoticed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutation, noticed in zip(picked, pool.map(is_noticed, picked), strict=True):
            unnoticed += not noticed
            if not noticed:
                where = f"{mutation.module}:{mutation.line}"
                print(f"{where}: {mutation.before} → {mutation.after}", flush=True)
    print(f"{chosen.count - unnoticed} of {chosen.count} changes were noticed (seed {chosen.seed})")
    return int(unnoticed > _MOST * chosen.count)


if __name__ == "__main__":
    sys.exit(main())
