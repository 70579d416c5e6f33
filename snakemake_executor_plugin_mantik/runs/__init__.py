"""Runs of one MLproject entry point at a site, from submission to the registered model.

    smk-mantik runs submit ─┐
    mlflow run -b mantik ───┼─▶ submit ─▶ run directory ─▶ controller ─▶ snakemake (one rule)
    smk-mantik schedule ────┘                │
                                             └─▶ MLflow: the run, created first

Each run has its own directory, named by its MLflow id. It holds a snapshot of the project, the
backend config, the request, and the journal of the one-rule workflow that runs there as
`smk-mantik run` would run it. The controller is a process in a session of its own. If it dies, the
job continues at its site, and `smk-mantik runs continue` starts a new controller.
"""

from collections.abc import Mapping

from ..common.errors import MantikError, UserError

__all__ = ["MantikError", "UserError", "rerun"]


def rerun(
    run_id: str,
    *,
    site: str = "",
    account: str = "",
    name: str = "",
    tags: Mapping[str, str] | None = None,
    key: str = "",
) -> str:
    """Submit a run again with the same project, parameters and experiment.

    Needs mlflow. Does not wait for the new run.

    Args:
        run_id: the MLflow id of a run whose directory is on this machine.
        site: another backend config, as `[NAME=]FILE`; empty: the same.
        account: another compute budget account; empty: the same, or for another site the
            environment's.
        name: another name; empty: the same.
        tags: tags to create the new run with.
        key: makes the call repeatable: a second call with the same key returns the run that the
            first one created, and starts its controller if that is gone. Empty: each call creates
            a new run.

    Returns:
        The new run's MLflow id.

    Raises:
        UserError: no such run is on this machine, or it can no longer be submitted as it was.
        MantikError: a request to MLflow fails, or the controller cannot be started.
    """
    import os

    from .directories import config_of_file
    from .submit import SubmitRequest, submit_run

    chosen = config_of_file(site, os.environ) if site else None
    return submit_run(
        SubmitRequest(
            again=run_id, chosen=chosen, account=account, name=name, tags=tags or {}, key=key
        )
    )
