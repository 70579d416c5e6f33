"""`smk-mantik plan` and `render`: show what a run, or one command, would submit."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from ..common.errors import UserError, one_line, printable, shorten_list
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..config.environment import unknown_environment
from ..config.exclude import Exclude, Include
from ..config.reading import KINDS, LoadedConfig
from ..engine.forecast import (
    Forecast,
    JobPlan,
    Preview,
    Total,
    UploadForecast,
    make_preview,
    plain_request,
)
from ..engine.messages import unchecked_message
from ..engine.plan import Planner
from ..jobs.resources import total_cpus
from ..sites.credentials import find_account
from ..sites.unicore.description import HOOK_FILES
from ..staging.project_files import FILE_BYTES, ProjectFileFilter, ProjectFiles
from ..views.picture import shorten_text
from . import shared
from .check import examine
from .shared import WRONG, AsJson, ForSnakemake, Project, is_config, warn

_LATER: Final = "follows from files that are still to be made"


def plan(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SNAKEMAKE-ARGUMENTS", help="As for snakemake.")
    ] = None,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect", help="Also check the limits of the sites' queues, with your credentials."
        ),
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also show each job's command and outputs.")
    ] = False,
    project_files: Annotated[
        bool,
        typer.Option(
            "--project-files",
            help="Also list which files of the working directory are uploaded without being named"
            " by a rule, and which stay on this machine, with the reason.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `snakemake` with the same arguments would submit; submit nothing."""
    from ..adapter.planning import dry_run, plan_workflow

    def look(workflow: Any, options: Any, logger: Any) -> JobPlan:
        return plan_workflow(
            workflow, options, logger, connect=connect, list_project_files=project_files
        )

    made = dry_run(arguments or [], look)
    if made is None:
        raise typer.Exit(WRONG)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
    else:
        _notify(made, details=details)
    mistakes: dict[tuple[str, str], list[str]] = {}
    for job in made.jobs:
        if job.mistake:
            mistakes.setdefault((job.rule, job.mistake), []).append(job.job)
    for (rule, mistake), names in mistakes.items():
        of_rule = f"{rule} ({humanize_count(len(names), 'job')})"
        warn(f"{names[0] if len(names) == 1 else of_rule}: {mistake}")
    if mistakes:
        raise typer.Exit(WRONG)


_TITLES: Final = (
    "job", "jobs", "site", "queue", "nodes", "tasks", "CPUs", "memory", "GPUs", "time", "runs",
    "uploads",
)  # fmt: skip
_MOST_ROWS: Final = 20
"""Of more jobs, those of a rule that request the same share a row."""
_DEFAULT: Final = "default"
"""What the site gives a job that requests nothing."""
_WIDE: Final = 100
"""Columns from which on the table names the site if all jobs run at one."""
_UPLOADS: Final = _TITLES.index("uploads")
_RIGHT: Final = ("jobs", "nodes", "tasks", "CPUs", "GPUs", "time")


def _notify(made: JobPlan, *, details: bool) -> None:
    console = shared.make_console()
    if made.jobs:
        _print_jobs(made.jobs, console)
    if details:
        for job in made.jobs:
            console.print()
            for line in _details(job):
                console.print(Text(printable(line)))
    for site in made.project_file_sizes:
        console.print()
        for line in _source_lines(made, site):
            console.print(Text(one_line(line)))
    console.print()
    for line in _totals(made):
        console.print(Text(line))


