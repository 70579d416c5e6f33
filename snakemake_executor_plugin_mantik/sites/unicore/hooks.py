"""Commands on the login node, before and after a job: pure functions, without I/O.

UNICORE puts a command into a script of its own, unescaped and twice (once between double quotes),
and adds a redirection to it. So that it runs as it is written, and once, it is sent as a file, and
what UNICORE is told to run is that file.
"""

from collections.abc import Sequence
from typing import Final, Literal

from snakemake_executor_plugin_mantik.sites.unicore.batch import OWN_PATH

HOOK_FILES: Final = {"pre": "before.sh", "post": "after.sh"}
"""The files, in the directory that the job has at the server."""


def hook_properties(when: Literal["pre", "post"]) -> dict[str, str]:
    """What a job description says of a hook whose file is there."""
    return {
        f"User {when}command": f"/bin/bash -l {HOOK_FILES[when]}",
        f"RunUser{when.title()}commandOnLoginNode": "true",
    }


def hook_file(commands: Sequence[str]) -> str:
    """The bash script of several commands, each run if the ones before it succeeded.

    They share a shell: what one sets, the next ones see, and an `exit` ends all.
    """
    # Each between braces: a comment would swallow what follows, `||` would go on after a failure
    # of the command before, `;` and `&` would end the chain. `:` for one that is nothing but a
    # comment.
    groups = (f"{{ :\n{command.strip()}\n}}" for command in commands)
    return "\n".join([*OWN_PATH, " &&\n".join(groups), ""])
