"""The function that `smk-mantik call` names: what it needs, and the workflow that runs it.

The module is read, not imported: what it imports may exist only at the site.
"""

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ..common.errors import UserError
from ..mlproject.command_line import CommandFiles
from ..mlproject.entry import suggest
from ..mlproject.single_rule import output_lines, write_snakefile
from ..rules.kinds.script_file import imported_siblings

_FUNCTION: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Function:
    """A function in a module.

    Attributes:
        module: its module, as Python imports it.
        name: its name in the module, with dots if it is a class's.
        files: the modules of this directory that it runs, relative; empty if it is installed at the
            site.
    """

    module: str
    name: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def parse_argument(text: str) -> Any:
    """Return the value of an argument: JSON if it is that, else the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except ValueError:
        return text


def _refuse(constant: str) -> None:
    """Let NaN and Infinity be texts, which `float` reads."""
    raise ValueError(constant)


def _finite(number: str) -> float:
    """Let what is too large for a number, 1e999, be a text as well."""
    if math.isinf(value := float(number)):
        _refuse(number)
    return value


def find_function(text: str, arguments: Iterable[str], *, installed: bool) -> Function:
    """Find `MODULE:FUNCTION` in the current directory, and check that it takes the arguments.

    With `installed` the module is a part of the site's environment, and nothing is checked.

    Raises:
        UserError: there is no such module or function, or it does not take these arguments.
    """
    if not _FUNCTION.fullmatch(text):
        raise UserError(
            f"{text!r} names no function", where="smk-mantik call",
            do="Name it as MODULE:FUNCTION, such as train:main",
        )  # fmt: skip
    module, _, name = text.partition(":")
    if installed:
        return Function(module, name)
    path = _module_file(module)
    source = path.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"it is not valid Python ({getattr(error, 'msg', error)})",
            where=f"{path}, line {line}" if line else str(path), do="Correct it",
        ) from None  # fmt: skip
    known = dict(_names(tree.body))
    first = name.partition(".")[0]
    if first not in known and "*" not in known:
        raise UserError(
            f"it has no function {name!r}{suggest(first, known)}", where=str(path),
            do="Correct the name after the colon",
        )  # fmt: skip
    found = _member(known, name, str(path))
    if isinstance(found, ast.AsyncFunctionDef) and not found.decorator_list:
        raise UserError(
            f"{name}() is a coroutine, which nothing would run", where=str(path),
            do="Name a function that calls asyncio.run",
        )  # fmt: skip
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        _check_arguments(found, set(arguments), str(path))
    files = imported_siblings(f"import {module}", Path())
    return Function(module, name, tuple(sorted(map(str, files))))


def _member(known: Mapping[str, ast.stmt], name: str, where: str) -> ast.stmt | None:
    """Return what defines a name with dots; None if that cannot be known.

    Raises:
        UserError: a class has no such member.
    """
    first, *rest = name.split(".")
    found = known.get(first)
    for part in rest:
        # Bases, decorators and metaclasses may bring more.
        if not isinstance(found, ast.ClassDef) or found.bases or found.decorator_list:
            return None
        if found.keywords:
            return None
        members = dict(_names(found.body))
        if part not in members and not hasattr(type, part):
            raise UserError(
                f"the class {found.name} has no {part!r}{suggest(part, members)}", where=where,
                do="Correct the name after the colon",
            )  # fmt: skip
        found = members.get(part)
    return found


def _module_file(module: str) -> Path:
    base = Path(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise UserError(
        f"there is no module {module!r} in this directory", where=str(base.with_suffix(".py")),
        do="Run this in the directory that has the module; if the site's environment has it"
        " installed, add --installed",
    )  # fmt: skip


def _names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module defines, each with what defines it."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target)):
                if isinstance(name, ast.Name):
                    yield name.id, node
        else:  # if, attempt, with
            for field in ("body", "orelse", "finalbody"):
                yield from _names(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _names(handler.body)


def _check_arguments(function: ast.FunctionDef, given: set[str], where: str) -> None:
    """Check names of arguments, which are all passed by name."""
    arguments = function.args
    positional = arguments.args
    optional = {each.arg for each in positional[len(positional) - len(arguments.defaults) :]}
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional |= {each.arg for each, default in pairs if default is not None}
    known = [each.arg for each in (*positional, *arguments.kwonlyargs)]
    wrong = []
    if arguments.kwarg is None:
        hints = {name: suggest(name, known) for name in sorted(given - set(known))}
        wrong += [f"{name!r} is no argument of it{hint}" for name, hint in hints.items()]
    missing = [name for name in known if name not in given | optional]
    wrong += [f"its argument {name!r} is missing" for name in missing]
    if arguments.posonlyargs:
        wrong.append("it takes arguments by position, and all are passed by name")
    if wrong:
        raise UserError(
            "; ".join(wrong),
            where=f"{where}, {function.name}()",
            do="Pass arguments as -a NAME=VALUE",
        )


def describe_call(function: Function, arguments: Mapping[str, Any]) -> str:
    """Return the call as Python has it: `train:main(lr=0.1)`."""
    return f"{function}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


RESULTS: Final = "calls"
"""Directory below the working directory with the results of calls that name no file for theirs."""

_RUNNER: Final = "call_function.py"

_TEMPLATE: Final = """\
# Made by `smk-mantik call`, for this command line alone.
rule {rule}:
    input:
        *{inputs!r},
    output:
        {result!r},
        {outputs}
    params:
        module={module!r},
        function={function!r},
        arguments=lambda wildcards: {arguments!r},
        pickled={pickled!r},
    script:
        {runner!r}
"""


def default_result(function: Function, arguments: Mapping[str, Any]) -> str:
    """Return the path of a call's result: one for the same function with the same arguments."""
    identity = repr((str(function), sorted(arguments.items())))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{RESULTS}/{function.module}.{function.name}-{digest}.json"


def write_call(
    function: Function,
    arguments: Mapping[str, Any],
    result: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    pickled: bool,
) -> Path:
    """Write the workflow; return the path of its Snakefile.

    `result` is the path of the file with what the function returns, JSON unless it is `pickled`.
    Its modules are inputs anyway. In `outputs`, which it makes beside its result, a directory ends
    with `/`.

    Raises:
        UserError: it cannot be written.
    """
    runner = files("snakemake_executor_plugin_mantik.rules.onsite") / _RUNNER
    text = _TEMPLATE.format(
        rule="call_" + re.sub(r"\W", "_", function.name, flags=re.ASCII),
        inputs=list(dict.fromkeys([*function.files, *inputs])),
        result=result,
        outputs=output_lines(CommandFiles(list(outputs))),
        module=function.module,
        function=function.name,
        arguments=dict(arguments),
        pickled=pickled,
        runner=_RUNNER,
    )
    snakefile = write_snakefile(text, f"call-{function.name}")
    target, code = snakefile.parent / _RUNNER, runner.read_bytes()
    if not target.exists() or target.read_bytes() != code:  # a newer script would run again
        target.write_bytes(code)
    return snakefile
