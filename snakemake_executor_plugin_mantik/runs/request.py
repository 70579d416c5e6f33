"""The request of a run: all that is needed to submit it again. Values."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.mlproject.command_line import ContinueOptions

from .directories import RunDirectory

_VERSION: Final = 1


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
        name: the run's name.
        tags: further tags of the run.
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

    def as_json(self) -> dict[str, Any]:
        return {"format": _VERSION, **asdict(self)}


def write_request(directory: RunDirectory, request: RunRequest) -> None:
    """Write a run's request atomically.

    Raises:
        OSError: the file cannot be written.
    """
    new = directory.request.with_suffix(".new")
    new.write_text(json.dumps(request.as_json(), indent=2, ensure_ascii=False), encoding="utf-8")
    new.replace(directory.request)


def read_request(directory: RunDirectory) -> RunRequest:
    """Read a run's request.

    Raises:
        MantikError: the file is missing, damaged, or of a newer version.
    """
    where = str(directory.request)
    try:
        values = json.loads(directory.request.read_text(encoding="utf-8"))
        newer = values.pop("format") > _VERSION
        known = {f.name for f in fields(RunRequest)}
        if not newer:
            return RunRequest(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MantikError(
            f"the run's request cannot be read ({error})",
            where=where,
            do="Remove the directory if you no longer need the run",
        ) from None
    raise MantikError(
        "it was written by a newer version of smk-mantik", where=where, do="Update smk-mantik"
    )
