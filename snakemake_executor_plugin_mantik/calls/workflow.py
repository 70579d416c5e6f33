"""Write a workflow of one rule that calls a function."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.calls.function import Function
from snakemake_executor_plugin_mantik.mlproject.command_line import CommandFiles
from snakemake_executor_plugin_mantik.mlproject.single_rule import output_lines, write_snakefile

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
    return f"{RESULTS}/{function.module}.{function.name}-{_digest(identity)}.json"


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

    Args:
        function: what to call.
        arguments: its arguments by name.
        result: the path of the file with what it returns.
        inputs: files that it reads; its modules are inputs anyway.
        outputs: files that it makes beside its result; a directory ends with `/`.
        pickled: whether to pickle the result instead of writing JSON.

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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
