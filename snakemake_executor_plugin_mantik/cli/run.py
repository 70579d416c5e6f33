"""`smk-mantik run`: one entry point of an MLproject, as a workflow of one rule."""

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from snakemake_executor_plugin_mantik.config.reading import LoadedConfig, read_all
from snakemake_executor_plugin_mantik.errors import ConfigError, Mistake, UserError
from snakemake_executor_plugin_mantik.mlproject.entry import EntryPoint, close
from snakemake_executor_plugin_mantik.mlproject.values import value_of
from snakemake_executor_plugin_mantik.private import make_private

RUNS: Final = Path(".snakemake", "mantik", "run")
"""Below the working directory: a directory with a Snakefile for each thing that was run."""

RESULTS: Final = "mlproject-runs"
"""Below the working directory: what came back of runs whose outputs were not named."""

_SOURCE_FILE_LIMIT: Final = 1 << 20
"""Where no backend config says it: bytes above which a file goes up only as an input."""

_OURS: Final = re.compile(r"\{(?:(?:input|output)(?:[.\[][^{}]*)?|threads)\}")
_BRACES: Final = "Snakemake takes braces in a file's name for wildcards: rename {path!r}"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_UNDECLARED: Final = "correct the name, or give it with --extra to have it appended to the command"

_TEMPLATE: Final = """\
# Made by `smk-mantik run`, for this command line alone.
from snakemake_executor_plugin_mantik import mlproject
from snakemake_executor_plugin_mantik.mlproject.collect import collecting

project = mlproject.load({project!r}, warn=False)
params = project.entry_point({entry!r}, {extra!r}, **{arguments!r})


module mantik:
    snakefile:
        mlproject.RULE


use rule mlproject from mantik as {rule} with:
    input:
        *{inputs!r},
        **{named_inputs!r},
    output:
        {outputs}
    params:
        **{params},
"""


@dataclass(frozen=True)
class Files:
    """Inputs or outputs: paths, and paths by name."""

    plain: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        """All paths."""
        return [*self.plain, *self.named.values()]


def run(
    project: Annotated[Path, typer.Argument(help="The project: a folder, or its MLproject file.")],
    snakemake: Annotated[
        list[str] | None, typer.Argument(help="Options for snakemake, after --.")
    ] = None,
    *,
    entry_point: Annotated[
        str, typer.Option("--entry-point", "-e", help="The entry point, or a script.")
    ] = "main",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--param-list",
            "-P",
            metavar="NAME=VALUE",
            help="A parameter of the entry point. {input}, {output}, {input.NAME} stand for files.",
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A parameter that the entry point does not declare: goes to the command's end.",
        ),
    ] = None,
    site: Annotated[
        str,
        typer.Option(
            metavar="[NAME=]FILE", help="The site's backend config; default: as snakemake has it."
        ),
    ] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]PATH",
            help="A file or folder that it reads; repeatable.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            metavar="[NAME=]PATH",
            help="A file, or with / at its end a folder, that it makes; repeatable.",
        ),
    ] = None,
) -> None:
    """Run one entry point of an MLproject as a job at a site: a workflow of one rule.

    Without --output, what is new or changed in the project's folder comes back into a folder of
    mlproject-runs/.
    """
    arguments = snakemake or []
    snakefile = prepared(
        project, entry_point, parameter or [], extra or [],
        site=site, inputs=inputs or [], outputs=outputs or [], here=_is_local(arguments),
    )  # fmt: skip
    if importlib.util.find_spec("snakemake") is None:
        raise UserError(
            "snakemake is not installed beside this command", where="smk-mantik run",
            do="Install it with: pip install snakemake",
        )  # fmt: skip
    words = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile)]
    words += ["--mantik-backend-config", site] if site else []
    words += ["--nolock", "--rerun-incomplete"]
    if not any(word == "-e" or word.startswith("--executor") for word in arguments):
        words += ["--executor", "mantik", "--jobs", "1"]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [*words, *arguments])  # noqa: S606 - it takes this process's place


