"""`smk-mantik runs`: manage runs of MLproject entry points, from submission to registered model."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from ..common.errors import MantikError, UserError, one_line, printable
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.state_directory import data_home
from ..mlproject.command_line import CommandMistakes, ContinueOptions
from ..mlproject.single_rule import RESULTS
from ..runs import controller, local_runs
from ..runs.directories import RunDirectory, config_of_file, runs_home
from ..runs.schedule_store import repeated_by
from .shared import (
    NOT_DONE,
    App,
    AsJson,
    Checkpoint,
    EntryName,
    Extra,
    Follow,
    Parameters,
    Segments,
    SiteConfig,
    Yes,
    add_row,
    confirm,
    make_console,
    new_table,
    print_json,
    require_mlflow,
    say,
    warn,
)

if TYPE_CHECKING:
    from ..runs.listing import FoundRun, RunRow
    from ..runs.submit import SubmitRequest

runs_app = App(
    help="Submit runs of MLproject entry points that go on by themselves; list, repeat them.",
    no_args_is_help=True,
)

_SHORT: Final = 8
"""Characters of a run's id in a table."""

_METRICS: Final = 4
"""Maximum number of a run's metrics in a table."""

_Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, a prefix of it, or name.")]


@dataclass(frozen=True)
class _Options:
    """What can be said of a run when it is submitted, and when it is submitted again."""

    parameter: Parameters = None
    extra: Extra = None
    site: SiteConfig = ""
    account: Annotated[str, typer.Option(help="The compute budget account.")] = ""
    experiment: Annotated[
        str, typer.Option(help="The MLflow experiment; created if it does not exist.")
    ] = ""
    name: Annotated[str, typer.Option(help="The run's name; default: MLflow chooses one.")] = ""
    segments: Segments = None
    checkpoint: Checkpoint = ""
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until it ends; exit with 1 if it fails. Ctrl-C cancels it."
        ),
    ] = False
    as_json: AsJson = False

    @property
    def request(self) -> "SubmitRequest":
        from ..runs.submit import SubmitRequest

        return SubmitRequest(
            parameters=_pairs("-P", self.parameter), extra=_pairs("--extra", self.extra),
            experiment=self.experiment, name=self.name, account=self.account,
            going_on=ContinueOptions(self.segments, self.checkpoint),
        )  # fmt: skip


runs_app.callback()(require_mlflow)


@runs_app.command()
def submit(
    project: Annotated[str, typer.Argument(help="A folder or a git URL; #SUB for a subfolder.")],
    *,
    version: Annotated[
        str,
        typer.Option(
            "--version",
            "-v",
            help="A branch, tag or commit; a folder without one is used as it is.",
        ),
    ] = "",
    entry_point: EntryName = "main",
    options: _Options,
) -> None:
    """Submit an entry point of an MLproject to a site. The run continues after this command ends.

    Reports all mistakes before it creates a run or submits anything.
    """
    from ..runs.submit import submit_run

    chosen = config_of_file(options.site, os.environ)
    run_id = submit_run(
        replace(options.request, uri=project, chosen=chosen, entry_point=entry_point,
                version=version)
    )  # fmt: skip
    _told_of(run_id, wait=options.wait, as_json=options.as_json)


@runs_app.command()
def rerun(run: _Run, *, options: _Options) -> None:
    """Submit a run again with the same project, parameters and site, except for options given here.

    For another project, version or entry point use smk-mantik runs submit.
    """
    from ..runs.submit import submit_run

    here = _found_here(
        run,
        "or its directory is gone",
        "Submit its project again: smk-mantik runs submit. If it belongs to a workflow's"
        " job, run that again: snakemake --forcerun, with the rule's name",
    )
    chosen = config_of_file(options.site, os.environ) if options.site else None
    run_id = submit_run(replace(options.request, again=here.request.run_id, chosen=chosen))
    _told_of(run_id, wait=options.wait, as_json=options.as_json)


def _found_here(run: str, why: str, do: str) -> RunDirectory:
    """Return a run whose directory is on this machine; else raise, with words on `why` and `do`."""
    from ..runs.listing import find_run

    found = find_run(run)
    if found.here is None:
        what = f"it was not submitted from here{f', {why}' if why else ''}"
        raise UserError(what, where=f"run {found.run_id}", do=do)
    return found.here


