"""The backend of `mlflow run --backend mantik`: submit a run with MLflow's own command.

    mlflow run churn -b mantik -c juwels.json -P alpha=0.5

MLflow imports this module through the entry point `mlflow.project_backend`. It then prepares no
environment: the backend config describes the job's environment at the site.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import mlflow
from mlflow.exceptions import ExecutionException
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.projects.submitted_run import SubmittedRun
from mlflow.utils.logging_utils import eprint

from ..common.errors import MantikError
from ..tracking.run import tracking_target, without_user
from . import controller
from .controller import run_status, settle_run
from .directories import RunDirectory, config_of_values, runs_home
from .local_runs import cancel_run
from .store import RunStore
from .submit import SubmitRequest, submit_run


class MantikRun(SubmittedRun):  # type: ignore[misc] # mlflow is not typed
    """A run at a site that MLflow can wait for and cancel."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self._run_id = run_id
        self._directory = RunDirectory(runs_home() / run_id)

    @property
    def run_id(self) -> str:
        return self._run_id

    def wait(self) -> bool:
        """Wait for the run to end and return whether it succeeded.

        Raises:
            ExecutionException: the controller ended before the run did.
        """
        controller.wait_for_controller(self._directory)
        run = self._directory
        if (end := run.end) is None:
            raise ExecutionException(
                f"Run (ID '{self._run_id}'): its controller is gone, and its job may still run at"
                f" {run.request.site}. Continue it: smk-mantik runs continue {self._run_id}"
            )
        self._settle()
        return bool(end["exit_code"] == 0)

    def get_status(self) -> str:
        run = RunStore(self._directory.request.tracking_uri).run(self._run_id)
        return "UNKNOWN" if run is None else str(run.info.status)

    def cancel(self) -> None:
        """Cancel the job and wait until its site has confirmed it.

        Raises:
            ExecutionException: the run is over, or it is not confirmed that its job has ended.
        """
        try:
            cancel_run(self._directory, eprint)
        except MantikError as error:
            raise ExecutionException(str(error)) from None
        self._settle()
        eprint(f"Run (ID '{self._run_id}'): {run_status(self._directory)}")

    def _settle(self) -> None:
        try:
            settle_run(self._directory)
        except MantikError as error:
            eprint(f"{error}")


class MantikBackend(AbstractBackend):  # type: ignore[misc] # mlflow is not typed
    """The class that MLflow calls for `--backend mantik`."""

    def run(  # noqa: PLR0917 - MLflow's
        self,
        project_uri: str,
        entry_point: str,
        params: Mapping[str, object] | None,
        version: str | None,
        backend_config: Mapping[str, Any],
        tracking_uri: str,
        experiment_id: str,
    ) -> MantikRun:
        """Submit an entry point.

        Raises:
            ExecutionException: with all mistakes found, or because MLflow or the controller failed;
                or the run was awaited (`wait`) and did not succeed.
        """
        try:
            chosen = config_of_values(backend_config, os.environ)
            given = {"MLFLOW_TRACKING_URI": without_user(tracking_uri)}
            active = mlflow.active_run()
            tags = {"mlflow.parentRunId": active.info.run_id} if active is not None else {}
            run_id = submit_run(
                SubmitRequest(
                    project_uri.strip("'\""), chosen, entry_point, version or "",
                    parameters={name: str(value) for name, value in (params or {}).items()},
                    extra=chosen.extra,
                    experiment_id=str(experiment_id), name=_name(),
                    account=chosen.account, tags=tags,
                    tracking_uri=tracking_target(given, Path.cwd()).uri,  # an absolute one
                )
            )  # fmt: skip
        except MantikError as error:
            raise ExecutionException(str(error)) from None
        made = MantikRun(run_id)
        eprint(f"Run (ID '{run_id}') submitted to {chosen.site}: smk-mantik runs show {run_id}")
        if chosen.wait and not backend_config.get("SYNCHRONOUS"):
            # As MLflow waits.
            try:
                if not made.wait():
                    raise ExecutionException(f"Run (ID '{run_id}') failed")
            except KeyboardInterrupt:
                eprint(f"Run (ID '{run_id}'): cancelling it")
                made.cancel()
                raise
        return made


def _name() -> str:
    """Return the value of `--run-name`, which MLflow's command passes to no backend.

    MLflow names the run after the backend has returned. That is too late where the backend waits
    for the run, and for the run's directory.
    """
    context = click.get_current_context(silent=True)
    if context is None or getattr(context.command.callback, "__module__", "") != "mlflow.cli":
        return ""
    return str(context.params.get("run_name") or "")
