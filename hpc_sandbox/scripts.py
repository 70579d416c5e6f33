"""Write the scripts that UNICORE and its TSI make of a job description, including their bugs.

Sources: XNJS `TSIMessages`, the TSI's `BSS.py` for Slurm, and scripts that a real server wrote.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from .description import Command, Description
from .tsi import quoted

EXIT_CODE_FILE = "UNICORE_SCRIPT_EXIT_CODE"
"""The file in the job's directory that receives the script's exit code."""

_GOOD_NAME = re.compile(r"[0-9a-zA-Z:.=~/]+")


def unicore_script(description: Description, directory: Path, user: Mapping[str, str]) -> str:
    """Return the script that runs the executable.

    The command is not quoted; values of variables are in double quotes, unescaped. `user` holds
    HOME, USER and LOGNAME, which the TSI replaces in the whole text.
    """
    exit_code = f"${{UC_OUTPUT_DIRECTORY}}/{EXIT_CODE_FILE}"
    command = " ".join([description.executable, *description.arguments])
    lines = [
        "#!/bin/bash",
        f"umask {description.umask}",
        *_variables(description),
        "PATH=$PATH:. ; export PATH",
        f'UC_WORKING_DIRECTORY="{directory}/"; export UC_WORKING_DIRECTORY',
        f'UC_OUTPUT_DIRECTORY="{directory}/"; export UC_OUTPUT_DIRECTORY',
        'cd "${UC_WORKING_DIRECTORY}"',
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
    script = "\n".join(lines) + "\n"
    for name, value in user.items():
        script = script.replace(f"${name}", value).replace(f"${{{name}}}", value)
    return script


def command_exit_code(name: str) -> str:
    """Return the file in the job's directory for the exit code of the pre- or postcommand."""
    return f".UNICORE_{name}/{name}_{EXIT_CODE_FILE}"


def command_script(command: Command, description: Description, directory: Path, name: str) -> str:
    """Return the script of a pre- or postcommand on the login node, as a real server wrote it.

    The command's text is not escaped. It also stands between `"`, so that a part of it runs once
    more if it contains `"`. The redirections apply to its last command only. If the command calls
    `exit`, the script ends without an exit code.
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


def _tsi_batch_script(description: Description, directory: Path, script: str, queue: str) -> str:
    """Return the batch script of a non-RAW job, with the TSI's options for its resources."""
    requested = description.resources
    named = description.name if _GOOD_NAME.fullmatch(description.name) else "UNICORE_job"
    nodes, cpus = requested.get("Nodes"), requested.get("CPUsPerNode")
    if not {"Nodes", "CPUsPerNode", "TotalCPUs"} & requested.keys():
        nodes = "1"
    memory = _memory_bug(requested.get("MemoryPerNode"))
    options: list[tuple[str, str | int | None]] = [
        ("job-name", named),
        ("partition", queue),
        ("account", description.project or None),
        ("nodes", nodes),
        ("ntasks-per-node", cpus if nodes else None),
        ("ntasks", requested.get("TotalCPUs") if not nodes else None),
        ("mem", memory),
        # The server writes the memory instead of the number of GPUs.
        ("gpus-per-node", memory if "GPUsPerNode" in requested else None),
        ("time", max(1, int(requested.get("Runtime", "3600")) // 60)),
        ("qos", requested.get("QoS")),
        ("constraint", requested.get("NodeConstraints")),
        ("reservation", requested.get("Reservation")),
        ("output", f"{directory}/{description.stdout}"),
        ("error", f"{directory}/{description.stderr}"),
        ("chdir", f"{directory}/"),
    ]
    header = [f'#SBATCH --{name}="{value}"' for name, value in options if value is not None]
    return "\n".join(["#!/bin/bash", *header, script])


def batch_script(
    description: Description, directory: Path, user: Mapping[str, str], queue: str
) -> str:
    """Return the script for sbatch: UNICORE's own with the TSI's options.

    For a RAW job: its own file with a call of UNICORE's script at the end.
    """
    own = unicore_script(description, directory, user)
    if description.job_type != "RAW":
        return _tsi_batch_script(description, directory, own, queue)
    file = directory / f"TSI_submit_{int(time.time() * 1000)}"
    file.write_text(own)
    file.chmod(0o700)
    bss = directory / description.bss_file
    text = bss.read_text() if bss.is_file() else ""
    return f"{text}\n{quoted(file)}\n"


def _memory_bug(asked: str | None) -> int | None:
    """Return the MiB of the bytes cast to a 32-bit integer, as by the server; None below 1."""
    if asked is None:
        return None
    cast = (int(asked) + 2**31) % 2**32 - 2**31
    return cast // 2**20 if cast >= 2**20 else None