def prepared(
    project: Path,
    entry_point: str,
    parameters: Sequence[str],
    extra: Sequence[str],
    *,
    site: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    here: bool = False,
) -> Path:
    """Check everything and write the workflow; returns its Snakefile.

    Args:
        project: a folder, or its MLproject file, relative to the current directory.
        entry_point: its name, or a script of the project.
        parameters: values of its parameters as NAME=VALUE; `{input}` and the like stand for files.
        extra: further ones, for the end of the command.
        site: a backend config, as [NAME=]FILE; empty: not known here.
        inputs: paths as [NAME=]PATH.
        outputs: the same; a folder ends with `/`.
        here: whether it runs on this machine, where a project may lie anywhere.

    Raises:
        UserError: with all that is wrong.
    """
    from snakemake_executor_plugin_mantik.mlproject.project import folder_mistake, load

    wrong = _Wrong()
    given, more = wrong.pairs("-P", parameters), wrong.pairs("--extra", extra)
    read, made = wrong.files("--input", inputs), wrong.files("--output", outputs)
    with wrong.gathered():
        _check_files(read, made)
    configs: dict[str, LoadedConfig] = {}
    with wrong.gathered():
        configs = read_all([site], Path()) if site else {}
    try:
        loaded = load(project.absolute())
        point = loaded.entry(entry_point)
    except ConfigError as error:
        raise ConfigError([*wrong.mistakes, *error.mistakes], do=error.do) from None
    wrong.names(loaded.shown, point, given, more)
    folder = loaded.relative_folder()
    if not here and (mistake := folder_mistake(folder)):
        wrong.tell(f"entry point {entry_point}", "", f"{mistake}: start it in a folder above")
    declared = point.parameters
    paths = [v for name, v in given.items() if name in declared and _is_path(declared, name)]
    files = [path for path in paths if _is_input(path, read.all)]
    with wrong.gathered():
        _check_files(Files(files), made)
    found = [*read.plain, *files]
    if not read.all:
        with wrong.gathered():
            found += _large(folder, next(iter(configs.values()), None), made.all)
    found = list(dict.fromkeys(found))
    rule = "run_" + re.sub(r"\W", "_", entry_point, flags=re.ASCII)
    identity = [str(folder), entry_point, sorted(given.items()), sorted(more.items())]
    name = f"{rule[4:]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:8]}"
    out = f"{RESULTS}/{name}"
    values = {name: _template(value) for name, value in given.items()}
    others = {name: _template(value) for name, value in more.items()}
    things = {
        "input": _Listed(Files(found, read.named)),
        "output": _Listed(made if made.all else Files([out])),
        "threads": 1,
    }
    wrong.values({"-P": values, "--extra": others}, things)
    with wrong.gathered():
        params = loaded.entry_point(entry_point, others, **values)
        if not wrong.mistakes:
            params["command"].given.command(None, **things)
    wrong.end()
    text = _TEMPLATE.format(
        project=str(loaded.folder),
        entry=entry_point,
        extra=others,
        arguments=values,
        rule=rule,
        inputs=found,
        named_inputs=read.named,
        outputs=_output_lines(made) if made.all else f"directory({out!r}),",
        params="params" if made.all else f"collecting(params, {out!r})",
    )
    return _written(text, name)


def _written(text: str, name: str) -> Path:
    directory = RUNS / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    snakefile = directory / "Snakefile"
    try:
        make_private(RUNS.parent)
        directory.mkdir(parents=True, exist_ok=True)
        snakefile.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the workflow cannot be written ({error.strerror or error})", where=str(snakefile),
            do="Start it where you may write",
        ) from None  # fmt: skip
    return snakefile


class _Wrong:
    """Gathers what is wrong with a command line."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def tell(self, place: str, key: str, message: str) -> None:
        self.mistakes.append(Mistake(place, key, message))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the mistakes that end what is in the block."""
        try:
            yield
        except ConfigError as error:
            self.mistakes += error.mistakes

    def end(self) -> None:
        """Tell all of them.

        Raises:
            ConfigError: there are some.
        """
        if self.mistakes:
            raise ConfigError(list(dict.fromkeys(self.mistakes)))

    def pairs(self, option: str, given: Iterable[str]) -> dict[str, str]:
        """NAME=VALUE pairs."""
        found: dict[str, str] = {}
        for text in given:
            name, equals, value = text.partition("=")
            if not equals or not name:
                self.tell(option, "", f"has to be NAME=VALUE, found {text!r}")
            elif name in found:
                self.tell(option, name, "is given twice")
            else:
                found[name] = value
        return found

    def files(self, option: str, given: Iterable[str]) -> Files:
        """Paths, and paths by name."""
        files = Files()
        for text in given:
            name, equals, path = text.partition("=")
            if not equals or not _NAME.fullmatch(name) or os.path.lexists(text):
                files.plain.append(text)
            elif name in files.named:
                self.tell(option, name, "is given twice")
            else:
                files.named[name] = path
        return files

    def names(
        self, shown: str, point: EntryPoint, given: dict[str, str], more: dict[str, str]
    ) -> None:
        """Take out the parameters that are given with the wrong option."""
        for name in [] if point.script else [n for n in given if n not in point.parameters]:
            del given[name]
            told = f"is no parameter of {point.name}{close(name, point.parameters)}: {_UNDECLARED}"
            self.tell(shown, f"{point.name}.{name}", told)
        for name in [n for n in more if n in point.parameters]:
            given.setdefault(name, more.pop(name))
            told = "is a parameter of the entry point: give it with -P"
            self.tell("--extra", name, told)

    def values(
        self, options: Mapping[str, Mapping[str, str]], things: Mapping[str, object]
    ) -> None:
        """See to it that the files that values name are some of the job's."""
        for option, values in options.items():
            for name, text in values.items():
                try:
                    value = value_of(text)
                except ValueError:
                    continue  # the entry point tells it
                try:
                    value.resolve(things, str)
                except ValueError as error:
                    self.tell(option, name, f"{error}")


