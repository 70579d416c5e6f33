"""Submit runs: check everything, create the run in MLflow, start its controller.

A submission prepares a directory of its own, and its process holds a lock in it. The directory is
renamed once the run exists in MLflow. Before the submission creates the run, it writes the request
there, with a tag that only this submission's run has. So the directory of a dead process identifies
the run, if any, that no process will continue, and `remove_aborted` ends it.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import (
    ConfigError,
    MantikError,
    Mistake,
    UserError,
)
from snakemake_executor_plugin_mantik.common.locks import take_lock
from snakemake_executor_plugin_mantik.common.state_directory import open_private
from snakemake_executor_plugin_mantik.config.reading import read_configs
from snakemake_executor_plugin_mantik.connections.connect import find_site_credentials
from snakemake_executor_plugin_mantik.jobs.resources import is_single_word
from snakemake_executor_plugin_mantik.mlproject.command_line import UNCHANGED, ContinueOptions
from snakemake_executor_plugin_mantik.mlproject.entry import EntryPoint
from snakemake_executor_plugin_mantik.mlproject.project import load
from snakemake_executor_plugin_mantik.sites.credentials import find_account
from snakemake_executor_plugin_mantik.tracking.run import user_name

from . import controller
from .directories import (
    CONFIGS,
    NEW_PREFIX,
    RUNS_VARIABLE,
    ChosenConfig,
    RunDirectory,
    RunRequest,
    make_runs_home,
    runs_home,
)
from .projects import TakenProject, missing_values, project_values, retake_project, take_project
from .store import KEY, SITE, SUBMISSION, NewRun, RunStore, quote_filter, store_exists, tracking_uri

NEVER: Final = "it was never submitted"
_STALE_S: Final = 86400.0
"""Seconds after which a directory is removed that has no lock file yet."""
ARRIVES_S: Final = 300.0
"""Seconds after which a server has created a requested run, or never will."""
GIVE_UP_S: Final = 30 * 86400.0
"""Seconds after which a directory is removed although MLflow never answered."""


@contextmanager
def mark_unfinished(stage: RunDirectory) -> Iterator[None]:
    """Mark a directory as being submitted from, by a lock on its file `making`.

    Raises:
        OSError: the lock file cannot be opened, or the file system has no locks.
    """
    with open_private(stage.making, "ab") as lock:
        take_lock(lock)
        yield


def submission_tag(stage: RunDirectory) -> dict[str, str]:
    """Return the tag that identifies the run of a submission."""
    return {SUBMISSION: stage.path.name.removeprefix(NEW_PREFIX)}


def end_aborted(store: RunStore, stage: RunDirectory) -> None:
    """End the MLflow run of a submission, if one exists that has no run directory.

    Raises:
        MantikError: a request to MLflow fails.
    """
    for tag, value in submission_tag(stage).items():
        for run in store.search(f"tags.`{tag}` = {quote_filter(value)}"):
            run_id = str(run.info.run_id)
            if not RunDirectory(runs_home() / run_id).request_file.exists():
                store.end(run_id, "KILLED", NEVER)


def remove_aborted() -> dict[str, MantikError]:
    """End the runs whose submission was killed, and remove their directories.

    Returns:
        By store, why it failed. The directories of its runs stay for the next call, up to
        `GIVE_UP_S`.
    """
    failed: dict[str, MantikError] = {}
    for path in runs_home().glob(f"{NEW_PREFIX}*"):
        try:
            _clear(path, failed)
        except OSError:  # just renamed or removed, or another user's
            continue
    return failed


def _clear(path: Path, failed: dict[str, MantikError]) -> None:
    """Clear up one directory; add a store that does not answer to `failed`, and skip it then."""
    stage, age = RunDirectory(path), time.time() - path.stat().st_mtime
    if not stage.making.exists():
        if age > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
        return
    with stage.making.open("rb") as lock:
        if not take_lock(lock):
            return
        uri = _store(stage)
        if uri and not _ended(uri, stage, failed) and age < GIVE_UP_S:
            return
        if not uri or age > ARRIVES_S:
            shutil.rmtree(path, ignore_errors=True)


def _ended(uri: str, stage: RunDirectory, failed: dict[str, MantikError]) -> bool:
    """Make sure that no run of a submission is open at a store; return whether that succeeded."""
    if uri in failed or not store_exists(uri):
        return False
    try:
        end_aborted(RunStore(uri), stage)
    except MantikError as error:
        failed[uri] = error
        return False
    return True


def _store(stage: RunDirectory) -> str:
    """Return the store that the run was requested from; empty: none that is known."""
    try:
        return stage.request.tracking_uri
    except MantikError:
        return ""


@dataclass(frozen=True)
class SubmitRequest:
    """The arguments of a submission.

    Attributes:
        uri: the project: a folder or a git URL, with `#sub` for a folder in it.
        chosen: the backend config.
        version: a branch, tag or commit.
        experiment, experiment_id: of the run; if both are empty, from MLflow's variables.
        name: the run's name; empty: MLflow makes one up.
        account: the compute budget account; empty: the environment's.
        tags: further tags of the run.
        tracking_uri: the MLflow store; empty: the environment's.
        going_on: how the job goes on past its walltime.
    """

    uri: str
    chosen: ChosenConfig
    entry_point: str = "main"
    version: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    experiment: str = ""
    experiment_id: str = ""
    name: str = ""
    account: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    tracking_uri: str = ""
    going_on: ContinueOptions = UNCHANGED


def submit_run(asked: SubmitRequest) -> str:
    """Submit a run and return its MLflow id. Needs mlflow.

    Raises:
        UserError: with all mistakes found; nothing was submitted.
        MantikError: a request to MLflow fails; or the controller cannot be started, but the run
            exists.
    """
    with _staging() as stage:
        taken = take_project(asked.uri, asked.version, asked.chosen.config, stage)
        config = _written(stage, asked.chosen)
        parameters, extra = dict(asked.parameters), dict(asked.chosen.extra)
        point = _entry(taken.folder, asked.entry_point)
        if point is not None and point.script:  # it declares no parameters and accepts any
            parameters, extra = {}, {**parameters, **extra}
        values = project_values(taken, parameters, _paths(point))
        account = asked.account or find_account(asked.chosen.site, os.environ) or ""
        request = RunRequest(
            uri=taken.uri, version=taken.version,
            commit=taken.tags.get("mlflow.source.git.commit", ""),
            folder=str(taken.folder.relative_to(stage.path)),
            entry_point=asked.entry_point, parameters=parameters, values=values, extra=extra,
            site=asked.chosen.site, config=str(config.relative_to(stage.path)),
            config_source=asked.chosen.source, account=account,
            tracking_uri=asked.tracking_uri or tracking_uri(os.environ),
            experiment_id=asked.experiment_id or _default("ID", asked.experiment),
            experiment=asked.experiment or _default("NAME", asked.experiment_id),
            name=asked.name, created=time.time(), tags={**taken.tags, **asked.tags},
            segments=asked.going_on.segments, checkpoint=asked.going_on.checkpoint,
        )  # fmt: skip
        return _submitted(stage, request, point, missing_values(taken, values, _paths(point)))


def resubmit_run(
    run_id: str,
    *,
    parameters: Mapping[str, str] | None = None,
    site: ChosenConfig | None = None,
    extra: Mapping[str, str] | None = None,
    account: str = "",
    experiment: str = "",
    name: str = "",
    tags: Mapping[str, str] | None = None,
    key: str = "",
    going_on: ContinueOptions = UNCHANGED,
) -> str:
    """Submit a run again, as it was or with changes (see `runs.rerun`).

    Args:
        run_id: the MLflow id of a run whose directory is on this machine.
        parameters: new values of declared parameters; an undeclared one is a mistake, unless the
            entry point is a script, which accepts any.
        site: another backend config.
        extra: new values of undeclared parameters.
        account: another account; empty: the same, or for another site the environment's.
        experiment: another experiment, by its name; empty: the same.
        name: another name; empty: the same.
        tags: further tags.
        key: as in `runs.rerun`.
        going_on: another way to go on past its walltime; what is not set stays.

    Raises:
        UserError: no such run is on this machine, or with all mistakes found.
        MantikError: the run's request cannot be read, or a request to MLflow fails; or the
            controller cannot be started, but the new run exists.
    """
    old = RunDirectory(runs_home() / run_id)
    if not old.request_file.exists():
        raise UserError(
            f"it was deleted, or not submitted from here: there is no {old.path}",
            where=f"run {run_id}",
            do="Submit its project again: smk-mantik runs submit",
        )
    before = old.request
    if key and (found := _of_key(before.tracking_uri, key)):
        return found
    with _staging() as stage:
        folder = retake_project(old.path / before.folder, stage)
        if site is None:
            with _writing(stage):
                shutil.copytree(old.path / CONFIGS, stage.path / CONFIGS)
            config = stage.path / before.config
        else:
            config = _written(stage, site)
        point = _entry(folder, before.entry_point)
        changed = dict(parameters or {})
        taken = TakenProject(before.uri, folder, None, before.version)
        scripted = point is not None and point.script
        values = {} if scripted else project_values(taken, changed, _paths(point))
        if not account:
            account = before.account
            if site is not None and site.site != before.site:
                account = find_account(site.site, os.environ) or ""
        request = replace(
            before,
            folder=str(folder.relative_to(stage.path)),
            parameters={**before.parameters, **({} if scripted else changed)},
            values={**before.values, **values},
            extra={**before.extra, **(changed if scripted else {}), **(extra or {})},
            site=before.site if site is None else site.site,
            config=str(config.relative_to(stage.path)),
            config_source=before.config_source if site is None else site.source,
            account=account,
            experiment=experiment or before.experiment,
            experiment_id="" if experiment else before.experiment_id,
            name=name or before.name,
            tags={**_kept(before.tags), **(tags or {}), **({KEY: key} if key else {})},
            created=time.time(), again_of=run_id, run_id="",
            segments=before.segments if going_on.segments is None else going_on.segments,
            checkpoint=going_on.checkpoint or before.checkpoint,
        )  # fmt: skip
        return _submitted(stage, request, point, missing_values(taken, values, _paths(point)))


@contextmanager
def _staging() -> Iterator[RunDirectory]:
    """Create the directory of a submission; remove it at the end unless it has become a run's."""
    runs = make_runs_home()
    stage = RunDirectory(runs / f"{NEW_PREFIX}{uuid.uuid4().hex}")
    with ExitStack() as held:
        with _writing(stage):
            stage.path.mkdir(mode=0o700)
            held.enter_context(mark_unfinished(stage))
        try:
            yield stage
        finally:
            shutil.rmtree(stage.path, ignore_errors=True)  # unless it has become a run