@runs_app.command("list")
def list_(
    *,
    experiment: Annotated[str, typer.Option(help="Only runs of this experiment.")] = "",
    state: Annotated[
        str, typer.Option(help="SCHEDULED, RUNNING, FINISHED, FAILED or KILLED.")
    ] = "",
    site: Annotated[str, typer.Option(help="Only runs at this site.")] = "",
    since: Annotated[
        str, typer.Option(help="Only runs since a date, or an age such as 12h or 7d.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Maximum number of runs.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List the latest runs, including those of workflows' jobs, with their times and metrics."""
    from ..runs import listing
    from ..runs.store import STATES

    wanted = state.upper()
    if wanted and wanted not in STATES:
        raise UserError(
            f"there is no state {state!r}", where="--state", do=f"Use one of {', '.join(STATES)}"
        )
    found = listing.list_rows(
        listing.RunFilter(
            experiment, wanted, site, listing.parse_since(since) if since else 0.0, limit
        ),
        warn,
    )
    if as_json:
        print_json([asdict(row) for row in found])
    elif found:
        make_console().print(_runs_table(found))
    else:
        typer.echo("No runs.")


@runs_app.command("show")
def show_run(run: _Run, *, as_json: AsJson = False) -> None:
    """Show a run's state, results, and how it was submitted."""
    found = run_details(_find(run))
    if as_json:
        print_json(found)
    else:
        for line in run_lines(found):
            typer.echo(one_line(line))


@runs_app.command()
def logs(
    run: _Run,
    *,
    follow: Follow = False,
    controller: Annotated[
        bool, typer.Option("--controller", help="Print the output of Snakemake, not of the job.")
    ] = False,
) -> None:
    """Print the output of a run's job, from the site while it runs.

    If there is no job, or not yet, print the output of Snakemake.
    """
    here = _found_here(
        run, "", "When it is over, see its log in MLflow, among its artifacts below mantik/"
    )
    if controller or not local_runs.write_job_log(here, _write, follow=follow):
        local_runs.write_controller_log(here, _write, follow=follow)


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


@runs_app.command("cancel")
def cancel_command(run: _Run) -> None:
    """Cancel a run, and wait until its site confirms."""
    from ..runs.listing import LATE
    from ..runs.store import ENDED

    here = _found_here(
        run, "", "Cancel it where it was: smk-mantik cancel in the workflow's directory"
    )
    local_runs.cancel_run(here, say)
    run_id = here.request.run_id
    typer.echo(f"Run {run_id}: {controller.run_status(here)}.")
    found = _find(run_id)
    if found.away is not None:
        warn(f"smk-mantik runs list will report this to MLflow. {found.away}")
    elif found.run is not None and found.run.info.status not in ENDED:
        warn(f"{LATE}.")


@runs_app.command("continue")
def continue_(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Default: all runs whose controllers are gone.")
    ] = "",
) -> None:
    """Restart the controllers of runs that have lost theirs; jobs do not run twice."""
    if not run:
        gone = [each for each in local_runs.list_local_runs() if each.gone]
    elif (one := local_runs.find_local_run(run)) is None:
        raise UserError(
            f"no run {run!r} was submitted from here",
            do="Choose one that smk-mantik runs list shows",
        )
    elif not one.gone:
        how, do = (
            ("its controller runs", f"Follow it: smk-mantik runs logs -f {one.request.run_id}")
            if one.alive
            else ("it is over", f"Submit it again: smk-mantik runs rerun {one.request.run_id}")
        )
        where = f"run {one.request.run_id}"
        raise UserError(f"there is nothing to continue: {how}", where=where, do=do)
    else:
        gone = [one]
    for each in gone:
        how = "continues" if controller.start_controller(each) else "its controller runs already"
        typer.echo(f"Run {each.request.run_id}: {how}.")
    if not gone:
        typer.echo("No run to continue.")


@runs_app.command()
def delete(
    run: _Run,
    *,
    yes: Yes = False,
    keep_site: Annotated[
        bool, typer.Option("--keep-site", help="Leave the workspace at the site as it is.")
    ] = False,
) -> None:
    """Delete a run that has ended: in MLflow, its directory, and its workspace at the site."""
    from ..runs.store import ENDED

    found = _with_mlflow(run)
    here = found.here
    own = here is not None and here.request.run_id == found.run_id
    status = found.run.info.status if found.run is not None else "FINISHED"
    if (own and here is not None and here.end is None) or (not own and status not in ENDED):
        raise UserError(
            "it is not over", where=f"run {found.run_id}",
            do=f"Cancel it first: smk-mantik runs cancel {found.run_id}",
        )  # fmt: skip
    for line in (*_deletion_lines(found, site=not keep_site), *_repeated(found.run_id)):
        typer.echo(one_line(line))
    if not (yes or confirm("Remove all of this?")):
        raise typer.Exit(NOT_DONE)
    if own and here is not None:
        if not keep_site:
            local_runs.clean_run(here, say)
        if found.run is not None:
            found.store.delete(found.run_id)
        local_runs.remove_run(here)
    elif found.run is not None:
        found.store.delete(found.run_id)
    typer.echo(f"Run {found.run_id}: deleted.")


@runs_app.command()
def register(
    run: _Run,
    name: Annotated[
        str, typer.Argument(help="The registered model's name; to --remove, default: all.")
    ] = "",
    *,
    new_version: Annotated[
        bool,
        typer.Option("--new-version", help="Add a version if the name has models of other runs."),
    ] = False,
    model: Annotated[str, typer.Option(help="The model, if the run has logged several.")] = "",
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the run's models from the registry instead.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove versions that have an alias.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Register the model that a finished run has logged."""
    from ..runs import store

    if not name and not remove:
        raise UserError(
            "the registered model has no name", where="smk-mantik runs register",
            do="Add a NAME, or --remove",
        )  # fmt: skip
    if other := [option for option, given in (
        ("--force", force and not remove), ("--model", model and remove),
        ("--new-version", new_version and remove),
    ) if given]:  # fmt: skip
        raise UserError(
            f"{other[0]} does not go {'with' if remove else 'without'} --remove",
            where="smk-mantik runs register",
            do=f"Leave {other[0]} out{'' if remove else ', or add --remove'}",
        )
    found = _in_mlflow(run)
    if remove:
        changed = store.unregister_model(found.store, found.run, name, force=force)
    else:
        logged = (found.store, found.run, name, model)
        changed = [store.register_model(*logged, new_version=new_version)]
    if as_json:
        said = [{"name": v.name, "version": v.number} for v in changed]
        print_json(said if remove else {**said[0], "run_id": found.run_id})
        return
    for version in changed:
        how = "registered as" if version.new else "is registered already as"
        named = f"{'removed from' if remove else how} {version.name}, version {version.number}."
        typer.echo(f"Run {found.run_id}: {named}")


def run_details(found: "FoundRun") -> dict[str, Any]:
    """Return everything that is known about a run, for JSON."""
    from ..runs.listing import finite_metrics, make_local_row, make_row
    from ..runs.store import versions_of_run

    here = found.here
    made: dict[str, Any] = {"run_id": found.run_id, "state": "deleted in MLflow", "note": ""}
    if found.run is not None:
        experiment = found.store.experiment_name(found.run.info.experiment_id)
        made |= asdict(make_row(found.run, experiment, here, found.store))
        made["metrics"] = finite_metrics(found.run.data.metrics)
        made["parameters"] = dict(found.run.data.params)
        made["tags"] = {k: v for k, v in found.run.data.tags.items() if k.startswith("mantik.")}
        with suppress(MantikError):  # a server without a registry
            models, registered = versions_of_run(found.store, found.run)
            made["models"] = models
            made["registered"] = [
                {"name": v.name, "version": v.number, "aliases": list(v.aliases)}
                for v in registered
            ]
    if found.away is not None and here is not None:
        made |= asdict(make_local_row(here))
        made["mlflow"] = str(found.away)
    if here is not None:
        results = here.workdir / RESULTS
        made |= {
            "request": asdict(here.request),
            "directory": str(here.path),
            "results": str(results) if results.is_dir() else "",
            "controller": "there" if here.alive else "gone" if here.gone else "ended",
            "jobs": [
                {
                    "id": ", ".join(t.site_jobs),
                    "queue": t.queue,
                    "segment": t.segment + 1 if t.segments else None,
                    "segments": t.segments or None,
                    "outcome": t.outcome,
                    "waiting_reason": t.hindrance,
                }
                for t in here.attempts
            ],
        }
    return made


def run_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Format the result of `run_details` for people."""
    request: Mapping[str, Any] = found.get("request", {})
    yield f"Run {found['run_id']}"
    shown = {
        "name": found.get("name") or request.get("name", ""),
        "state": f"{found['state']}{_in_brackets(found['note'])}",
        "experiment": found.get("experiment") or request.get("experiment", ""),
        "store": found.get("uri") or request.get("tracking_uri", ""),
        "project": f"{request.get('uri', '')}{_in_brackets(_version(request))}",
        "entry point": found.get("entry_point") or request.get("entry_point", ""),
        "site": found.get("site") or request.get("site", ""),
        "account": request.get("account", ""),
        "backend config": request.get("config_source", ""),
        "again of": request.get("again_of", ""),
        "submitted": _moment(request.get("created") or found.get("started") or 0.0),
        "waited": _duration(found.get("waited")),
        "ran": f"{_duration(found.get('ran'))}{_in_brackets(found.get('times', ''))}",
        "directory": found.get("directory", ""),
        "results": found.get("results", ""),
        "MLflow": found.get("mlflow", ""),
        "models": ", ".join(found.get("models", ())),
        "registered as": ", ".join(
            f"{v['name']}, version {v['version']}{_in_brackets(', '.join(v['aliases']))}"
            for v in found.get("registered", ())
        ),
    }
    jobs = [_job_line(job) for job in found.get("jobs", ())]
    in_turn = any(job["segment"] for job in found.get("jobs", ()))
    if not in_turn:
        shown["job" if len(jobs) == 1 else "jobs"] = "; ".join(jobs)
    yield from (f"  {name}: {value}" for name, value in shown.items() if value)
    if in_turn:
        yield "  jobs:"
        yield from (f"    {job}" for job in jobs)
    given = {**request.get("parameters", {}), **request.get("extra", {})}
    for title, values in (
        ("parameters", found.get("parameters") or given),
        ("metrics", found.get("metrics", {})),
    ):
        if values:
            yield f"  {title}:"
            yield from (f"    {name} = {value}" for name, value in sorted(values.items()))


def _find(run: str) -> "FoundRun":
    from ..runs.listing import find_run, refresh

    return refresh(find_run(run))


def _repeated(run_id: str) -> list[str]:
    return [
        f"schedule {name} repeats it and will fail: change it to another run first"
        f" (smk-mantik schedule edit {name} --run RUN), or remove it"
        for name in repeated_by(data_home(), run_id)
    ]


def _with_mlflow(run: str) -> "FoundRun":
    found = _find(run)
    if found.away is not None:
        raise found.away
    return found


def _in_mlflow(run: str) -> "FoundRun":
    found = _with_mlflow(run)
    if found.run is None:
        raise UserError(
            "it is not in MLflow any more", where=f"run {found.run_id}",
            do="Choose one that smk-mantik runs list shows",
        )  # fmt: skip
    return found


def _pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    wrong = CommandMistakes()
    found = wrong.pairs(option, given or [])
    wrong.end()
    return found


def _told_of(run_id: str, *, wait: bool, as_json: bool) -> None:
    """Tell of a run that was submitted, and with `wait` of its end."""
    run = RunDirectory(runs_home() / run_id)
    if as_json and not wait:
        print_json({"run_id": run_id, "name": run.request.name, "directory": str(run.path)})
    elif not as_json:
        typer.echo(
            one_line(
                f"Run {run_id} ({run.request.name}): submitted to {run.request.site}."
                f" Follow it with smk-mantik runs logs -f {run_id[:8]}"
            )
        )
    if not wait:
        return
    try:
        controller.wait_for_controller(run)
    except KeyboardInterrupt:
        typer.echo("Cancelling it.", err=True)
        local_runs.cancel_run(run, warn)
    found = _find(run_id)
    details = run_details(found)
    if as_json:
        print_json(details)
    else:
        note = f" ({details['note']})" if details["note"] else ""
        typer.echo(one_line(f"Run {run_id}: {details['state']}{note}."))
    if found.here is None or found.here.end is None or found.here.end["exit_code"] != 0:
        raise typer.Exit(NOT_DONE)


def _runs_table(rows: "Sequence[RunRow]") -> Table:
    """Return a table with one row per run."""
    titles = (
        "run", "name", "state", "site", "entry point", "experiment", "submitted", "waited", "ran",
        "metrics", "",
    )  # fmt: skip
    shown = new_table(titles, right=("waited", "ran"))
    for row in rows:
        times = [humanize_duration(t) if t is not None else "" for t in (row.waited, row.ran)]
        add_row(
            shown,
            [
                row.run_id[:_SHORT], row.name, row.state, row.site, row.entry_point, row.experiment,
                _moment(row.started), *times, _metrics(row.metrics), row.note,
            ],
        )  # fmt: skip
    return shown


def _deletion_lines(found: "FoundRun", *, site: bool) -> Iterator[str]:
    """Describe what is deleted with a run, with `site` also its workspace at the site."""
    if found.run is not None:
        info = found.run.info
        yield f"MLflow: run {found.run_id} ({info.run_name}, {info.status}) in {found.store.uri}"
    here = found.here
    if here is not None and here.request.run_id == found.run_id:
        files = [path for path in here.path.rglob("*") if path.is_file()]
        size = humanize_size(sum(path.lstat().st_size for path in files))
        yield f"here: {here.path} ({humanize_count(len(files), 'file')}, {size})"
        if site:
            yield f"at {here.request.site}: its workspace"


def _job_line(job: Mapping[str, Any]) -> str:
    part = f"segment {job['segment']} of {job['segments']}" if job["segment"] else ""
    return ", ".join(word for word in (part, job["id"], job["queue"], job["outcome"]) if word)


def _version(request: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [request.get("version"), request.get("commit", "")[:12]]))


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _duration(seconds: float | None) -> str:
    return humanize_duration(seconds) if seconds is not None else ""


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def _metrics(metrics: Mapping[str, float | str]) -> str:
    some = [
        f"{name}={value if isinstance(value, str) else f'{value:.4g}'}"
        for name, value in sorted(metrics.items())[:_METRICS]
    ]
    more = [f"and {len(metrics) - _METRICS} more"] if len(metrics) > _METRICS else []
    return ", ".join([*some, *more])
