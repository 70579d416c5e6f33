"""The scripts that UNICORE and its TSI make of a job description, bugs included.

Sources: XNJS `TSIMessages`, the TSI's `BSS.py` for Slurm, and scripts that a real server wrote.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from snakemake_executor_plugin_mantik.sandbox.description import Command, Description

EXIT_CODE_FILE = "UNICORE_SCRIPT_EXIT_CODE"
"""The file in the job's directory that the script's exit code ends up in."""

_GOOD_NAME = re.compile(r"[0-9a-zA-Z:.=~/]+")


def unicore_script(description: Description, directory: Path, user: Mapping[str, str]) -> str:
    """The script that runs the executable: unquoted, environment in double quotes, as it is.

    `user` holds HOME, USER and LOGNAME, which the TSI replaces in the whole text.
    """
    exit_code = f"${{UC_OUTPUT_DIRECTORY}}/{EXIT_CODE_FILE}"
    command = " ".join([description.executable, *description.arguments])
    lines = [
        "#!/bin/bash",
        f"umask {description.umask}",
        *_exports(description, directory),
        f'UC_EXECUTABLE="{description.executable}"; export UC_EXECUTABLE',
        f'chmod u+x "{description.executable}" 2> /dev/null ',
        f"rm -f {exit_code}",
    ]
    if description.before and not description.before.on_login_node:
        lines.append(description.before.text)
    lines += [f"{command} < {description.stdin}" if description.stdin else command, ""]
    lines.append(f"echo $? > {exit_code}")
    if description.after and not description.after.on_login_node:
        lines.append(description.after.text)
    return _replaced("\n".join(lines) + "\n", user)


def command_exit_code(name: str) -> str:
    """The file in the job's directory that the exit code of the pre- or postcommand ends up in."""
    return f".UNICORE_{name}/{name}_{EXIT_CODE_FILE}"


def command_script(command: Command, description: Description, directory: Path, name: str) -> str:
    """The script of a pre- or postcommand on the login node, as the real server was seen to write.

    The command's text is not escaped: between `"` it runs once more where it ends a quoted part,
    and the redirections are those of its last command only. It ends without an exit code when the
    command itself says `exit`.
    """
    exit_code = f"${{UC_OUTPUT_DIRECTORY}}/{name}_{EXIT_CODE_FILE}"
    lines = [
        f"UC_WORKING_DIRECTORY={directory}/; export UC_WORKING_DIRECTORY",
        f"UC_OUTPUT_DIRECTORY={directory}/.UNICORE_{name}/; export UC_OUTPUT_DIRECTORY",
        "cd ${UC_WORKING_DIRECTORY}",
        *_variables(description),
        f'{{ UC_EXECUTABLE="{command.text.rstrip()}"; export UC_EXECUTABLE',
        f'chmod u+x "{command.text.split(" ", 1)[0]}" 2> /dev/null ',
        f"rm -f {exit_code}",
        f"{command.text} >> ${{UC_OUTPUT_DIRECTORY}}/stdout 2>> ${{UC_OUTPUT_DIRECTORY}}/stderr",
        "",
        f"echo $? > {exit_code}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _variables(description: Description) -> list[str]:
    return [f'{name}="{value}"; export {name}' for name, value in description.environment.items()]


def _exports(description: Description, directory: Path) -> list[str]:
    return [
        *_variables(description),
        "PATH=$PATH:. ; export PATH",
        f'UC_WORKING_DIRECTORY="{directory}/"; export UC_WORKING_DIRECTORY',
        f'UC_OUTPUT_DIRECTORY="{directory}/"; export UC_OUTPUT_DIRECTORY',
        'cd "${UC_WORKING_DIRECTORY}"',
    ]


def _replaced(script: str, user: Mapping[str, str]) -> str:
    for name, value in user.items():
        script = script.replace(f"${name}", value).replace(f"${{{name}}}", value)
    return script


def tsi_batch_script(description: Description, directory: Path, script: str, queue: str) -> str:
    """The batch script of a job that is not RAW, with what the TSI makes of its resources."""
    asked = description.resources
    named = description.name if _GOOD_NAME.fullmatch(description.name) else "UNICORE_job"
    nodes, cpus = asked.get("Nodes"), asked.get("CPUsPerNode")
    if not {"Nodes", "CPUsPerNode", "TotalCPUs"} & asked.keys():
        nodes = "1"
    memory = _memory_bug(asked.get("MemoryPerNode"))
    options: list[tuple[str, str | int | None]] = [
        ("job-name", named),
        ("partition", queue),
        ("account", description.project or None),
        ("nodes", nodes),
        ("ntasks-per-node", cpus if nodes else None),
        ("ntasks", asked.get("TotalCPUs") if not nodes else None),
        ("mem", memory),
        # The server writes the memory where the number of GPUs belongs.
        ("gpus-per-node", memory if "GPUsPerNode" in asked else None),
        ("time", max(1, int(asked.get("Runtime", "3600")) // 60)),
        ("qos", asked.get("QoS")),
        ("constraint", asked.get("NodeConstraints")),
        ("reservation", asked.get("Reservation")),
        ("output", f"{directory}/{description.stdout}"),
        ("error", f"{directory}/{description.stderr}"),
        ("chdir", f"{directory}/"),
    ]
    header = [f'#SBATCH --{name}="{value}"' for name, value in options if value is not None]
    return "\n".join(["#!/bin/bash", *header, script])


def _memory_bug(asked: str | None) -> int | None:
    """What of the memory in bytes survives the server's cast to a 32-bit integer, in MiB."""
    if asked is None:
        return None
    cast = (int(asked) + 2**31) % 2**32 - 2**31
    return cast // 2**20 if cast >= 2**20 else None