def _written(stage: RunDirectory, chosen: ChosenConfig) -> Path:
    config = stage.config(chosen.site, chosen.suffix)
    with _writing(stage):
        config.parent.mkdir(exist_ok=True)
        config.write_bytes(chosen.content)
    return config


@contextmanager
def _writing(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run directory cannot be created ({error.strerror or error})",
            where=str(directory.path),
            do=f"Free space there, or set {RUNS_VARIABLE} to another directory for runs",
        ) from None


def _entry(folder: Path, name: str) -> EntryPoint | None:
    """Return an entry point; None for a mistake, which is reported with all others."""
    try:
        return load(folder, warn=False).entry(name)
    except MantikError:
        return None


def _paths(point: EntryPoint | None) -> set[str]:
    return {p.name for p in point.parameters.values() if p.type == "path"} if point else set()


def _account(name: str) -> Iterator[Mistake]:
    if name and not is_single_word(name):
        may_not = "may hold no blanks, quotes, backslashes, # or control characters"
        yield Mistake("--account", "", f"{may_not}, found {name!r}")


def _default(what: str, given: str) -> str:
    """Return an MLflow variable's value for the experiment, unless one was given."""
    return "" if given else os.environ.get(f"MLFLOW_EXPERIMENT_{what}", "")


def _kept(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a run that describe its project; other tags were for that run alone."""
    return {n: v for n, v in tags.items() if n.startswith(("mlflow.source.", "mantik.git."))}


def _of_key(uri: str, key: str) -> str:
    """Return the run of an earlier call with this key; empty if there is none.

    Start its controller if that is gone; end runs of this key that have no directory here.
    """
    store = RunStore(uri)
    for run_id in (
        str(run.info.run_id) for run in store.search(f"tags.`{KEY}` = {quote_filter(key)}")
    ):
        directory = RunDirectory(runs_home() / run_id)
        if directory.request_file.exists():
            if directory.gone:
                controller.start_controller(directory)
            return run_id
        store.end(run_id, "KILLED", NEVER)
    return ""


def _submitted(
    stage: RunDirectory, request: RunRequest, point: EntryPoint | None, gone: Mapping[str, Mistake]
) -> str:
    there = {name: "/" if name in gone else value for name, value in request.values.items()}
    wrong = [*gone.values(), *_account(request.account)]
    try:
        _check(stage, replace(request, values=there))
    except UserError as error:
        if wrong:
            raise _ToldError(f"{ConfigError(wrong)}\n{error}") from None
        raise
    if wrong:
        raise ConfigError(wrong)
    store = RunStore(request.tracking_uri)
    assert point is not None
    defaults = {p.name: p.default for p in point.parameters.values() if p.default is not None}
    params = {**defaults, **request.parameters, **request.extra}
    # The tag finds the run if MLflow creates it but its answer gets lost.
    request = replace(request, tags={**request.tags, **submission_tag(stage)})
    try:
        with delay_signals():
            # If this process is killed, `remove_aborted` finds the run by this request.
            with _writing(stage):
                stage.write_request(request)
            made = store.make(
                request.experiment, request.experiment_id, request.name, _tags(request, stage),
                params,
            )  # fmt: skip
        directory = RunDirectory(runs_home() / made.run_id)
        _become(stage, directory, request, made)
        controller.start_controller(directory)
    except BaseException:
        with suppress(MantikError):  # or it would hide the original error
            end_aborted(store, stage)
        raise
    return made.run_id


def _become(
    stage: RunDirectory, directory: RunDirectory, request: RunRequest, made: NewRun
) -> None:
    complete = replace(
        request, run_id=made.run_id, name=made.name, experiment_id=made.experiment_id,
        experiment=made.experiment,
    )  # fmt: skip
    with _writing(directory):
        stage.write_request(complete)
        stage.path.rename(directory.path)


def _tags(request: RunRequest, stage: RunDirectory) -> dict[str, str]:
    project = load(stage.path / request.folder, warn=False)
    found = {
        "mlflow.user": user_name(),
        "mlflow.source.name": request.uri,
        "mlflow.source.type": "PROJECT",
        "mlflow.project.entryPoint": request.entry_point,
        "mlflow.project.backend": "mantik",
        "mantik.project": project.name,
        SITE: request.site,
        "mantik.account": request.account,
        "mantik.again_of": request.again_of,
        **request.tags,
    }
    return {name: value for name, value in found.items() if value}


def _check(stage: RunDirectory, request: RunRequest) -> None:
    """Check whether the run can be submitted, as far as this machine can know.

    A process of its own runs the check, since paths are relative to the snapshot.

    Raises:
        UserError: with all mistakes found.
    """
    workdir = stage.path / request.folder
    site = f"{request.site}={stage.path / request.config}"
    words = [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "run", "."]
    words += ["--entry-point", request.entry_point, "--site", site, "--check"]
    words += request.going_on.words
    for option, pairs in (("-P", request.values), ("--extra", request.extra)):
        words += [word for name, value in pairs.items() for word in (option, f"{name}={value}")]
    ended = subprocess.run(
        words, cwd=workdir, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        # The output names the copies of the project and the config: name the originals.
        config = str(stage.path / request.config)
        output = ended.stderr.replace(config, request.config_source or "backend config")
        output = output.replace(str(workdir), request.uri)
        raise _ToldError(output.removeprefix("smk-mantik: ").strip())
    configs = read_configs([site], workdir)
    if not configs:
        raise ConfigError([Mistake(site, "", "is no backend config")])
    find_site_credentials(configs, workdir)


class _ToldError(UserError):
    """Mistakes that another process has put into words, shown as they are."""

    def __str__(self) -> str:
        return self.what


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay the first Ctrl-C until the block ends; a second one interrupts at once.

    If the block raises an exception, the first Ctrl-C has no effect.

    An interrupt in the middle of a transaction would leave it open: a SQLite file would stay locked
    while the exception propagates, so nothing could be corrected in it.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            before(number, frame)
        pressed = True

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)
