"""Stand-ins for what jobs expect at a site: `srun`, and `module` where this machine has none.

The sandbox's `srun` comes first on the search path: one of this machine would look for the job in
a Slurm that does not know it. Modules are files below `modules/` named as `NAME/VERSION`; loading
one reads it into the shell. A `module` of this machine finds the same ones below `modulefiles/`.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
PROGRAMS = _HERE / "bin"
"""The stand-ins that are programs; to come first where a job's search path is set by hand."""
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
    """The file that defines `module` on this machine, None where there is none."""
    if home := os.environ.get("MODULESHOME"):
        return str(Path(home) / "init" / "bash")
    return next((init for init in _MODULE_INITS if Path(init).exists()), None)


def shim_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` with the search path of this process and the shims.

    Programs are found as the one who started the sandbox finds them: a virtual environment that is
    active there serves the jobs too.
    """
    found = dict(variables)
    found["PATH"] = f"{PROGRAMS}:{os.environ.get('PATH') or _STANDARD_PATH}"
    found["BASH_ENV"] = str(_HERE / "module.sh")
    if own := _module_init():
        found["MANTIK_SANDBOX_MODULE_INIT"] = own
        found["MANTIK_SANDBOX_MODULES"] = str(_HERE / "modulefiles")
    else:
        found["MANTIK_SANDBOX_MODULES"] = str(_HERE / "modules")
    return found
