"""Find mistakes in what bash is to expand at a site, or would have to (`Site: Expand`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from snakemake_executor_plugin_mantik.config.environment_keys import OPTION_KEYS, not_expanded
from snakemake_executor_plugin_mantik.config.section import Keys
from snakemake_executor_plugin_mantik.config.values import describe_value, parse_options
from snakemake_executor_plugin_mantik.jobs.expansion import (
    find_code,
    find_unclosed,
    find_unclosed_in_word,
)

Environments: TypeAlias = Sequence[tuple[Keys, Mapping[str, Any]]]


def expansion_mistakes(environments: Environments, *, expand: bool) -> Iterator[tuple[Keys, str]]:
    """Yield mistakes in environments as written, each with its key.

    Args:
        environments: each with its keys.
        expand: whether bash expands them.
    """
    yield from _unclosed(environments) if expand else _unexpanded(environments)


def _unclosed(environments: Environments) -> Iterator[tuple[Keys, str]]:
    """Yield values in which bash could not expand anything, which a job would find out late."""
    for keys, environment in environments:
        variables = environment.get("Variables")
        texts: list[tuple[Keys, object]] = [
            (place, path)
            for place, path in _paths_at_site(keys, environment)
            if str(path).strip().startswith(("/", "$"))
        ]
        if isinstance(variables, Mapping):
            texts += [((*keys, "Variables", str(name)), text) for name, text in variables.items()]
        found = [
            (place, text, find_unclosed(text)) for place, text in texts if isinstance(text, str)
        ]
        found += [
            (place, word, find_unclosed_in_word(word))
            for place, words in _written_options(keys, environment)
            for word in words
        ]
        for place, text, opening in found:
            if opening:
                yield place, f"has a {opening} that is not closed, found {describe_value(text)}"


def _unexpanded(environments: Environments) -> Iterator[tuple[Keys, str]]:
    """Yield mistakes about what a shell would expand, and is not expanded."""
    switch = "; set Site: Expand to true to expand it on the node"
    for keys, environment in environments:
        for place, path in _paths_at_site(keys, environment):
            if isinstance(path, str) and path.strip().startswith("$"):
                yield place, f"{not_expanded(path.strip())}{switch}"
        for place, words in _written_options(keys, environment):
            for word in words:
                if code := find_code(word):
                    yield (
                        place,
                        "has code in it that is not expanded, found "
                        f"{describe_value(code)}{switch}",
                    )


def _paths_at_site(keys: Keys, environment: Mapping[str, Any]) -> list[tuple[Keys, object]]:
    """Return the paths at the site, with their keys."""
    apptainer, python = environment.get("Apptainer"), environment.get("Python")
    paths: list[tuple[Keys, object]] = [((*keys, "Python"), python)]
    if isinstance(python, Mapping):
        paths = [((*keys, "Python", "Path"), python.get("Path"))]
    if isinstance(apptainer, Mapping) and str(apptainer.get("Type")).lower() == "remote":
        paths.append(((*keys, "Apptainer", "Path"), apptainer.get("Path")))
    return paths


def _written_options(
    keys: Keys, environment: Mapping[str, Any]
) -> Iterator[tuple[Keys, tuple[str, ...]]]:
    """Yield the words of options, with their keys."""
    for key in OPTION_KEYS:
        section = environment.get(key)
        given = section.get("Options", "") if isinstance(section, Mapping) else ""
        yield (*keys, key, "Options"), _readable_options(given)


def _readable_options(value: object) -> tuple[str, ...]:
    """Return the words of options; none if the key's own validation reports mistakes."""
    try:
        return parse_options(value)
    except ValueError:
        return ()
