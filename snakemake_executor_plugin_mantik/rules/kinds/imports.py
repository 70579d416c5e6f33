"""Find what a Python script imports from the files beside it, and from Snakemake."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ..onsite.mantik_script import STUBS


def snakemake_imports(text: str, directory: Path) -> list[str]:
    """Return the imports of a script and of modules beside it that only Snakemake provides.

    `text` is the script's source, `directory` the directory that contains it.
    """
    return sorted(_snakemake_imports(text, directory))


@lru_cache(maxsize=256)
def _snakemake_imports(text: str, directory: Path) -> frozenset[str]:
    texts = [
        text,
        *(path.read_text(errors="replace") for path in imported_siblings(text, directory)),
    ]
    found = {each for text in texts for each in _imports(text)}
    return frozenset(
        f"{module}.{name}" if name else module
        for module, name in found
        if module.partition(".")[0] == "snakemake" and name not in STUBS.get(module, ())
    )


def imported_siblings(text: str, directory: Path) -> list[Path]:
    """Return the files beside a script that it imports, directly or not; packages as a whole."""
    files: dict[Path, None] = {}
    texts = [text]
    while texts:
        for module, _ in _imports(texts.pop()):
            for path in _files(directory, module.partition(".")[0]):
                if path not in files:
                    files[path] = None
                    texts.append(path.read_text(errors="replace"))
    return list(files)


def _files(directory: Path, name: str) -> list[Path]:
    if not name:
        return []
    module = directory / f"{name}.py"
    return [module] if module.is_file() else sorted((directory / name).rglob("*.py"))


@lru_cache(maxsize=256)
def _imports(text: str) -> frozenset[tuple[str, str]]:
    """Return pairs of a module and a name imported from it, empty for the module itself."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return frozenset()  # Python reports the syntax error when the script runs
    found: set[tuple[str, str]] = set()
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            found.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update((node.module, alias.name) for alias in node.names)
    return frozenset(found)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node, except for code that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for otherwise in child.orelse:
                yield otherwise
                yield from _executed(otherwise)
        else:
            yield from _executed(child)