class _Listed:
    """Files as Snakemake hands them to a function in `params:`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.all)

    def __getitem__(self, key: int | str) -> str:
        return self._files.named[key] if isinstance(key, str) else self._files.all[key]

    def __getattr__(self, name: str) -> object:
        if name in self._files.named:
            return self._files.named[name]
        if name == "keys":  # what a message proposes
            return self._files.named.keys
        raise AttributeError(name)


def _template(value: str) -> str:
    """A value for the Snakefile: braces are braces, but for those of inputs and outputs."""
    parts = _OURS.split(value)
    ours = _OURS.findall(value)
    escaped = [_escaped(part) for part in parts]
    return "".join(a + b for a, b in zip(escaped, [*ours, ""], strict=True))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _check_files(read: Files, made: Files) -> None:
    mistakes = []
    for option, files in (("--input", read), ("--output", made)):
        for path in files.all:
            if not path or os.path.isabs(path) or os.path.normpath(path).split("/")[0] == "..":
                told = f"has to be a path below this directory, found {path!r}"
                mistakes.append(Mistake(option, "", told))
            elif set(path) & set("{}"):
                mistakes.append(Mistake(option, "", _BRACES.format(path=path)))
            elif option == "--input" and not os.path.exists(path):
                mistakes.append(Mistake(option, "", f"there is no file {path!r}"))
    for path in set(map(os.path.normpath, read.all)) & set(map(os.path.normpath, made.all)):
        mistakes.append(Mistake("--output", "", f"is an input, too: {path!r}"))
    if mistakes:
        raise ConfigError(mistakes)


def _is_path(declared: Mapping[str, object], name: str) -> bool:
    return getattr(declared[name], "type", "") == "path"


def _is_input(value: str, known: Sequence[str]) -> bool:
    """Whether a value of type path is a file here that goes up as an input."""
    return (
        not os.path.isabs(value)
        and os.path.exists(value)
        and os.path.normpath(value).split("/")[0] not in ("..", ".")
        and value not in known
    )


def _large(folder: os.PathLike[str], config: LoadedConfig | None, made: list[str]) -> list[str]:
    """The project's files that are too large to go up as sources."""
    from snakemake_executor_plugin_mantik.config.exclude import Exclude
    from snakemake_executor_plugin_mantik.staging.sources import candidates

    exclude = Exclude(config.config.exclude if config else ())
    limit = config.config.site.source_file_limit_bytes if config else _SOURCE_FILE_LIMIT
    products = {*map(os.path.normpath, made), RESULTS}
    found = []
    for path, size in candidates(Path(folder), Exclude(()), ()):
        at = os.path.normpath(os.path.join(folder, path))
        parents = [str(parent) for parent in Path(at).parents]
        if size > limit and not exclude.matches(at) and not products & {at, *parents}:
            found.append(at)
    _check_files(Files(found), Files())
    return found


def _output_lines(made: Files) -> str:
    plain = [_output(path) for path in made.plain]
    named = [f"{name}={_output(path)}" for name, path in made.named.items()]
    return "\n        ".join(f"{line}," for line in [*plain, *named])


def _output(path: str) -> str:
    text = repr(path.rstrip("/"))
    return f"directory({text})" if path.endswith("/") or os.path.isdir(path) else text


def _is_local(arguments: Sequence[str]) -> bool:
    words = list(arguments)
    return any(
        word in ("--executor=local", "-e=local", "-elocal")
        or (word in ("--executor", "-e") and words[at + 1 : at + 2] == ["local"])
        for at, word in enumerate(words)
    )
