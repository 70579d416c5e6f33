"""The workflow's sources, which no rule names, on their way to a site."""

from collections.abc import Callable, Iterable

from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.staging.bundle import FileChanged
from snakemake_executor_plugin_mantik.staging.local import LocalFiles

UNSTEADY = 3
"""How often a source may change while it is being sent before it is left out."""


async def send_sources(
    paths: Iterable[str], local: LocalFiles, stager: Stager, notify: Callable[[str], None]
) -> dict[str, str]:
    """Send the sources; what changes all the time is somebody's log, and stays here.

    Args:
        paths: relative to the working directory.
        local: looks at them.
        stager: of the site.
        notify: writes a line to the user's log.

    Returns:
        The checksums of what was sent, by path.

    Raises:
        MantikError: they cannot be sent.
    """
    left = dict.fromkeys(paths, UNSTEADY)
    while True:
        files = await local.look_at([(path, None) for path in left], source=True)
        try:
            await stager.send_sources(files)
        except FileChanged as error:
            left[error.path] -= 1
            if not left[error.path]:
                del left[error.path]
                notify(
                    f"Sources: not uploading {display_path(error.path)}, which changes all the"
                    " time; add it to Exclude in the backend config to silence this line."
                )
        else:
            return {file.path: file.sha256 for file in files}
