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

from ..common.errors import ConfigError, MantikError, Mistake, UserError
from ..common.locks import take_lock
from ..common.state_directory import open_private
from ..config.reading import read_configs
from ..connections.connect import find_site_credentials
from ..jobs.resources import is_single_word
from ..mlproject.command_line import UNCHANGED, ContinueOptions
from ..mlproject.entry import EntryPoint
from ..mlproject.project import load
from ..sites.credentials import find_account
from ..tracking.run import user_name
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
from .store import KEY, SITE, SUBMISSION, RunStore, quote_filter, store_exists, tracking_uri

NEVER: Final = "it was never submitted"
_STALE_S: Final = 86400.0
"""Seconds after which a directory is removed that has no lock file yet."""
ARRIVES_S: Final = 300.0
"""Seconds after which a server has created a requested run, or never will."""
GIVE_UP_S: Final = 30 * 86400.0
"""Seconds after which a directory is removed although MLflow never answered."""


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
        # It may have been renamed or removed just now, or be another user's.
        with suppress(OSError):
            _clear(RunDirectory(path), time.time() - path.stat().st_mtime, failed)
    return failed


def _clear(stage: RunDirectory, age: float, failed: dict[str, MantikError]) -> None:
    """Clear up one directory; add a store that does not answer to `failed`, and skip it then."""
    if not stage.making.exists():
        if age > _STALE_S:
            shutil.rmtree(stage.path, ignore_errors=True)
        return
    with stage.making.open("rb") as lock:
        if not take_lock(lock):
            return
        try:
            uri = stage.request.tracking_uri
        except MantikError:
            uri = ""  # no run was requested
        if uri and not _ended(uri, stage, failed) and age < GIVE_UP_S:
            return
        if not uri or age > ARRIVES_S:
            shutil.rmtree(stage.path, ignore_errors=True)


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


@dataclass(frozen=True)
class SubmitRequest:
    """The arguments of a submission.

    Attributes:
        uri: the project: a folder or a git URL, with `#sub` for a folder in it.
        chosen: the backend config; None: that of the run `again`.
        version: a branch, tag or commit.
        extra: parameters that the entry point does not declare.
        experiment, experiment_id: of the run; if both are empty, from MLflow's variables.
        name: the run's name; empty: MLflow makes one up.
        account: the compute budget account; empty: the environment's.
        tags: further tags of the run.
        tracking_uri: the MLflow store; empty: the environment's.
        going_on: how the job goes on past its walltime.
        again: the MLflow id of a run whose directory is on this machine: its project, version,
            entry point and store are submitted again, and what is empty here is as there.
        key: as in `runs.rerun`.
    """

    uri: str = ""
    chosen: ChosenConfig | None = None
    entry_point: str = "main"
    version: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)
    experiment: str = ""
    experiment_id: str = ""
    name: str = ""
    account: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    tracking_uri: str = ""
    going_on: ContinueOptions = UNCHANGED
    again: str = ""
    key: str = ""


def submit_run(asked: SubmitRequest) -> str:
    """Submit a run and return its MLflow id. Needs mlflow.

    Raises:
        UserError: no run `again` is on this machine, or with all mistakes found; nothing was
            submitted.
        MantikError: a request cannot be read, or one to MLflow fails; or the controller cannot be
            started, but the run exists.
    """
    old = _run_here(asked.again) if asked.again else None
    if old is not None and asked.key and (found := _of_key(old.request.tracking_uri, asked.key)):
        return found
    with _staging() as stage:
        if old is not None:
            before = old.request
            folder = retake_project(old.path / before.folder, stage)
            taken = TakenProject(before.uri, folder, None, before.version)
        else:
            assert asked.chosen is not None
            taken = take_project(asked.uri, asked.version, asked.chosen.config, stage)
            before = _first_request(asked, taken)
        if asked.chosen is None:
            assert old is not None
            with _writing(stage):
                shutil.copytree(old.path / CONFIGS, stage.path / CONFIGS)
            site, config, source = before.site, before.config, before.config_source
        else:
            site, source = asked.chosen.site, asked.chosen.source
            copy = stage.path / CONFIGS / f"{site}{asked.chosen.suffix}"
            with _writing(stage):
                copy.parent.mkdir()
                copy.write_bytes(asked.chosen.content)
            config = str(copy.relative_to(stage.path))
        point = _entry(taken.folder, before.entry_point)
        parameters, extra = asked.parameters, asked.extra
        if point is not None and point.script:  # it declares no parameters and accepts any
            parameters, extra = {}, {**parameters, **extra}
        values = project_values(taken, parameters, _paths(point))
        account = before.account if site == before.site else find_account(site, os.environ)
        other = bool(asked.experiment or asked.experiment_id)
        request = replace(
            before,
            folder=str(taken.folder.relative_to(stage.path)),
            parameters={**before.parameters, **parameters},
            values={**before.values, **values}, extra={**before.extra, **extra},
            site=site, config=config, config_source=source, account=asked.account or account or "",
            experiment=asked.experiment if other else before.experiment,
            experiment_id=asked.experiment_id if other else before.experiment_id,
            name=asked.name or before.name,
            tags={**_kept(before.tags), **asked.tags, **({KEY: asked.key} if asked.key else {})},
            created=time.time(), again_of=asked.again, run_id="",
            segments=before.segments if asked.going_on.segments is None
            else asked.going_on.segments,
            checkpoint=asked.going_on.checkpoint or before.checkpoint,
        )  # fmt: skip
        return _submitted(stage, request, point, missing_values(taken, values, _paths(point)))


