"""Runs: one entry point of an MLproject at a site, from its submission to its registered model.

    smk-mantik runs submit ─┐
    mlflow run -b mantik ───┼─▶ submit ─▶ run directory ─▶ controller ─▶ snakemake (one rule)
    smk-mantik schedule ────┘                │
                                             └─▶ MLflow: the run, made first

Each run has a directory of its own, named by its MLflow id: a snapshot of the project, the backend
config, what it was asked for, and the journal of the one-rule workflow that runs there as
`smk-mantik run` would run it. The controller is a process of its own session; if it dies, the job
goes on at its site, and `start` takes it up again.
"""

from collections.abc import Mapping

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError

__all__ = ["MantikError", "UserError", "rerun"]


def rerun(
    run_id: str,
    *,
    account: str = "",
    name: str = "",
    tags: Mapping[str, str] | None = None,
    key: str = "",
) -> str:
    """Submit a run again, with the same project, parameters, config and experiment.

    Needs mlflow. The new run is started and not waited for.

    Args:
        run_id: the run, by its MLflow id; its run directory has to be on this machine.
        account: another compute budget account; empty: the same.
        name: another name; empty: the same.
        tags: tags that the new run has from its start.
        key: what the new run can be found by again: a second call with the same key returns the
            run that the first one made, and starts it if that did not get so far. Empty: each call
            makes a new run.

    Returns:
        The new run's MLflow id.

    Raises:
        UserError: there is no such run here, or something is wrong with it now.
        MantikError: MLflow cannot be asked.
    """
    from snakemake_executor_plugin_mantik.runs.submit import resubmit_run

    return resubmit_run(run_id, account=account, name=name, tags=tags or {}, key=key)
