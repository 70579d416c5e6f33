"""The package's layout: what imports what."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import hpc_sandbox
import snakemake_executor_plugin_mantik

PACKAGE = Path(snakemake_executor_plugin_mantik.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """The package's modules that a module imports, at its beginning or when it needs them."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        origin = (node.module or "").split(".") if node.module else []
        if node.level:  # relative
            origin = [*package[: len(package) - node.level + 1], *origin]
        if (base := ".".join(origin)) in MODULES:
            for name in node.names:
                module = f"{base}.{name.name}"
                yield module if module in MODULES else base


def test_the_sandbox_imports_nothing_of_the_executor() -> None:
    """People who test other clients of UNICORE or firecREST use it alone."""
    for path in Path(hpc_sandbox.__file__).parent.rglob("*.py"):
        assert "mantik_" not in (text := path.read_text()), path
        assert "_mantik" not in text, path


def test_no_import_goes_round_in_a_circle() -> None:
    TopologicalSorter({name: set(imported(path)) for name, path in MODULES.items()}).prepare()


def test_no_room_imports_from_one_that_imports_from_it() -> None:
    rooms: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        needed = {module.split(".")[1] for module in imported(path) if "." in module}
        rooms.setdefault(name.partition(".")[2].partition(".")[0], set()).update(needed)
    TopologicalSorter({room: needed - {room} for room, needed in rooms.items()}).prepare()