def _run_here(run_id: str) -> RunDirectory:
    found = RunDirectory(runs_home() / run_id)
    if not found.request_file.exists():
        raise UserError(
            f"it was deleted, or not submitted from here: there is no {found.path}",
            where=f"run {run_id}",
            do="Submit its project again: smk-mantik runs submit",
        )
    return found


def _first_request(asked: SubmitRequest, taken: TakenProject) -> RunRequest:
    """Return what a run of a project has that is submitted for the first time."""
    return RunRequest(
        uri=taken.uri, version=taken.version,
        commit=taken.tags.get("mlflow.source.git.commit", ""), folder="",
        entry_point=asked.entry_point, parameters={}, values={}, extra={}, site="", config="",
        config_source="", account="", tracking_uri=asked.tracking_uri or tracking_uri(os.environ),
        experiment_id=os.environ.get("MLFLOW_EXPERIMENT_ID", ""),
        experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        name="", created=0.0, tags=taken.tags,
    )  # fmt: skip


@contextmanager
def _staging() -> Iterator[RunDirectory]:
    """Create the directory of a submission; remove it at the end unless it has become a run's."""
    stage = RunDirectory(make_runs_home() / f"{NEW_PREFIX}{uuid.uuid4().hex}")
    with ExitStack() as held:
        with _writing(stage):
            stage.path.mkdir(mode=0o700)
            # Shows that it is being submitted from.
            take_lock(held.enter_context(open_private(stage.making, "ab")))
        try:
            yield stage
        finally:
            shutil.rmtree(stage.path, ignore_errors=True)  # unless it has become a run


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


def _kept(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a run that describe its project; other tags were for that run alone."""
    return {n: v for n, v in tags.items() if n.startswith(("mlflow.source.", "mantik.git."))}


def _of_key(uri: str, key: str) -> str:
    """Return the run of an earlier call with this key; empty if there is none.

    Start its controller if that is gone; end runs of this key that have no directory here.
    """
    store = RunStore(uri)
    for run in store.search(f"tags.`{KEY}` = {quote_filter(key)}"):
        run_id = str(run.info.run_id)
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
    wrong = [*gone.values()]
    if request.account and not is_single_word(request.account):
        may_not = "may hold no blanks, quotes, backslashes, # or control characters"
        wrong.append(Mistake("--account", "", f"{may_not}, found {request.account!r}"))
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
            request = store.make(request, _tags(request, stage), params)
        directory = RunDirectory(runs_home() / request.run_id)
        with _writing(directory):
            stage.write_request(request)
            stage.path.rename(directory.path)
        controller.start_controller(directory)
    except BaseException:
        with suppress(MantikError):  # or it would hide the original error
            end_aborted(store, stage)
        raise
    return request.run_id


def _tags(request: RunRequest, stage: RunDirectory) -> dict[str, str]:
    found = {
        "mlflow.user": user_name(),
        "mlflow.source.name": request.uri,
        "mlflow.source.type": "PROJECT",
        "mlflow.project.entryPoint": request.entry_point,
        "mlflow.project.backend": "mantik",
        "mantik.project": load(stage.path / request.folder, warn=False).name,
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
    find_site_credentials(read_configs([site], workdir), workdir)


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
