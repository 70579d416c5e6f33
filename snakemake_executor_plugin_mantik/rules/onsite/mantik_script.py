"""Run a Python script of a rule at a site, with a `snakemake` object like Snakemake's own.

This file is uploaded with the jobs. It needs Python 3.7 and the standard library, no Snakemake.

    python3 mantik_script.py SCRIPT PLACE SEARCH < DATA

SCRIPT holds the script's text, PLACE is the script's own path as it sees it, SEARCH is the
directory of modules beside it, and DATA is the job as `rules/kinds/scripts.py` encoded it.
The script is compiled under the name PLACE, so that tracebacks name its own file and lines.

The object follows Snakemake's documentation of scripts. Tests compare it with Snakemake's own.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import importlib.util
import linecache
import logging
import os
import pickle
import sys
import traceback
import types
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    # Python 3.7 supports these types in annotations only.
    from collections.abc import Callable, Iterable, Iterator
    from typing import NoReturn

    Names = Iterable[tuple[str, tuple[int, int | None]]]
    """Names with the index of their item, or with the start and end of their items."""


def _guard(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AttributeError(
            f"{name}() cannot be used on snakemake input, output, resources etc., where {name} may"
            " be the name of an item: use sorted() or make a plain list of it before"
        )

    return refuse


class Namedlist(list):  # type: ignore[type-arg] # list[Any] is no class in Python 3.7
    """A list whose items, or ranges of items, may have names."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, toclone: Iterable[Any] = (), fromdict: dict[str, Any] | None = None) -> None:
        super().__init__(toclone)
        self._names: dict[str, tuple[int, int | None]] = {}
        self._guards = {name: _guard(name) for name in ("index", "sort")}
        self.__dict__.update(self._guards)
        if isinstance(toclone, Namedlist):
            self._take_names(toclone._get_names())
        self.update(fromdict or {})

    def _set_name(self, name: str, index: int, end: int | None = None) -> None:
        self._names[name] = (index, end)
        setattr(self, name, self[index] if end is None else Namedlist(self[index:end]))

    def _take_names(self, names: Names) -> None:
        for name, (index, end) in names:
            self._set_name(name, index, end)

    def _get_names(self) -> Names:
        return iter(self._names.items())

    def update(self, items: dict[str, Any]) -> None:
        for name, value in items.items():
            if name in self._names:
                raise ValueError(f"Key {name} already exists in Namedlist")
            self.append(value)
            self._set_name(name, len(self) - 1)

    def keys(self) -> Iterable[str]:
        return self._names.keys()

    def items(self) -> Iterator[tuple[str, Any]]:
        for name in self._names:
            yield name, getattr(self, name)

    def get(self, key: str, default_value: Any = None) -> Any:
        value = self.__dict__.get(key, default_value)
        return default_value if value is not None and value is self._guards.get(key) else value

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)

    def __hash__(self) -> int:  # type: ignore[override] # a list's is None
        return hash(tuple(self))

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def __reduce__(self) -> tuple[Any, ...]:
        # The guards cannot be pickled. Values and names are sufficient.
        return _restored, (type(self).__name__, list(self), list(self._get_names()))


_KINDS = ("InputFiles", "OutputFiles", "Wildcards", "Params", "ResourceList", "Log")
_LISTS: dict[str, type[Namedlist]] = {"Namedlist": Namedlist}
_LISTS.update({kind: type(kind, (Namedlist,), {}) for kind in _KINDS})
"""Snakemake's lists, under its names for them."""


def _restored(kind: str, values: list[Any], names: Names) -> Namedlist:
    made = _LISTS.get(kind, Namedlist)(values)
    made._take_names(names)
    return made


class ReportHref:
    """A link to another item of the report, as `report_href` returns it."""

    def __init__(
        self,
        path: Any,
        parent: ReportHref | None = None,
        url_args: dict[str, str] | None = None,
        anchor: str | None = None,
    ) -> None:
        import hashlib  # a slow import, and few scripts make links

        self._parent = parent
        self._id: str = parent._id if parent else hashlib.sha256(str(path).encode()).hexdigest()
        self._path = path if isinstance(path, str) else path.as_posix()
        self._url_args = dict(url_args or {})
        self._anchor = anchor

    def child_path(self, path: Any) -> ReportHref:
        return ReportHref(path, parent=self)

    def url_args(self, **args: str) -> ReportHref:
        return ReportHref(self._path, self._parent, args)

    def anchor(self, anchor: str) -> ReportHref:
        return ReportHref(self._path, self._parent, self._url_args, anchor)

    def __str__(self) -> str:
        path = os.path.basename(self._path) if self._parent is None else self._path
        args = "&".join(f"{key}={quote(str(value))}" for key, value in self._url_args.items())
        anchor = f"#{quote(self._anchor)}" if self._anchor else ""
        return f"../{self._id[:16]}/{path}{'?' if args else ''}{args}{anchor}"


