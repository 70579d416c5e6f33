"""Commands on the login node, before and after a job. Pure functions, without I/O.

UNICORE puts a command into a script of its own, unescaped and twice (once between double quotes),
and adds a redirection to it. To run it as written, and once, we upload it as a file and let UNICORE
run that file.
"""

from collections.abc import Sequence
from typing import Final, Literal

from snakemake_executor_plugin_mantik.sites.unicore.batch import OWN_PATH

HOOK_FILES: Final = {"pre": "before.sh", "post": "after.sh"}
"""Names of the files in the job's directory at the server."""


def hook_properties(when: Literal["pre", "post"]) -> dict[str, str]:
    """Return the properties of a job description that run a hook's file."""
    return {
        f"User {when}command": f"/bin/bash -l {HOOK_FILES[when]}",
        f"RunUser{when.title()}commandOnLoginNode": "true",
    }


def hook_file(commands: Sequence[str]) -> str:
    """Make the bash script of several commands, each run if the ones before it succeeded.

    They share a shell: each sees the settings of those before it, and an `exit` ends all.
    """
    # Each between braces: a comment would swallow the next command, `||` would go on after a
    # failure of the command before, `;` and `&` would end the chain. `:` serves commands that are
    # only a comment.
    groups = (f"{{ :\n{command.strip()}\n}}" for command in commands)
    return "\n".join([*OWN_PATH, " &&\n".join(groups), ""])
