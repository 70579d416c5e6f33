"""Print the size of each room, or check it: no room may exceed what `size.json` allows.

    python -m tests.size            the sizes, beside what is allowed
    python -m tests.size --check    fail if a room is larger than that
    python -m tests.size --lower    lower what is allowed to the present sizes

Whoever shrinks a room lowers its numbers in the same commit; whoever raises one says why in the
commit's message. Lines are those of Python and of templates, as `wc -l` counts them. Statements are
Python's, without imports and docstrings.
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
ALLOWED: Final = Path(__file__).with_name("size.json")
MEASURES: Final = ("lines", "statements", "modules")
_EXECUTOR: Final = "snakemake_executor_plugin_mantik"
_PACKAGES: Final = (_EXECUTOR, "snakemake_storage_plugin_mantik", "hpc_sandbox", "tests")
_TEMPLATES: Final = (".j2", ".sh", ".smk", ".html", ".css", ".js")

Sizes = dict[str, dict[str, int]]


def count_statements(source: str) -> int:
    """Return the number of a module's statements, without imports and docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(source))
    )


def measure() -> Sizes:
    """Return the sizes by room: the executor's rooms, and each other package as a whole."""
    found: dict[str, Counter[str]] = {}
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            python = path.suffix == ".py"
            if not (python or path.suffix in _TEMPLATES) or not path.is_file():
                continue
            parts = path.relative_to(ROOT / package).parts
            room = f"{package}/{parts[0]}" if package == _EXECUTOR and parts[1:] else package
            text = path.read_text(encoding="utf-8", errors="replace")
            sizes = found.setdefault(room, Counter())
            sizes["lines"] += text.count("\n")
            if python:
                sizes["modules"] += 1
                if package != "tests" or "workflows" not in parts:
                    sizes["statements"] += count_statements(text)
    return {room: {name: sizes[name] for name in MEASURES} for room, sizes in found.items()}


def find_excess(found: Sizes, allowed: Sizes) -> list[str]:
    """Return a line for each room that is larger than allowed, or not listed."""
    return [
        f"{room} has {size} {name}, allowed are {allowed.get(room, {}).get(name, 0)}"
        for room, sizes in found.items()
        for name, size in sizes.items()
        if size > allowed.get(room, {}).get(name, 0)
    ]


def main(option: str = "") -> int:
    """Do what the option says; return the exit code."""
    found: Sizes = measure()
    allowed: Sizes = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else {}
    if option == "--lower":
        lower = {
            room: {n: min(size, allowed.get(room, sizes)[n]) for n, size in sizes.items()}
            for room, sizes in found.items()
        }
        ALLOWED.write_text(json.dumps(lower, indent=2) + "\n")
        return 0
    excess = find_excess(found, allowed)
    if option != "--check":
        executor = [sizes for room, sizes in found.items() if room.startswith(_EXECUTOR)]
        found[f"{_EXECUTOR} in all"] = {name: sum(s[name] for s in executor) for name in MEASURES}
        print(f"{'':55}{'lines':>8}{'statements':>12}{'modules':>9}")
        for room, sizes in found.items():
            print(f"{room:55}{sizes['lines']:8}{sizes['statements']:12}{sizes['modules']:9}")
        return 0
    for line in excess:
        print(line)
    if excess:
        print("Make them smaller, or say in the commit why not and raise tests/size.json.")
    return bool(excess)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
