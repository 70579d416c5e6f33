"""`smk-mantik schedule`: submit runs again at scheduled times."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated

import typer

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    UserError,
    json_text,
    one_line,
    printable,
)
from snakemake_executor_plugin_mantik.common.state_directory import data_home
from snakemake_executor_plugin_mantik.schedule import planning
from snakemake_executor_plugin_mantik.schedule.display import (
    describe_outcome,
    describe_time,
    firing_as_json,
    schedule_as_json,
)
from snakemake_executor_plugin_mantik.schedule.planning import FOR_EVER, ScheduleRequest
from snakemake_executor_plugin_mantik.schedule.schedules import MissedPolicy, Schedule
from snakemake_executor_plugin_mantik.schedule.store import ScheduleStore
from snakemake_executor_plugin_mantik.schedule.submit import (
    FIRING_S,
    Processes,
    claim_due,
    forget_lock,
    format_moment,
    is_present,
    mark_present,
)
from snakemake_executor_plugin_mantik.schedule.submit import submit_firing as submit
from snakemake_executor_plugin_mantik.schedule.unit import SERVICE
from snakemake_executor_plugin_mantik.schedule.unit import systemd_unit as unit_file

from . import tables
from .apps import App

schedule_app = App(
    name="schedule",
    help="Submit a run of `smk-mantik runs` again and again, at scheduled times.",
    no_args_is_help=True,
)

_Name = Annotated[str, typer.Argument(help="The schedule's name.")]
_OfRun = typer.Option(help="The run to submit again: id or name.")
_Line = typer.Option(help="Minute, hour, day, month, day of the week, as in a crontab.")
_Zone = Annotated[
    str | None, typer.Option(help="Time zone, such as Europe/Berlin; default: this machine's.")
]
_Until = Annotated[
    str | None,
    typer.Option(metavar="DAY", help=f"Last day, such as 2027-03-31; default: {FOR_EVER}."),
]
_Account = Annotated[
    str | None, typer.Option(help="The compute budget account; default: the run's.")
]
_Site = Annotated[
    str | None,
    typer.Option(
        metavar="[NAME=]FILE",
        help="Another backend config, read at each due time; '': the run's (the default).",
    ),
]
_OfMissed = Annotated[
    MissedPolicy | None,
    typer.Option(help="Runs that were due while no scheduler ran: skip them, or run once."),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _store() -> Iterator[ScheduleStore]:
    store = ScheduleStore(data_home())
    try:
        yield store
    finally:
        store.close()


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
    from snakemake_executor_plugin_mantik.runs.local_runs import find_local_run

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
    tz: _Zone = None,
    until: _Until = None,
    site: _Site = None,
    account: _Account = None,
    missed: _OfMissed = None,
    as_json: _AsJson = False,
) -> None:
    """Add a schedule that submits a run again at the times of a crontab line."""
    with _store() as store:
        if store.get(name) is not None:
            raise _taken(name)
        wish = ScheduleRequest(run, cron, tz, until, account, missed, site)
        made = planning.make_schedule(name, wish, planning.utc_now(), _run_id)
        if not store.add(made):
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
    tz: _Zone = None,
    until: _Until = None,
    site: _Site = None,
    account: _Account = None,
    missed: _OfMissed = None,
    as_json: _AsJson = False,
) -> None:
    """Change a schedule; a running scheduler applies the change."""
    wish = ScheduleRequest(run, cron, tz, until, account, missed, site)
    if wish == ScheduleRequest():
        raise UserError("there is nothing to change", do="Add at least one option; see --help")
    with _store() as store:
        if not store.edit(
            planning.edit_schedule(_the(store, name), wish, planning.utc_now(), _run_id)
        ):
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
        _print_json(schedule_as_json(store, schedule, planning.utc_now()))
        return
    due = next(schedule.due(planning.utc_now()), None)
    when = f"next due {format_moment(due)}" if due else "not due any more"
    typer.echo(printable(f"{schedule.name}: run {schedule.run}, {when}."))
    _hint(store)


def _hint(store: ScheduleStore) -> None:
    if not is_present(store.path.parent):
        typer.echo(
            "No scheduler is running: start one with smk-mantik schedule run, or with systemd"
            " (smk-mantik schedule unit)."
        )


def _next(schedule: Schedule) -> str:
    due = next(schedule.due(planning.utc_now()), None)
    return format_moment(due) if due else "not due any more"


# Looking


@schedule_app.command("list")
def list_schedules(as_json: _AsJson = False) -> None:
    """Show all schedules with their next due time and last outcome."""
    with _store() as store:
        schedules = store.all()
        if as_json:
            _print_json(
                [schedule_as_json(store, schedule, planning.utc_now()) for schedule in schedules]
            )
            return
        if not schedules:
            typer.echo("There are no schedules. Add one: smk-mantik schedule add")
            return
        rows = tables.new_table(["name", "run", "cron", "time zone", "until", "next", "last"])
        for schedule in schedules:
            last = store.history(schedule.id, 1)
            tables.add_row(rows, [ schedule.name, schedule.run[:8], schedule.cron, schedule.tz,
                str(schedule.until or ""), _next(schedule),
                *(f"{describe_time(schedule, firing)}: {describe_outcome(store, schedule, firing)}"
                  for firing in last),
            ])  # fmt: skip
        tables.make_console().print(rows)
        _hint(store)


@schedule_app.command("show")
def show_schedule(name: _Name, as_json: _AsJson = False) -> None:
    """Show a schedule and the outcomes of its due times."""
    with _store() as store:
        schedule = _the(store, name)
        history = store.history(schedule.id)
        if as_json:
            each = [firing_as_json(schedule, firing) for firing in history]
            _print_json(schedule_as_json(store, schedule, planning.utc_now()) | {"history": each})
            return
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
        if history:
            typer.echo()
            rows = tables.new_table(["due", "outcome"])
            for firing in history:
                tables.add_row(
                    rows,
                    [describe_time(schedule, firing), describe_outcome(store, schedule, firing)],
                )
            tables.make_console().print(rows)
        _hint(store)


@schedule_app.command("next")
def next_times(
    name: Annotated[str, typer.Argument(help="The schedule's name; default: all.")] = "",
    number: Annotated[int, typer.Option("-n", min=1, max=1000, help="Number of times.")] = 5,
    as_json: _AsJson = False,
) -> None:
    """Show when schedules are due next."""
    with _store() as store:
        schedules = [_the(store, name)] if name else store.all()
    now = planning.utc_now()
    found = [(due, s) for s in schedules for due in islice(s.due(now), number)]
    found = sorted(found, key=lambda each: each[0])[:number]
    if as_json:
        _print_json([{"name": s.name, "due": due.isoformat()} for due, s in found])
        return
    rows = tables.new_table(["due", "schedule", "time zone"])
    for due, schedule in found:
        tables.add_row(rows, [format_moment(due), schedule.name, schedule.tz])
    tables.make_console().print(rows)


# Running


@schedule_app.command("run")
def run_scheduler(
    once: Annotated[bool, typer.Option("--once", help="Submit what is due now, and exit.")] = False,
) -> None:
    """Submit runs when they are due, until Ctrl-C. Several schedulers submit each run once."""
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
    from snakemake_executor_plugin_mantik.runs import rerun
    from snakemake_executor_plugin_mantik.tracking.worker.process import SETTINGS

    for name, value in {**SETTINGS, "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)
    with _store() as store:
        if line := submit(store, firing, rerun, time.time):
            typer.echo(printable(line))


@schedule_app.command()
def unit() -> None:
    """Print a unit file for the user's systemd to start the scheduler."""
    typer.echo(unit_file(os.environ), nl=False)
    typer.echo(
        f"To use it, write this to ~/.config/systemd/user/{SERVICE}, then:\n"
        f"  systemctl --user enable --now {SERVICE}\n"
        "  loginctl enable-linger        # keeps it running while you are logged out",
        err=True,
    )


# Printing


def _print_json(value: object) -> None:
    typer.echo(json_text(value))
