"""Substitutes for programs that jobs expect at a site: `srun`, and `module` if it is missing here.

The sandbox's `srun` is first on the search path, because this machine's own would search for the
job in a Slurm that does not know it. Modules are files `NAME/VERSION` below `modules/`; loading one
reads it into the shell. This machine's `module`, if any, finds the same ones below `modulefiles/`.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
PROGRAMS = _HERE / "bin"
"""The directory of substitute programs; it must come first where code sets a job's search path."""
_STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_MODULE_INITS = (
    "/etc/profile.d/modules.sh",
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/z00_lmod.sh",
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)


@cache
def _module_init() -> str | None:
    """Return the file that defines `module` on this machine, or None."""
    if home := os.environ.get("MODULESHOME"):
        return str(Path(home) / "init" / "bash")
    return next((init for init in _MODULE_INITS if Path(init).exists()), None)


def user_environment(home: Path, user: str, *more: str) -> dict[str, str]:
    """Return a user's variables; of ours they have language, time zone, and those named `more`."""
    kept = ("LANG", "LC_ALL", "TZ", *more)
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return found | {"HOME": str(home), "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}


def shim_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with the shims and the search path of this process.

    Jobs find the same programs as the user who started the sandbox, such as those of an active
    virtual environment.
    """
    own = _module_init()
    return {
        **variables,
        "PATH": f"{PROGRAMS}:{os.environ.get('PATH') or _STANDARD_PATH}",
        "BASH_ENV": str(_HERE / "module.sh"),
        "MANTIK_SANDBOX_MODULES": str(_HERE / ("modulefiles" if own else "modules")),
        **({"MANTIK_SANDBOX_MODULE_INIT": own} if own else {}),
    }
