"""The runs on this machine: their directories, requests and backend configs."""

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..common.errors import ConfigError, MantikError, Mistake, UserError
from ..common.locks import is_locked
from ..common.state_directory import STATE, data_home, make_private, replace_file
from ..config.model import BackendConfig
from ..config.reading import KINDS, check_site_name, parse_backend_config, read_configs
from ..journal import JOURNAL_FILE, AttemptRecord, AttemptState, read_history
from ..mlproject.command_line import ContinueOptions

RUNS_VARIABLE: Final = "MANTIK_RUNS"
"""The variable that names the directory of all runs."""

NEW_PREFIX: Final = ".new-"
"""The prefix of a run directory's name until its run exists in MLflow."""

CONFIGS: Final = "site"
"""The folder of a run directory that holds the backend config, under the site's name."""


def runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of all runs, which may not exist yet."""
    known = os.environ if environ is None else environ
    if given := known.get(RUNS_VARIABLE):
        return Path(given).expanduser().absolute()
    return data_home(known) / "runs"


def make_runs_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of all runs; create it if needed, closed to others.

    Raises:
        UserError: the directory cannot be created.
    """
    found = runs_home(environ)
    try:
        make_private(found)
    except OSError as error:
        raise UserError(
            f"the directory for runs cannot be created ({error.strerror or error})",
            where=str(found),
            do=f"Set {RUNS_VARIABLE} to another directory",
        ) from None
    return found


class RunDirectory:
    """A run that was submitted from this machine, or is about to be: its directory.

    Attributes:
        request_file: what was requested, as `request` reads it.
        log: the output of the controller and of Snakemake.
        lock: locked by a controller and its Snakemake, or a command that ends or removes the run.
        making: locked by the process that submits the run.
        cancelled: exists if the user has asked to cancel the run since it was last started.
        ended: exists when the workflow is over and no job of it is left at the site.
        reported: exists when MLflow knows how the run ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.request_file = path / "request.json"
        self.log = path / "snakemake.log"
        self.lock = path / "lock"
        self.making = path / "making"
        self.cancelled = path / "cancelled"
        self.ended = path / "ended.json"
        self.reported = path / "told"

    @cached_property
    def request(self) -> "RunRequest":
        """What was requested.

        Raises:
            MantikError: the file is missing, damaged, or of another version.
        """
        try:
            return RunRequest(**json.loads(self.request_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise MantikError(
                f"the run's request cannot be read ({error})",
                where=str(self.request_file),
                do="Remove the directory if you no longer need the run",
            ) from None

    def write_request(self, request: "RunRequest") -> None:
        """Write what is requested, as a whole or not at all."""
        text = json.dumps(asdict(request), indent=2, ensure_ascii=False)
        replace_file(self.request_file, text)

    @property
    def workdir(self) -> Path:
        """The snapshot of the project: the workflow's working directory."""
        return self.path / self.request.folder

    @property
    def attempts(self) -> list[AttemptRecord]:
        """The attempts of its job, the oldest first; none if there is no journal yet."""
        state = self.workdir / STATE
        return read_history(state) if (state / JOURNAL_FILE).exists() else []

    @property
    def has_left_attempts(self) -> bool:
        """Whether a job may still run, or has ended but is not committed yet."""
        return any(each.may_run or each.state is AttemptState.ENDED for each in self.attempts)

    @property
    def alive(self) -> bool:
        """Whether its lock is held: by a controller or a Snakemake that it started.

        A command that ends or removes the run holds it as well, for a while.
        """
        return is_locked(self.lock)

    @property
    def gone(self) -> bool:
        """Whether the run is not over, but its controller is gone."""
        # In this order: a controller records the end while it is alive.
        return not self.alive and self.end is None

    @property
    def end(self) -> Mapping[str, Any] | None:
        """How the workflow ended: `exit_code` and `time`; None while it, or jobs, may be left."""
        with suppress(OSError, ValueError):
            found: Mapping[str, Any] = json.loads(self.ended.read_text())
            return found
        return None

    def write_end(self, code: int) -> None:
        """Record that the workflow is over, with its exit code."""
        replace_file(self.ended, json.dumps({"exit_code": code, "time": time.time()}))

    def project(self, name: str) -> Path:
        """Return the path of a project's snapshot, the workflow's working directory."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]
        return self.path / "project" / (readable or "project")


@dataclass(frozen=True)
class RunRequest:
    """The request of a run.

    Attributes:
        uri: the project: an absolute path, or a git URL without password; `#sub` names a folder.
        version: the requested branch, tag or commit.
        commit: the commit of that version, if the project is in git.
        folder: the snapshot, relative to the run directory.
        parameters: as the user passed them.
        values: the same for the workflow: files by their paths in the snapshot.
        extra: parameters that the entry point does not declare.
        site: the site's name.
        config: the copy of its backend config, relative to the run directory.
        config_source: the copied file; empty: the config was given as values.
        account: the compute budget account; empty: none.
        tracking_uri: the MLflow store, without user and password.
        experiment_id, experiment: the experiment's id and name in that store.
        again_of: the run that this one repeats; empty: none.
        created: seconds since the epoch.
        run_id: MLflow's id of the run; empty until MLflow has created it.
        segments, checkpoint: how the job goes on past its walltime (`ContinueOptions`).
    """

    uri: str
    version: str
    commit: str
    folder: str
    entry_point: str
    parameters: Mapping[str, str]
    values: Mapping[str, str]
    extra: Mapping[str, str]
    site: str
    config: str
    config_source: str
    account: str
    tracking_uri: str
    experiment_id: str
    experiment: str
    name: str
    created: float
    tags: Mapping[str, str] = field(default_factory=dict)
    again_of: str = ""
    run_id: str = ""
    segments: int | None = None
    checkpoint: str = ""

    @property
    def going_on(self) -> ContinueOptions:
        return ContinueOptions(self.segments, self.checkpoint)


_FROM_ENVIRONMENT: Final = "SNAKEMAKE_MANTIK_BACKEND_CONFIG"
"""The variable that Snakemake's option --mantik-backend-config reads, too."""

