"""Find or create experiments, and recognise MLflow's definite refusals. Needs mlflow."""

from typing import Final

from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

_DEFAULT: Final = "Default"
"""MLflow's name of the experiment for runs without one."""


def find_or_make(client: MlflowClient, name: str, experiment_id: str) -> Experiment:
    """Return the experiment with an id or a name, which may have been deleted in MLflow.

    Args:
        client: for the server.
        name: created if it does not exist; empty: `_DEFAULT`.
        experiment_id: takes precedence over the name; empty: use the name.

    Raises:
        MlflowException: no experiment has this id, or the server refuses or does not answer.
    """
    if experiment_id:
        return client.get_experiment(experiment_id)
    name = name or _DEFAULT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            found = client.get_experiment(client.create_experiment(name))
        except MlflowException as error:
            # Another process may have created it at the same time.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error from None
    return found


_REFUSALS: Final = frozenset(
    (
        "ALREADY_EXISTS",
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_CONFLICT",
        "RESOURCE_DOES_NOT_EXIST",
    )
)
"""Error codes of requests that would fail again. Without those of permissions and tokens, which the
user can fix, and ENDPOINT_NOT_FOUND, with which a proxy answers for a server that is down."""


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow has understood a request and refused it."""
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS
