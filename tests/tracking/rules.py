"""Rules of test workflows that the executor takes for runs of entry points."""

HEAD = """
from pathlib import PurePosixPath
from snakemake_executor_plugin_mantik.mlproject import Call
"""
RULE = """
rule {name}:
    output: "{name}.txt"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", {arguments!r})
    shell: {command!r} " && echo > {{output}}"
"""


def rule(command: str, name: str = "train", arguments: dict[str, str] | None = None) -> str:
    """A rule that makes NAME.txt after a command."""
    return RULE.format(name=name, command=command, arguments=arguments or {})


def workflow(**commands: str) -> str:
    targets = ", ".join(f'"{name}.txt"' for name in commands)
    rules = [rule(command, name) for name, command in commands.items()]
    return "\n".join([HEAD, f"rule all:\n    input: {targets}\n", *rules])
