"""Create, read and end runs in MLflow. Import late: importing mlflow takes seconds."""

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlflow
from mlflow.entities import Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.tracking.run import (
    tracking_target,
    without_user,
    without_users,
)
from snakemake_executor_plugin_mantik.tracking.worker.overview import find_or_make

_BATCH: Final = 100
ENDED: Final = ("FINISHED", "FAILED", "KILLED")
STATES: Final = ("SCHEDULED", "RUNNING", *ENDED)
_ERRORS: tuple[type[Exception], ...] = (MlflowException,)
with suppress(ImportError):  # mlflow-skinny, which supports servers only
    from sqlalchemy.exc import SQLAlchemyError

    _ERRORS += (SQLAlchemyError,)  # such as for a file that is no database

SITE: Final = "mantik.site"
KEY: Final = "mantik.key"
"""The tag by which a second request with the same key finds the run of the first."""

SUBMISSION: Final = "mantik.submission"
"""The tag by which the run of a killed submission can be found."""

_VALUE: Final = 6000
"""The longest value of a parameter that MLflow keeps, in characters."""


def tracking_uri(environ: Mapping[str, str]) -> str:
    """Return the tracking URI of the user's runs, absolute and without user and password."""
    found = tracking_target(environ, Path.cwd()).uri or without_user(mlflow.get_tracking_uri())
    return str(Path(found).absolute()) if ":" not in found else found


def store_exists(uri: str) -> bool:
    """Return whether a store may be queried: MLflow would create a SQLite file that is missing."""
    path = uri.removeprefix("sqlite:///")
    return path == uri or Path(path.partition("?")[0]).exists()


@dataclass(frozen=True)
class NewRun:
    """A run that was just created."""

    run_id: str
    name: str
    experiment_id: str
    experiment: str


class RunStore:
    """An MLflow store: a server, or a SQLite file.

    All methods raise `MantikError` if the store does not answer or refuses.
    """

    def __init__(self, uri: str) -> None:
        """Connect to a store; `uri` has no user and password, which come from the environment."""
        self.uri = uri
        given = os.environ.get("MLFLOW_TRACKING_URI", "")
        with self.mlflow_errors():
            self.client = MlflowClient(given if without_user(given) == uri else uri)

    @contextmanager
    def mlflow_errors(self) -> Iterator[None]:
        """Turn MLflow's errors into `MantikError`."""
        try:
            yield
        except _ERRORS as error:
            raise MantikError(
                f"MLflow: {' '.join(without_users(str(error)).split())[:500]}",
                where=without_user(self.uri),
                do="Check that MLFLOW_TRACKING_URI is right and that the store is available",
            ) from None

    # Creating and ending

    def make(
        self, experiment: str, experiment_id: str, name: str, tags: Mapping[str, str],
        params: Mapping[str, str],
    ) -> NewRun:  # fmt: skip
        """Create a run that is about to be submitted, with status SCHEDULED.

        Args:
            experiment: the experiment's name; it is created if needed.
            experiment_id: the experiment's id, instead of a name.
            name: the run's name; empty: MLflow makes one up.
            tags: set at creation.
            params: parameters; long values are cut.
        """
        with self.mlflow_errors():
            found = self._experiment(experiment, experiment_id)
            made = self.client.create_run(
                found.experiment_id, start_time=int(time.time() * 1000), tags=dict(tags),
                run_name=name or None,
            )  # fmt: skip
            run_id = made.info.run_id
            logged = [Param(key, value[:_VALUE]) for key, value in params.items()]
            for at in range(0, len(logged), _BATCH):
                self.client.log_batch(run_id, params=logged[at : at + _BATCH])
            self.client.update_run(run_id, status="SCHEDULED")
        return NewRun(run_id, made.info.run_name, found.experiment_id, found.name)

    def _experiment(self, name: str, wanted: str) -> Any:
        found = find_or_make(self.client, name, wanted)
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the experiment {found.name} was deleted in MLflow", where=self.uri,
                do="Restore it, or use another one",
            )  # fmt: skip
        return found

    def end(self, run_id: str, status: str, reason: str = "") -> None:
        """Set a run's final status, unless it has one, and a tag with the reason of a failure."""
        with self.mlflow_errors():
            if self.client.get_run(run_id).info.status in ENDED:
                return
            if reason and status != "FINISHED":
                self.client.log_batch(run_id, tags=[RunTag("mantik.reason", reason)])
            # MLflow prints the address of a server's run, into output that may be read as JSON.
            with redirect_stdout(io.StringIO()):
                self.client.set_terminated(run_id, status)

    # Reading

    def run(self, run_id: str) -> Any:
        """Return a run; None if it does not exist or was deleted."""
        try:
            found = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            with self.mlflow_errors():
                raise
        return found if found.info.lifecycle_stage == "active" else None

    def search(
        self, condition: str, experiment: str = "", limit: int = 50, *, latest: bool = True
    ) -> list[Any]:
        """Return the runs that match a filter of MLflow, if `latest` the latest first."""
        with self.mlflow_errors():
            if experiment:
                found = self.client.get_experiment_by_name(experiment)
                ids = [found.experiment_id] if found is not None else []
            else:
                ids = self._experiments()
            order = ["attributes.start_time DESC"] if latest else None
            if not ids:
                return []
            return list(self.client.search_runs(ids, condition, max_results=limit, order_by=order))

    def _experiments(self) -> list[str]:
        return [each.experiment_id for each in self._all_experiments()]

    def experiments(self) -> list[str]:
        with self.mlflow_errors():
            return [str(each.name) for each in self._all_experiments()]

    def _all_experiments(self) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self.client.search_experiments(page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    def experiment_name(self, experiment_id: str) -> str:
        with self.mlflow_errors():
            return str(self.client.get_experiment(experiment_id).name)

    def delete(self, run_id: str) -> None:
        """Mark a run as deleted; `mlflow gc` removes it for good."""
        with self.mlflow_errors():
            self.client.delete_run(run_id)


def quote_filter(text: str) -> str:
    """Quote a text for a filter of MLflow.

    Raises:
        UserError: the text holds both kinds of quotes, which MLflow's filters cannot express.
    """
    for sign in ("'", '"'):
        if sign not in text:
            return f"{sign}{text}{sign}"
    raise UserError(
        f"MLflow cannot search for a name with both kinds of quotes: {text}",
        do="Use the id of a run, or leave the filter out",
    )


def join_conditions(parts: Sequence[str]) -> str:
    """Join filters with AND; leave out empty ones."""
    return " AND ".join(part for part in parts if part)
