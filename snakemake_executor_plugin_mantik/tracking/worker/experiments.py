"""The experiment that runs go to, and the errors of MLflow that are definite refusals.

Needs mlflow.
"""

from typing import Final

from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

_DEFAULT: Final = "Default"
"""MLflow's own name of the experiment of runs for which none is named."""


def find_or_make(client: MlflowClient, name: str, experiment_id: str) -> Experiment:
    """The experiment with an id, or with a name; it may have been deleted in MLflow.

    Args:
        client: of the server.
        name: if there is none of that name, it is made; empty: `_DEFAULT`.
        experiment_id: comes before the name; empty: the name counts.

    Raises:
        MlflowException: there is none with this id, or the server refuses or does not answer.
    """
    if experiment_id:
        return client.get_experiment(experiment_id)
    name = name or _DEFAULT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            found = client.get_experiment(client.create_experiment(name))
        except MlflowException as error:
            # Somebody else was as quick.
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
"""Codes of errors that repeating does not help. Not among them: permissions and tokens, which the
user may mend; ENDPOINT_NOT_FOUND, which a proxy says of a server that is away."""


def is_refusal(error: Exception) -> bool:
    """Whether MLflow has understood what it was asked, and does not do it."""
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS
