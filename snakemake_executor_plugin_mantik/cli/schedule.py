"""`smk-mantik schedule`: submit runs again at scheduled times."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

import jinja2
import typer

from ..common.errors import MantikError, UserError, one_line
from ..common.state_directory import data_home
from ..runs.controller import run_status
from ..runs.directories import RunDirectory, runs_home
from ..runs.local_runs import find_local_run
from ..runs.schedule_store import ScheduleStore
from ..runs.scheduler import (
    FIRING_S,
    Processes,
    claim_due,
    forget_lock,
    is_present,
    is_under_way,
    mark_present,
    submit_firing,
)
from ..runs.schedules import (
    FOR_EVER,
    Firing,
    FiringState,
    MissedPolicy,
    Schedule,
    ScheduleRequest,
    edit_schedule,
    format_moment,
    make_schedule,
)
from .shared import App, AsJson, print_json, print_table, require_mlflow, say

schedule_app = App(
    name="schedule",
    help="Submit a run of `smk-mantik runs` again and again, at scheduled times.",
    no_args_is_help=True,
)

_OVER: Final = "not due any more"
_Name = Annotated[str, typer.Argument(help="The schedule's name.")]
_OfRun = typer.Option(help="The run to submit again: id or name.")
_Line = typer.Option(help="Minute, hour, day, month, day of the week, as in a crontab.")


@dataclass(frozen=True)
class _Options:
    """What a schedule has beside its run and its crontab line; see `ScheduleRequest`."""

    tz: Annotated[
        str | None, typer.Option(help="Time zone, such as Europe/Berlin; default: this machine's.")
    ] = None
    until: Annotated[
        str | None,
        typer.Option(metavar="DAY", help=f"Last day, such as 2027-03-31; default: {FOR_EVER}."),
    ] = None
    site: Annotated[
        str | None,
        typer.Option(
            metavar="[NAME=]FILE",
            help="Another backend config, read at each due time; '': the run's (the default).",
        ),
    ] = None
    account: Annotated[
        str | None, typer.Option(help="The compute budget account; default: the run's.")
    ] = None
    missed: Annotated[
        MissedPolicy | None,
        typer.Option(help="Runs that were due while no scheduler ran: skip them, or run once."),
    ] = None


def _store() -> "closing[ScheduleStore]":
    return closing(ScheduleStore(data_home()))


def _the(store: ScheduleStore, name: str) -> Schedule:
    found = store.get(name)
    if found is None:
        names = ", ".join(schedule.name for schedule in store.all())
        raise UserError(
            f"there is no schedule {name!r}",
            do=f"Use one of {names}" if names else "Add it: smk-mantik schedule add",
        )
    return found


def _run_id(word: str) -> str:
    found = find_local_run(word)
    if found is None:
        raise UserError(
            f"--run: no run {word!r} was submitted from here",
            do="Use one that smk-mantik runs list shows, or submit one: smk-mantik runs submit",
        )
    return found.request.run_id


# Making and changing


@schedule_app.command()
def add(
    name: _Name,
    *,
    run: Annotated[str, _OfRun],
    cron: Annotated[str, _Line],
    options: _Options,
    as_json: AsJson = False,
) -> None:
    """Add a schedule that submits a run again at the times of a crontab line."""
    with _store() as store:
        if store.get(name) is not None:
            raise _taken(name)
        wish = ScheduleRequest(run, cron, **asdict(options))
        if not store.add(make_schedule(name, wish, datetime.now(UTC), _run_id)):
            raise _taken(name)
        _notify(store, _the(store, name), as_json=as_json)


def _taken(name: str) -> UserError:
    return UserError(
        f"there is a schedule {name!r} already",
        do="Use another name, or change that one: smk-mantik schedule edit",
    )


@schedule_app.command()
def edit(
    name: _Name,
    *,
    run: Annotated[str | None, _OfRun] = None,
    cron: Annotated[str | None, _Line] = None,
    options: _Options = _Options(),
    as_json: AsJson = False,
) -> None:
    """Change a schedule; a running scheduler applies the change."""
    wish = ScheduleRequest(run, cron, **asdict(options))
    if wish == ScheduleRequest():
        raise UserError("there is nothing to change", do="Add at least one option; see --help")
    with _store() as store:
        if not store.edit(edit_schedule(_the(store, name), wish, datetime.now(UTC), _run_id)):
            raise UserError("another command has just changed it", where=name, do="Try again")
        _notify(store, _the(store, name), as_json=as_json)


@schedule_app.command()
def remove(name: _Name) -> None:
    """Remove a schedule and keep its runs."""
    with _store() as store:
        schedule = _the(store, name)
        under_way = any(firing.begun for firing in store.history(schedule.id))
        store.remove(schedule.id)
        forget_lock(store.path.parent, schedule.id)
    typer.echo(f"{name} is removed.")
    if under_way:
        typer.echo("It was submitting a run, which may have started: see smk-mantik runs list")


def _notify(store: ScheduleStore, schedule: Schedule, *, as_json: bool) -> None:
    if as_json:
        print_json(_schedule_as_json(store, schedule))
        return
    when = _next(schedule)
    due = when if when == _OVER else f"next due {when}"
    say(f"{schedule.name}: run {schedule.run}, {due}.")
    _hint(store)


def _hint(store: ScheduleStore) -> None:
    if not is_present(store.path.parent):
        typer.echo(
            "No scheduler is running: start one with smk-mantik schedule run, or with systemd"
            " (smk-mantik schedule run --unit)."
        )


# Looking


@schedule_app.command("list")
def list_schedules(
    name: Annotated[
        str, typer.Argument(help="Show this schedule, and the outcomes of its due times.")
    ] = "",
    *,
    number: Annotated[
        int | None,
        typer.Option(
            "--next", "-n", min=1, max=1000, help="Show so many of the next due times instead."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show all schedules with their next due time and last outcome, or one of them."""
    with _store() as store:
        schedules = [_the(store, name)] if name else store.all()
        if number is not None:
            _show_next(schedules, number, as_json=as_json)
        elif as_json:
            found = [_schedule_as_json(store, schedule) for schedule in schedules]
            if name:
                found[0]["history"] = [
                    _firing_as_json(schedules[0], each) for each in store.history(schedules[0].id)
                ]
            print_json(found[0] if name else found)
        elif not schedules:
            typer.echo("There are no schedules. Add one: smk-mantik schedule add")
        else:
            if name:
                _show(store, schedules[0])
            else:
                titles = ["name", "run", "cron", "time zone", "until", "next", "last"]
                print_table(titles, (_row(store, schedule) for schedule in schedules))
            _hint(store)


def _row(store: ScheduleStore, schedule: Schedule) -> Iterator[str]:
    yield from (schedule.name, schedule.run[:8], schedule.cron, schedule.tz)
    yield from (str(schedule.until or ""), _next(schedule))
    for last in store.history(schedule.id, 1):
        yield f"{_moment(schedule, last.due)}: {_outcome(store, schedule, last)}"


def _show(store: ScheduleStore, schedule: Schedule) -> None:
    facts = {
        "run": schedule.run,
        "cron": f"{schedule.cron}  ({schedule.tz})",
        "until": str(schedule.until or FOR_EVER),
        "site": schedule.site or "the run's",
        "account": schedule.account or "the run's",
        "missed": schedule.missed.value,
        "next": _next(schedule),
    }
    for key, value in facts.items():
        typer.echo(one_line(f"{key + ':':10}{value}"))
    if history := store.history(schedule.id):
        typer.echo()
        rows = ((_moment(schedule, f.due), _outcome(store, schedule, f)) for f in history)
        print_table(["due", "outcome"], rows)


def _show_next(schedules: Sequence[Schedule], number: int, *, as_json: bool) -> None:
    now = datetime.now(UTC)
    found = sorted((due, s.name, s.tz) for s in schedules for due in islice(s.due(now), number))
    found = found[:number]
    if as_json:
        print_json([{"name": name, "due": due.isoformat()} for due, name, _ in found])
        return
    rows = ((format_moment(due), name, zone) for due, name, zone in found)
    print_table(["due", "schedule", "time zone"], rows)


# Running


@schedule_app.command("run")
def run_scheduler(
    once: Annotated[bool, typer.Option("--once", help="Submit what is due now, and exit.")] = False,
    unit: Annotated[
        bool,
        typer.Option("--unit", help="Print a unit file for the user's systemd to do so instead."),
    ] = False,
) -> None:
    """Submit runs when they are due, until Ctrl-C. Several schedulers submit each run once."""
    if unit:
        typer.echo(systemd_unit(os.environ), nl=False)
        typer.echo(
            f"To use it, write this to ~/.config/systemd/user/{_SERVICE}, then:\n"
            f"  systemctl --user enable --now {_SERVICE}\n"
            "  loginctl enable-linger        # keeps it running while you are logged out",
            err=True,
        )
        return
    stop = threading.Event()
    with _store() as store, mark_present(store.path.parent):
        processes = Processes()
        if once:
            _look(store, processes)
            processes.wait()
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        schedules = len(store.all())
        typer.echo(f"Schedules: {schedules}. Later changes apply, too. Press Ctrl-C to stop.")
        while not stop.wait(_look(store, processes)):
            processes.reap()


def _look(store: ScheduleStore, processes: Processes) -> float:
    """Submit due runs and return the seconds to wait.

    That is a minute if the store cannot be used now (disk full, file system missing).
    """
    try:
        return claim_due(store, processes.submit, time.time)
    except UserError:
        raise
    except (MantikError, OSError) as error:
        typer.echo(f"smk-mantik: {error}", err=True)
        return 60.0


@schedule_app.command(hidden=True)
def fire(firing: int) -> None:
    """Submit a due time that a scheduler has claimed."""
    signal.alarm(FIRING_S)  # kills this process if it takes longer
    from ..runs import rerun

    require_mlflow()
    with _store() as store:
        if line := submit_firing(store, firing, rerun, time.time):
            say(line)


# Describing


def _moment(schedule: Schedule, seconds: float) -> str:
    return format_moment(datetime.fromtimestamp(seconds, ZoneInfo(schedule.tz)))


def _next(schedule: Schedule) -> str:
    due = next(schedule.due(datetime.now(UTC)), None)
    return format_moment(due) if due else _OVER


def _outcome(store: ScheduleStore, schedule: Schedule, firing: Firing) -> str:
    if firing.state is FiringState.FIRING:
        return _pending(store, schedule, firing)
    return {
        FiringState.FIRED: f"run {firing.run} ({_run_state(firing.run)})",
        FiringState.MISSED: f"missed: {firing.told}",
        FiringState.FAILED: f"not submitted, given up: {firing.told}",
    }[firing.state]


def _run_state(run_id: str) -> str:
    """Return the state of a run from its directory alone, without a request to MLflow."""
    run = RunDirectory(runs_home() / run_id)
    if not run.request_file.exists():
        return "not here any more"
    if run.gone:
        return "its controller is gone: smk-mantik runs continue"
    return "under way" if run.end is None else run_status(run)


def _pending(store: ScheduleStore, schedule: Schedule, firing: Firing) -> str:
    if is_under_way(store.path.parent, schedule.id):
        return "is being submitted"
    again = _moment(schedule, firing.retry)
    if firing.begun:
        return f"its submission was interrupted, and continues after {again}"
    if not firing.attempts:
        return "about to be submitted"
    return f"not submitted yet, again after {again}: {firing.told}"


def _schedule_as_json(store: ScheduleStore, schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as JSON, with its last claimed due time and the outcome."""
    due = next(schedule.due(datetime.now(UTC)), None)
    last = store.history(schedule.id, 1)
    return {
        "name": schedule.name,
        "run": schedule.run,
        "cron": schedule.cron,
        "tz": schedule.tz,
        "until": schedule.until.isoformat() if schedule.until else None,
        "site": schedule.site or None,
        "account": schedule.account or None,
        "missed": schedule.missed,
        "next": due.isoformat() if due else None,
        "last": _firing_as_json(schedule, last[0]) if last else None,
    }


def _firing_as_json(schedule: Schedule, firing: Firing) -> dict[str, Any]:
    zone = ZoneInfo(schedule.tz)
    waits = firing.state is FiringState.FIRING
    return {
        "due": datetime.fromtimestamp(firing.due, zone).isoformat(),
        "state": firing.state,
        "run": firing.run or None,
        "run_state": _run_state(firing.run) if firing.run else None,
        "attempts": firing.attempts,
        "reason": firing.told or None,
        "retry": datetime.fromtimestamp(firing.retry, zone).isoformat() if waits else None,
    }


_SERVICE: Final = "mantik-schedule.service"
_ROOM: Final = "snakemake_executor_plugin_mantik.runs"
_SET: Final = ("XDG_DATA_HOME", "MANTIK_RUNS", "MLFLOW_TRACKING_URI")
"""Variables that locate data and servers. Credentials are not written into a unit."""


def systemd_unit(environ: Mapping[str, str]) -> str:
    """Return a unit file for the user's systemd, with the paths and servers in `environ`."""
    from ..tracking.run import tracking_target

    where = {name: environ[name] for name in _SET if environ.get(name)}
    if "MLFLOW_TRACKING_URI" in where:
        where["MLFLOW_TRACKING_URI"] = tracking_target(environ, Path.cwd()).uri
    words = [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "schedule", "run"]
    template = (files(_ROOM) / f"{_SERVICE}.j2").read_text(encoding="utf-8")
    filled: str = jinja2.Template(template, keep_trailing_newline=True).render(
        command=" ".join(systemd_quote(word).replace("$", "$$") for word in words),
        environment=[systemd_quote(f"{name}={value}") for name, value in where.items()],
        path=systemd_quote(f"PATH={environ.get('PATH', os.defpath)}"),
    )
    return filled


def systemd_quote(word: str) -> str:
    """Quote a word for systemd (systemd.syntax(7)), where % begins a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
