"""Check the values and files that a command line gives to an entry point."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ..common.errors import ConfigError, Mistake, UserError
from ..config.model import ResourcesConfig
from ..jobs.segments import CHECKPOINT_PATHS, CONTINUE, parse_continuation
from .entry import EntryPoint, suggest
from .values import parse_value

_BRACES: Final = "Snakemake reads braces in a file's name as wildcards: rename {path!r}"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_UNDECLARED: Final = "correct the name, or use --extra to append it to the command"


@dataclass(frozen=True)
class CommandFiles:
    """Inputs or outputs: paths, and paths by name.

    They can be read as those that Snakemake passes to a function in `params:`.
    """

    plain: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __getitem__(self, key: int | str) -> str:
        return self.named[key] if isinstance(key, str) else self.all[key]

    def __getattr__(self, name: str) -> object:
        if name == "keys":  # for suggestions in messages
            return self.named.keys
        if name in self.named:
            return self.named[name]
        raise AttributeError(name)

    @property
    def all(self) -> list[str]:
        return [*self.plain, *self.named.values()]


class CommandMistakes:
    """Collect the mistakes of a command line."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def notify(self, place: str, key: str, message: str) -> None:
        self.mistakes.append(Mistake(place, key, message))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collect the mistakes of a `ConfigError` that ends the block."""
        try:
            yield
        except ConfigError as error:
            self.mistakes += error.mistakes

    def end(self) -> None:
        """Raise a `ConfigError` with all collected mistakes, if there are some."""
        if self.mistakes:
            raise ConfigError(list(dict.fromkeys(self.mistakes)))

    def pairs(self, option: str, given: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in given:
            name, equals, value = text.partition("=")
            if not equals or not name:
                self.notify(option, "", f"has to be NAME=VALUE, found {text!r}")
            elif name in found:
                self.notify(option, name, "is given twice")
            else:
                found[name] = value
        return found

    def files(self, option: str, given: Iterable[str]) -> CommandFiles:
        """Parse PATH and NAME=PATH."""
        files = CommandFiles()
        for text in given:
            name, equals, path = text.partition("=")
            if not equals or not _NAME.fullmatch(name) or os.path.lexists(text):
                files.plain.append(text)
            elif name in files.named:
                self.notify(option, name, "is given twice")
            else:
                files.named[name] = path
        return files

    def names(
        self, shown: str, point: EntryPoint, given: dict[str, str], more: dict[str, str]
    ) -> None:
        """Report parameters that are unknown or given with the wrong option.

        Remove the unknown ones from `given`, and move declared ones there from `more`.
        """
        for name in [n for n in given if n not in point.parameters and not point.script]:
            del given[name]
            hint = suggest(name, point.parameters)
            message = f"is not a parameter of {point.name}{hint}: {_UNDECLARED}"
            self.notify(shown, f"{point.name}.{name}", message)
        for name in [n for n in more if n in point.parameters]:
            given.setdefault(name, more.pop(name))
            self.notify("--extra", name, "is a parameter of the entry point: pass it with -P")

    def values(
        self, options: Mapping[str, Mapping[str, str]], things: Mapping[str, object]
    ) -> None:
        """Report placeholders in values that name none of the job's files."""
        for option, values in options.items():
            for name, text in values.items():
                try:
                    value = parse_value(text)
                except ValueError:
                    continue  # the entry point reports it
                try:
                    value.resolve(things, str)
                except ValueError as error:
                    self.notify(option, name, f"{error}")


def check_command_files(read: CommandFiles, made: CommandFiles) -> None:
    """Check that paths can be inputs and outputs of a rule.

    Raises:
        ConfigError: with all paths that cannot.
    """
    mistakes = []
    for option, files in (("--input", read), ("--output", made)):
        for path in files.all:
            if not path or os.path.isabs(path) or os.path.normpath(path).split("/")[0] == "..":
                message = f"has to be a path below this directory, found {path!r}"
                mistakes.append(Mistake(option, "", message))
            elif set(path) & set("{}"):
                mistakes.append(Mistake(option, "", _BRACES.format(path=path)))
            elif option == "--input" and not os.path.exists(path):
                mistakes.append(Mistake(option, "", f"there is no file {path!r}"))
    for path in set(map(os.path.normpath, read.all)) & set(map(os.path.normpath, made.all)):
        mistakes.append(Mistake("--output", "", f"is an input, too: {path!r}"))
    if mistakes:
        raise ConfigError(mistakes)


OPTIONS: Final = "--continue", "--checkpoint"


@dataclass(frozen=True)
class ContinueOptions:
    """The options of a command for that.

    Attributes:
        segments: how many segments the job may have; None: as the backend config says.
        checkpoint: what the next one goes on from, separated by blanks; empty: as the config says.
    """

    segments: int | None = None
    checkpoint: str = ""

    @property
    def words(self) -> list[str]:
        given = [] if self.segments is None else [OPTIONS[0], str(self.segments)]
        return [*given, *([OPTIONS[1], self.checkpoint] if self.checkpoint else [])]

    def resolve(self, config: ResourcesConfig | None, wrong: CommandMistakes) -> "ContinueOptions":
        """Return what is in effect; without segments or a checkpoint, the run does not go on.

        Args:
            config: the site's; None if unknown.
            wrong: gets the mistakes.
        """
        segments, checkpoint = self.segments, self.checkpoint
        if config is not None:
            segments = config.segments if segments is None else segments
            checkpoint = checkpoint or config.checkpoint or ""
        if self.checkpoint and segments is None:
            wrong.notify(OPTIONS[1], "", f"needs {OPTIONS[0]} with a number of segments")
        elif self.segments and not checkpoint:
            wrong.notify(
                OPTIONS[0], "", f"needs {OPTIONS[1]} with what the next segment goes on from: the"
                " file or directory that the entry point saves its state in",
            )  # fmt: skip
        if not segments or not checkpoint:
            return ContinueOptions()
        try:
            found = parse_continuation({CONTINUE: segments, CHECKPOINT_PATHS: checkpoint}, [])
            if found is not None and config is not None:
                found.check_walltime(config.runtime_s)
        except UserError as error:
            wrong.notify(
                OPTIONS[1] if self.checkpoint else "Resources", "", f"{error.what}. {error.do}"
            )
        return ContinueOptions(segments, checkpoint)

    def resources(self, more: Sequence[str] = ()) -> dict[str, object]:
        """Return the rule's resources; `more` are further paths of the checkpoint."""
        if not self.segments:
            return {}
        return {CONTINUE: self.segments, CHECKPOINT_PATHS: " ".join([self.checkpoint, *more])}


UNCHANGED: Final = ContinueOptions()
"""No option is given."""