class Snakemake:
    """The job as a script sees it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, values: dict[str, Any], scriptdir: str) -> None:
        self.__dict__.update(values, scriptdir=scriptdir)

    @property
    def params(self) -> Namedlist:
        """The parameters. As in Snakemake, each access makes new tables and arrays."""
        values = list(self._params_store)
        for index, kind in self._params_types.items():
            values[index] = _converted(kind, values[index])
        return _restored("Params", values, self._params_store._get_names())

    def report_href(self, path: Any) -> ReportHref:
        return ReportHref(path)

    def log_fmt_shell(self, stdout: bool = True, stderr: bool = True, append: bool = False) -> str:
        """Return a redirection of a shell command's output to the log; empty without a log."""
        log = str(self.log)
        if not log:
            return ""
        arrow = ">>" if append else ">"
        return {
            (True, True): f" {arrow} {log} 2>&1",
            (True, False): f" {arrow} {log}",
            (False, True): f" 2{arrow} {log}",
        }[stdout, stderr]


def _converted(kind: str, value: Any) -> Any:
    """Make a table or an array from its plain values."""
    package = {"pd": "pandas", "np": "numpy", "pl": "polars"}[kind.partition(".")[0]]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"a parameter of the rule is a {kind}, but the site's Python, {sys.executable}, has no"
            f" {package} ({error}): add it to the backend config's Environment"
        ) from error
    make: dict[str, Callable[[], Any]] = {
        "pd.DataFrame": lambda: module.DataFrame.from_dict(value),
        "pd.Series": lambda: module.Series(value),
        "np.ndarray": lambda: module.array(value),
        "pl.LazyFrame": lambda: module.from_dict(value).lazy(),
        "pl.DataFrame": lambda: module.from_dict(value),
        "pl.Series": lambda: module.Series(**value),
    }
    return make[kind]()


class _Unpickler(pickle.Unpickler):
    """Unpickles the data that `rules/kinds/scripts.py` wrote."""

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "str":
            return rest[0]
        if kind == "tmpdir":
            return os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - what the job script takes
        if kind == "numpy":
            return _number(*rest)
        return _restored(kind, *rest)


def _number(kind: str, value: Any) -> Any:
    """Return a number of NumPy's type, or the plain number without NumPy."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return value
    return numpy.dtype(kind).type(value)


STUBS: dict[str, tuple[str, ...]] = {
    "snakemake": (),
    "snakemake.script": ("snakemake", "Snakemake"),
    "snakemake.iocontainers": ("snakemake", "Snakemake", "ReportHref", *_LISTS),
    "snakemake.logging": ("logger",),
}
"""Names that a script may import from Snakemake at a site without it."""


def _offer_stubs(names: dict[str, Any]) -> None:
    if importlib.util.find_spec("snakemake") is not None:
        return
    for module, offered in STUBS.items():
        stub = types.ModuleType(module, "Replaces Snakemake, which is not at this site.")
        stub.__dict__.update({name: names[name] for name in offered})
        stub.__path__ = []
        sys.modules[module] = stub
        parent, _, child = module.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, stub)


def names(data: bytes, place: str, search: str) -> dict[str, Any]:
    """Return the globals of a script, and add `search` to the search path for modules.

    `data` is the encoded job, `place` the script's own path as it sees it, or a URL.
    """
    try:
        values = _Unpickler(BytesIO(base64.b64decode(data))).load()
    except (ImportError, AttributeError) as error:
        sys.exit(
            "mantik: params or config of the rule contain a value of a Python class that this"
            f" site's Python, {sys.executable}, does not have ({error}): add its package to the"
            " backend config's Environment, or use plain values"
        )
    snakemake = Snakemake(values, os.path.dirname(place))
    logger = logging.getLogger("snakemake.logging")
    found = {"snakemake": snakemake, "Snakemake": Snakemake, "logger": logger}
    _offer_stubs({**found, **_LISTS, "ReportHref": ReportHref})
    sys.path.append(search)
    # Snakemake's own preamble defines these two modules, and scripts use them.
    return {**found, "sys": sys, "pickle": pickle}


def run_script(script: str, place: str, search: str, data: bytes) -> None:
    """Run a script (a file) as Snakemake does. An exception in it ends the process.

    The other arguments are those of `names`.
    """
    # Compile text, not bytes: an encoding line in it refers to the original file.
    with open(script, encoding="utf-8-sig") as file:
        source = file.read()
    main = types.ModuleType("__main__")
    main.__dict__.update(names(data, place, search))
    main.__dict__.update(__file__=place, __real_file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [script]
    lines = [f"{line}\n" for line in source.split("\n")]
    # The script may not exist at its place. Cache its lines for tracebacks.
    linecache.cache[place] = (len(source), None, lines, place)
    try:
        exec(compile(source, place, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - reported as Python does, then the process ends
        own = error.__traceback__
        below = own.tb_next if own else None
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, below)
        else:
            sys.excepthook(type(error), error, below)
        sys.exit(1)


def main() -> None:
    """Run the command line."""
    with open(0, "rb", closefd=False) as file:
        data = file.read()
    # Scripts at a site have no standard input.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    script, place, search = sys.argv[1:]
    run_script(script, place, search, data)


if __name__ == "__main__":
    # Import it under its own name, so that scripts can unpickle its classes again.
    here = os.path.dirname(os.path.abspath(__file__))
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.import_module("mantik_script").main()
