"""Exclude: which files of the project folder stay here, by git's own rules for `.gitignore`.

Patterns are those of one `.gitignore` at the top of the project folder, read by pathspec; the last
one that matches decides, `!` takes back, and nothing below an excluded directory comes back.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec

from snakemake_executor_plugin_mantik.config.values import (
    any_text,
    describe,
    read_list,
    unfit,
    written,
)

NEVER_SENT: Final = (".git/", ".snakemake/", ".mantik/")
"""Excluded before all other patterns: no job needs them. `!.git/` takes one back."""


def read_patterns(value: object) -> tuple[str, ...]:
    """The patterns of the key `Exclude`, checked.

    Raises:
        ValueError: it is no list of patterns, or some of them cannot mean what they say.
    """
    if not isinstance(value, (list, tuple)):
        raise unfit("a list of patterns", value)
    return tuple(read_list(value, _pattern))


def _pattern(value: object) -> str:
    any_text(value, "a pattern")
    text = written(value) if isinstance(value, (int, float)) else str(value)  # blanks may be meant
    positive = text.removeprefix("!")
    if positive.startswith("/"):
        raise ValueError(
            f"is absolute ({text!r}); patterns are relative to the project folder: "
            "a name matches anywhere in it, a/b from its top"
        )
    if "\n" in text or "\r" in text:
        raise ValueError(f"has a line break in it, found {describe(text)}")
    if ".." in positive.split("/"):
        raise ValueError(f"leaves the project folder, found {describe(text)}")
    if text.startswith("#"):
        raise ValueError(
            f"is a comment in .gitignore; write \\# at its start, found {describe(text)}"
        )
    try:
        GitIgnoreSpec.from_lines([text])
    except ValueError as error:
        raise ValueError(
            f"is no pattern that git knows ({error}), found {describe(text)}"
        ) from None
    return text


class Exclude:
    """Says which paths are excluded; paths are relative to the project folder, with `/`."""

    def __init__(self, patterns: Sequence[str], *, before: Sequence[str] = NEVER_SENT) -> None:
        """Take `patterns` that `read_patterns` let through, `before` put in front of them."""
        self.patterns = tuple(patterns)
        self._spec = GitIgnoreSpec.from_lines([*before, *patterns])
        self._directory_excluded = lru_cache(maxsize=65536)(self._directory_excluded_uncached)

    def matches(self, path: str, *, is_dir: bool = False) -> bool:
        """Whether `path` is excluded, by itself or with a directory that it lies in."""
        parent = path.rpartition("/")[0]
        if parent and self._directory_excluded(parent):
            return True
        return self._says(f"{path}/" if is_dir else path)

    def walk(self, root: Path) -> Iterator[str]:
        """The files below `root` that remain, sorted, as paths relative to it.

        Excluded directories are not entered, links to directories neither (as git does); links to
        files count as files. Other things (sockets, pipes) are left out.

        Raises:
            OSError: a directory that is not excluded cannot be read.
        """
        yield from self._walk(root, "")

    def _walk(self, root: Path, directory: str) -> Iterator[str]:
        with os.scandir(root / directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            path = f"{directory}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if not self._says(f"{path}/"):
                    yield from self._walk(root, f"{path}/")
            elif entry.is_file() and not self._says(path):
                yield path

    def _says(self, path: str) -> bool:
        return bool(self._spec.match_file(path))

    def _directory_excluded_uncached(self, path: str) -> bool:
        return self.matches(path, is_dir=True)