_UNNAMED: Final = "site"
"""The name of a site whose backend config is given as values without a name."""

_MLFLOW: Final = frozenset(
    ("ENV_MANAGER", "SYNCHRONOUS", "DOCKER_ARGS", "STORAGE_DIR", "build_image", "docker_auth")
)
"""Keys that MLflow adds to the values for backends that build environments."""

_OURS: Final[Mapping[str, tuple[type, str]]] = {
    **dict.fromkeys(("config", "site", "account"), (str, "a text")),
    "wait": (bool, "true or false"),
    "extra": (Mapping, "a mapping"),
}
_SHOWN: Final = "backend config"


@dataclass(frozen=True)
class ChosenConfig:
    """A backend config and the options given with it.

    Attributes:
        site: the site's name.
        content: the config's text.
        suffix: its format, as a file suffix.
        config: the parsed values.
        source: the file's absolute path; empty if there was no file.
        account: the compute budget account; empty: the environment's.
        extra: parameters that the entry point does not declare.
        wait: whether to wait for the run's end, whatever MLflow does.
    """

    site: str
    content: bytes
    suffix: str
    config: BackendConfig
    source: str = ""
    account: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    wait: bool = False


def config_of_file(spec: str, environ: Mapping[str, str]) -> ChosenConfig:
    """Read the backend config that `[NAME=]FILE` names; if `spec` is empty, the environment's.

    Raises:
        UserError: no config or several are named, or it has mistakes.
    """
    if not spec:
        named = environ.get(_FROM_ENVIRONMENT, "").split()
        if len(named) != 1:
            found = "none" if not named else f"{len(named)} in {_FROM_ENVIRONMENT}"
            raise UserError(
                f"a run needs one backend config, found {found}",
                do="Pass it with --site [NAME=]FILE",
            )
        spec = named[0]
    # The files that it names are checked in the snapshot, later.
    [loaded] = read_configs([spec], Path(), check_files=False).values()
    name, path = loaded.name, loaded.path
    return ChosenConfig(name, path.read_bytes(), path.suffix.lower(), loaded.config, str(path))


def config_of_values(values: Mapping[str, Any], environ: Mapping[str, str]) -> ChosenConfig:
    """Read the backend config that `mlflow run` passes.

    Args:
        values: the keys of a Compute Backend Config, or `config`, the path of one. Either may come
            with `site` (its name), `account`, `extra` and `wait`.
        environ: names the config if the values do not.

    Raises:
        UserError: with all mistakes found.
    """
    given = {name: value for name, value in values.items() if name not in _MLFLOW}
    ours = {name: given.pop(name) for name in _OURS if name in given}
    wrong = [
        Mistake(_SHOWN, name, f"has to be {_OURS[name][1]}, found {value!r}")
        for name, value in ours.items()
        if not isinstance(value, _OURS[name][0])
    ]
    if "config" in ours and given:
        both = f"names a file, but keys of a config are given as well: {', '.join(map(str, given))}"
        wrong.append(Mistake(_SHOWN, "config", both))
    if wrong:
        raise ConfigError(wrong)
    name = ours.get("site", "")
    if given:
        name = name or _UNNAMED
        if told := check_site_name(name):
            raise ConfigError([Mistake(_SHOWN, "site", told)])
        content = json.dumps(given, indent=2, ensure_ascii=False).encode()
        config, _ = parse_backend_config(content, KINDS[".json"], None, shown=_SHOWN)
        chosen = ChosenConfig(name, content, ".json", config)
    else:
        file = ours.get("config", "")
        chosen = config_of_file(f"{name}={file}" if name and file else file, environ)
    extra = {str(name): str(value) for name, value in ours.get("extra", {}).items()}
    account, wait = ours.get("account", ""), ours.get("wait", False)
    return replace(chosen, account=account, extra=extra, wait=wait)
