"""Read the script or notebook of a rule: its text, language, imports, and path at a site."""

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from snakemake.script import get_source
from snakemake.sourcecache import LocalSourceFile

from ...common.errors import UserError
from ...config.exclude import Include
from ...config.model import BackendConfig
from ...jobs.paths import file_path
from ...staging.project_files import FILE_BYTES, MIB
from ...staging.secret_files import Withheld
from .. import Job
from ..context import report_withheld
from ..onsite.mantik_script import STUBS


@dataclass(frozen=True)
class ScriptFile:
    """A script or notebook, as it is when the run starts.

    Attributes:
        name: base name of its file.
        language: Snakemake's name of the language, `jupyter_…` for a notebook, None if unknown.
        directory: its directory on this machine, or that of its copy in Snakemake's cache.
        inside: its directory relative to the working directory, if it is uploaded with the sources.
        origin: the URL of its directory, if it is not a file of this machine.
    """

    name: str
    text: str
    language: str | None
    directory: Path
    inside: str | None
    origin: str | None

    @property
    def path(self) -> Path:
        return self.directory / self.name

    @property
    def at_site(self) -> str:
        """The directory in the workspace with the files beside the script."""
        if self.inside is not None:
            return self.inside
        identity = self.origin or str(self.directory)
        # Files of `workflow.source_path` are in a cache that has another name in each run.
        identity = re.sub(r".*/snakemake-runtime-cache/[^/]+", "", identity)
        return file_path(identity.encode(errors="surrogateescape"), self.directory.name or "root")

    def needs_snakemake(self) -> list[str]:
        """Return what Python code in it imports that only Snakemake itself provides."""
        text = self.text
        if self.language == "jupyter_python":
            cells = json.loads(text).get("cells", [])
            text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
            text = re.sub(r"^[%!].*", "", text, flags=re.MULTILINE)
        elif self.language != "python":
            return []
        return sorted(_snakemake_imports(text, self.directory))

    def beside(self, config: BackendConfig) -> Iterator[tuple[str, Path]]:
        """Yield paths in the workspace and local paths of files beside a script from elsewhere.

        These are the files of the script's directory, and for Python the packages that it imports,
        each file up to `FILE_BYTES`. Hidden files are left out, and files that seem to contain a
        secret unless `Site: Include` matches them. A script in the working directory yields none.

        Raises:
            UserError: they are larger together than `Site: ProjectFilesLimit`.
        """
        if self.inside is not None:
            return
        paths = sorted(path for path in self.directory.iterdir() if path.is_file())
        if self.language in ("python", "jupyter_python"):
            paths += imported_siblings(self.text, self.directory)
        total, limit = 0, config.site.project_files_limit_bytes
        withheld = Withheld(self.directory, Include(config.site.include))
        for path in dict.fromkeys(paths):
            status, name = path.stat(), path.relative_to(self.directory).as_posix()
            if path.name.startswith(".") or status.st_size > FILE_BYTES:
                continue
            if name != self.name and withheld.why(name, status):
                continue
            total += status.st_size
            if total > limit:
                raise UserError(
                    f"the files beside the script have more than {limit / MIB:.1f} MiB, and"
                    " it may read any of them",
                    where=str(self.directory),
                    do="Move the script to a directory of its own, or into the working directory",
                )
            yield f"{self.at_site}/{name}", path
        report_withheld(str(self.directory), str(withheld))


def find_script_file(job: Job) -> ScriptFile:
    """Read the script or notebook of a job.

    Raises:
        WorkflowError: it does not exist, or cannot be read.
    """
    rule = job.rule
    written = rule.script if rule.is_script else rule.notebook
    source, text, language, _, cached = get_source(
        str(written) if isinstance(written, Path) else written,
        rule.workflow.sourcecache,
        rule.basedir,
        job.wildcards,
        job.params,
    )
    if isinstance(source, LocalSourceFile):
        origin = None
        directory = Path(os.path.abspath(source.path)).parent
    else:
        origin = source.get_basedir().get_path_or_uri(secret_free=True)
        directory = Path(cached).parent
    relative = Path(os.path.relpath(os.path.realpath(directory), os.path.realpath(os.curdir)))
    hidden = any(part.startswith(".") for part in relative.parts)  # or outside
    inside = None if hidden else relative.as_posix()
    return ScriptFile(source.get_filename(), text, language, directory, inside, origin)


@lru_cache(maxsize=256)
def _snakemake_imports(text: str, directory: Path) -> frozenset[str]:
    """Return the imports of a script and of modules beside it that only Snakemake provides."""
    beside = (path.read_text(errors="replace") for path in imported_siblings(text, directory))
    return frozenset(
        f"{module}.{name}" if name else module
        for module, name in _imports(text).union(*map(_imports, beside))
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