def _print_jobs(jobs: Sequence[Forecast], console: Console) -> None:
    alike: dict[object, list[Forecast]] = {}
    for job in jobs:
        of_rule = job.rule, *_cells([job])[2:_UPLOADS], _note(job)
        alike.setdefault(of_rule if len(jobs) > _MOST_ROWS else job.job, []).append(job)
    rows, notes = [], dict[str, list[str]]()
    # In a narrow terminal, the totals name the site.
    one_site = console.width < _WIDE and len({job.site for job in jobs}) == 1
    for group in alike.values():
        name, number, site, *cells = _cells(group)
        notes.setdefault(_note(group[0]), []).append(name)
        name = shorten_text(name, console.width // 2, group[0].rule)
        rows.append([name, number, "" if one_site else site, *cells])
    shared.print_table(_TITLES, rows, right=_RIGHT, whole=_TITLES[:_UPLOADS])
    for note, names in notes.items():
        if note:
            console.print(Text(one_line(f"{', '.join(shorten_list(names))}: {note}")))


def _cells(jobs: Sequence[Forecast]) -> list[str]:
    """Return the row of some jobs of a rule that differ in their uploads alone."""
    job = max(jobs, key=lambda each: each.inputs.size)
    given, asked = job.resources, [""] * 7
    if given is not None:
        gpus = (given.gpus_per_node or 0) * (given.nodes or 1)
        memory = f"{given.memory_mib_per_node} MiB" if given.memory_mib_per_node else ""
        if given.memory_mib_per_cpu is not None:
            memory = f"{given.memory_mib_per_cpu} MiB per CPU"
        times = f"{job.segments} × " if job.segments > 1 else ""
        default = "?" if job.later else _DEFAULT
        asked = [
            given.queue or _DEFAULT,
            str(given.nodes or ""),
            str(given.tasks or ""),
            str(total_cpus(given) or default),
            memory or default,
            f"{gpus} {given.gpu_model or ''}".rstrip() if gpus else "",
            f"{times}{humanize_duration(given.runtime_s)}" if given.runtime_s else default,
        ]
    known = job.command is not None
    runs = "Snakemake" if known and job.nested else ""
    uploads = _uploads(job.inputs, short=True) if known else ""
    name, number = job.job, ""
    if len(jobs) > 1:
        name, number = job.rule, str(len(jobs))
        most = any(each.inputs != job.inputs for each in jobs)
        uploads = f"{'up to ' * most}{uploads} each" if uploads else ""
    return [name, number, _where(job), *asked, runs, uploads]


def _where(job: Forecast) -> str:
    """Return the site of a job, or those that it may go to."""
    names = [job.site or "?", *job.elsewhere]
    return f"any: {', '.join(names)}" if job.anywhere and len(names) > 1 else " or ".join(names)


def _note(job: Forecast) -> str:
    """Return that a job cannot be submitted, or was already, or what of it is not known yet."""
    if job.mistake:
        return "cannot be submitted, see below"
    if job.sent:
        return "submitted already, reattached if unchanged"
    if job.stays and job.elsewhere:
        return "at the site where the inputs stay"
    unknown = [*job.later, *(["its command"] if job.command is None else [])]
    return f"{', '.join(unknown)}: {_LATER}" if unknown else ""


def _details(job: Forecast) -> Iterator[str]:
    yield f"{job.job} at {_where(job) if job.site else 'a site that is not known yet'}"
    if job.resources is not None:
        given = {k: v for k, v in asdict(job.resources).items() if v is not None}
        yield f"  requests:    {', '.join(f'{k} {v}' for k, v in given.items()) or 'nothing'}"
    if note := job.mistake or _note(job):
        yield f"  note:        {note}"
    yield f"  environment: {job.environment or 'none'}"
    if job.command is not None:
        yield f"  files:       {_uploads(job.inputs)}"
        yield "  command:"
        yield from (f"    {line}" for line in job.command.splitlines())
    yield f"  makes:       {', '.join(job.outputs)}"


def _source_lines(made: JobPlan, site: str) -> Iterator[str]:
    files, others = made.project_file_sizes[site], made.left_out[site]
    yield f"Project files for {site}:"
    yield from (f"  {path} ({humanize_size(size)})" for path, size in files.items())
    if others:
        yield f"Not uploaded to {site}, unless a rule names them as inputs:"
        yield from (f"  {path}: {why}" for path, why in sorted(others.items()))


def _totals(made: JobPlan) -> Iterator[str]:
    for site, total in made.sites.items():
        hours = f"at most {_core_hours(total)}"
        if total.gpu_hours:
            hours += f" and {total.gpu_hours:.1f} GPU hours"
        if total.without_runtime == total.jobs:
            hours = "core hours unknown without a walltime (set runtime in the rule)"
        elif total.without_runtime:
            hours += f", and {total.without_runtime} without walltime"
        files = _uploads(total.uploads, project=made.project_files[site].files)
        yield f"{site}: {humanize_count(total.jobs, 'job')}, {hours}; files: {files}."
        yield from _pools(made.jobs, site)
        if total.unchecked:
            yield f"{site}: {unchecked_message(total.unchecked)}."
    if later := sum(job.site is None for job in made.jobs):
        yield f"{humanize_count(later, 'job')} at a site that {_LATER}."
    if made.here:
        yield f"{humanize_count(made.here, 'job')} on this machine."
    if made.more:
        yield "Checkpoints may lead to more jobs."
    if made.jobs:
        yield f"Without this machine, {_alone(made)}."
    else:
        yield "No job would be submitted."


def _pools(jobs: Iterable[Forecast], site: str) -> Iterator[str]:
    """Describe which jobs go to a site's pools, and what that saves where jobs get whole nodes."""
    pools: dict[str, list[tuple[Forecast, float]]] = {}
    for job in jobs:
        if job.site == site and (wants := job.resources) is not None and wants.pool is not None:
            pools.setdefault(wants.pool, []).append((job, (wants.runtime_s or 0) / 3600))
    for name, pooled in pools.items():
        rules = Counter(job.rule for job, _ in pooled).items()
        of_rules = ", ".join(shorten_list([f"{rule} ({number})" for rule, number in rules]))
        text = f"{site}, pool {name}: {humanize_count(len(pooled), 'job')} of {of_rules}"
        hours = sum((job.cores or 0) * time for job, time in pooled)
        alone = sum((job.cores_alone or 0) * time for job, time in pooled)
        if alone > hours:
            text += f", {hours:.1f} core hours and those when an allocation is idle, instead of"
            text += f" {alone:.1f} with whole nodes for each job"
        yield f"{text}."


def _alone(made: JobPlan) -> str:
    """Describe how far the run goes on once its first jobs are submitted."""
    everything = made.alone == len(made.jobs)
    number = "all jobs at sites" if everything else humanize_count(made.alone, "job")
    one = made.alone == 1 and not everything
    text = f"{number} would go on by {'itself' if one else 'themselves'}"
    stops = "; ".join(f"{rule} ({why})" for rule, why in made.stops.items())
    return f"{text}. Waiting for this machine: {stops}" if stops else text


def _core_hours(total: Total) -> str:
    """Describe core hours; those of a job that requests no CPUs depend on the site's default."""
    if not total.without_cores:
        return f"{total.core_hours:.1f} core hours"
    unknown = (
        f"an unknown number of core hours for {humanize_count(total.without_cores, 'job')} without"
        " CPUs (set Resources: CPUsPerNode, or cpus_per_task of the rule)"
    )
    return f"{total.core_hours:.1f} core hours, {unknown}" if total.core_hours else unknown


def _uploads(files: UploadForecast, *, short: bool = False, project: int = 0) -> str:
    if short:
        count = humanize_count(files.files, "file")
        parts = [f"{count}, {humanize_size(files.bytes)}"] if files.files else []
        if moved := files.moved + files.imported:
            size = humanize_size(files.moved_bytes + files.imported_bytes)
            parts.append(f"{moved} to move, {size}")
        return "; ".join(parts)
    parts = [f"{files.files} to upload ({humanize_size(files.bytes)})"]
    if project:
        parts[0] += f", {project} of them {'a project file' if project == 1 else 'project files'}"
    for number, words in (
        (files.at_site, "at the site already"),
        (files.made_there, "made at the site by jobs of this run"),
        (files.later, "to upload once made elsewhere"),
        (
            files.imported,
            "to move from other sites, from server to server if they allow it"
            f" ({humanize_size(files.imported_bytes)})",
        ),
        (
            files.moved,
            f"to move from other sites, through this machine ({humanize_size(files.moved_bytes)})",
        ),
    ):
        if number:
            parts.append(f"{number} {words}")
    return ", ".join(parts)


def render(  # noqa: PLR0917 - options of a command line
    target: Annotated[
        str,
        typer.Argument(
            metavar="RULE|FILE",
            help="A rule, a job or an output of the workflow here; or with --command a backend"
            " config, FILE or NAME=FILE.",
        ),
    ],
    arguments: ForSnakemake = None,
    command: Annotated[str, typer.Option(help="The command of a job that is in no workflow.")] = "",
    project: Project = Path(),
    environment: Annotated[
        str, typer.Option(help="One of the config's Environments, by its name.")
    ] = "",
    unicore_version: Annotated[
        str, typer.Option(help="Render for this version, such as 11.0.0.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the script, the submission and the uploads of a job; connect to no site."""
    if command:
        made = _preview_command(target, command, project, environment, unicore_version)
    else:
        if is_config(target) and Path(target).suffix in KINDS:
            raise UserError("no command is given", where=target, do="Add --command, or name a rule")
        if environment or unicore_version or project != Path():
            what = "--project, --environment and --unicore-version are for a plain command"
            raise UserError(what, do="Remove them, or add --command")
        from ..adapter.planning import dry_run, preview_job

        found = dry_run(
            ["--forceall", *(arguments or [])],
            lambda workflow, options, logger: preview_job(workflow, options, logger, target),
        )
        if found is None:
            raise typer.Exit(WRONG)
        made = found
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(made), indent=2))
    else:
        typer.echo(_for_people(made))


def _preview_command(
    file: str, command: str, project: Path, environment: str, unicore_version: str
) -> Preview:
    if not project.is_dir():
        raise UserError("there is no such folder", where=str(project), do="Correct --project")
    report = examine(file, project)
    if report.loaded is None:
        for mistake in report.mistakes:
            typer.echo(str(mistake), err=True)
        raise typer.Exit(WRONG)
    # A preview is possible in spite of a wrong name of the site, so that is only a warning.
    warnings = [*report.warnings, *map(str, report.mistakes)]
    if environment not in report.loaded.config.all_environments:
        raise unknown_environment(environment, report.loaded.config, "--environment")
    return render_preview(
        report.loaded, warnings, project, command,
        unicore_version=unicore_version, environment=environment,
    )  # fmt: skip


def render_preview(
    loaded: LoadedConfig,
    warnings: list[str],
    project: Path,
    command: str,
    *,
    unicore_version: str = "",
    environment: str = "",
) -> Preview:
    """Return a preview of the submission and the uploads from the project folder.

    `environment` is the name of the config's environment; empty for its default.

    Raises:
        UserError: `unicore_version` is wrong or does not apply, or the job cannot be submitted.
    """
    config = loaded.config
    if unicore_version and config.api != "unicore":
        raise UserError(
            "--unicore-version does not apply to a site behind firecREST",
            where=str(loaded.path),
            do="Remove it",
        )
    if unicore_version and not re.search(r"\d+\.\d+", unicore_version):
        raise UserError(
            f"{unicore_version!r} is not a version",
            where="--unicore-version",
            do="Use the server's version, such as 11.0.0, or that of its UNICORE/X, such as 3.0.0",
        )
    planner = Planner(config, find_account(loaded.name, os.environ), project)
    # Without a workflow, products of rules count as project files: so allow any total.
    chosen = ProjectFileFilter(
        project, Exclude(config.exclude), include=Include(config.site.include)
    ).select(sys.maxsize)
    files = planner.environment_files(environment)
    found = [*warnings, *_sizes(loaded, chosen, [path for _, path in files])]
    size = files[0][0].stat().st_size if files and files[0][0].is_file() else None
    return make_preview(
        planner, plain_request(loaded.name, command, environment),
        uploads=chosen.paths, image_size=size, warnings=found, unicore_version=unicore_version,
    )  # fmt: skip


def _sizes(loaded: LoadedConfig, chosen: ProjectFiles, files: Collection[str]) -> list[str]:
    """Warn about files that seem to hold secrets, or are too large alone or together."""
    site, warnings = loaded.config.site, []
    if chosen.withheld:
        warnings.append(chosen.withheld)
    if left := [path for path in chosen.too_large if path not in files]:
        named = ", ".join(map(_shown, left[:3])) + ", …" * (len(left) > 3)
        warnings.append(
            f"not uploaded unless a rule names it as an input: {humanize_count(len(left), 'file')}"
            f" above {humanize_size(FILE_BYTES)}, {named}"
        )
    if chosen.size > site.project_files_limit_bytes:
        warnings.append(
            f"the project files are {humanize_size(chosen.size)} together, more than Site:"
            " ProjectFilesLimit: a run would fail. Name some as inputs of rules, or Exclude them"
        )
    return warnings


def _for_people(made: Preview) -> str:
    given = {key: value for key, value in made.resources.items() if value is not None}
    environment = made.environment + (f" ({made.image_type} image)" if made.image_type else "")
    lines = [
        f"Job:         {made.job}",
        f"Site:        {made.site} ({'UNICORE' if made.api == 'unicore' else 'firecREST'})",
        f"Resources:   {', '.join(f'{key} {value}' for key, value in given.items())}",
        f"Environment: {environment}",
        "",
        f"Variables ({len(made.variables)}):",
        *(f"  {name}={_shown(value)}" for name, value in made.variables.items()),
        "",
        f"Uploads ({len(made.uploads)}):",
        *(f"  {_shown(path)}" for path in made.uploads),
        "",
        "Submission (the script as shown below):",
        json.dumps(_without_scripts(made.submission), indent=2, ensure_ascii=False),
        "",
        "Script (/WORKSPACE and the UUID of zeros are placeholders):",
        made.script.rstrip("\n"),
    ]
    return "\n".join(lines)


def _without_scripts(value: Any) -> Any:
    """Remove the long texts from a submission, which are shown separately."""
    if isinstance(value, dict):
        if value.get("To") in HOOK_FILES.values():
            return value
        return {
            key: "as shown below" if key in ("Data", "script") else _without_scripts(item)
            for key, item in value.items()
        }
    return [_without_scripts(item) for item in value] if isinstance(value, list) else value


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)
