"""What commands name beside a Snakefile that is not in the working directory.

With `snakemake --directory results` the scripts of a workflow are somewhere else, and commands call
them as `{workflow.basedir}/scripts/train.py`. Such a file goes along, with what it may need: the
files of its directory and the packages that it imports. Of a directory all small files go along.
"""

import os
import re
from pathlib import Path

from snakemake.sourcecache import LocalSourceFile

from snakemake_executor_plugin_mantik.config.exclude import Exclude, Include
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import OURS, local_path
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.kinds.script_file import ScriptFile
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths
from snakemake_executor_plugin_mantik.rules.paths.path_rewriting import BEFORE, BEHIND
from snakemake_executor_plugin_mantik.rules.paths.withheld import report_withheld
from snakemake_executor_plugin_mantik.staging import sources

_BELOW = r"(?:/[^\s'\"`$;|&<>()*?\[{]*)?"
"""What may follow the directory of a Snakefile, up to the end of the word or a pattern in it."""


def upload_siblings(
    job: Job, text: str, places: JobPaths, config: BackendConfig
) -> tuple[str, tuple[Upload, ...]]:
    """A command as the site knows it, and the files beside Snakefiles that it names.

    Args:
        job: the Snakemake job whose command it is.
        text: the command, with the paths of the job itself mapped.
        places: where paths are at its site.
        config: the site's, for limits and what is left out.

    Raises:
        UserError: the files are too large together.
    """
    uploads: dict[str, Upload] = {}

    def taken(match: re.Match[str]) -> str:
        path = os.path.normpath(match[0])
        place = places.place(path)
        if not os.path.exists(path) or place is None or not place.startswith(f"{OURS}/"):
            return match[0]
        for file in _with_surroundings(Path(path), places, config):
            at = places.place(file)
            if at is not None:
                uploads[at] = Upload(at, local=local_path(at, Path(places.workdir)))
        return places.at_site(path) + match[0][len(match[0].rstrip("/")) :]

    for root in _roots(job, places):
        if root in text:
            text = re.sub(f"{BEFORE}{re.escape(root)}{BEHIND}{_BELOW}", taken, text)
    return text, tuple(uploads.values())


def _roots(job: Job, places: JobPaths) -> list[str]:
    """The directories of Snakefiles that are not in the working directory, the deepest first."""
    included = [s for s in job.rule.workflow.included if isinstance(s, LocalSourceFile)]
    folders = {os.path.dirname(os.path.abspath(source.path)) for source in included}
    own = f"{places.workdir.rstrip('/')}/"
    return sorted((f for f in folders if not f"{f}/".startswith(own)), key=len, reverse=True)


def _with_surroundings(path: Path, places: JobPaths, config: BackendConfig) -> list[Path]:
    limits = config.site.source_file_limit_bytes, config.site.sources_limit_bytes
    if path.is_dir():
        chosen = sources.select_sources(
            path, Exclude(config.exclude), products={os.path.relpath(places.workdir, path)},
            file_limit=limits[0], total_limit=limits[1],
            include=Include(config.site.include),
        )  # fmt: skip
        report_withheld(str(path), chosen.withheld)
        return [path / name for name in chosen.paths]
    python = path.suffix == ".py"
    text = path.read_text(errors="replace") if python else ""
    script = ScriptFile(path.name, text, "python" if python else None, path.parent, None, None)
    return [path, *(beside for _, beside in script.beside(*limits, Include(config.site.include)))]
