"""Requests to MLflow that it may refuse. Needs mlflow."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from .run import without_users

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
_BATCH: Final = {"params": 100, "tags": 100, "metrics": 1000}
"""Values per request: MLflow's limits."""

_T = TypeVar("_T")


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow has understood a request and refused it."""
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


def unless_refused(
    act: Callable[[], _T], notify: Callable[[str], object] = lambda _: None
) -> _T | None:
    """Call `act`; if MLflow refuses, call `notify` with the reason and return None.

    Raises:
        MlflowException: another error; try again later.
    """
    try:
        return act()
    except MlflowException as error:
        if not is_refusal(error):
            raise
        notify(" ".join(without_users(str(error)).split())[:300])
        return None


def log_values(
    client: MlflowClient,
    run_id: str,
    kind: str,
    values: Sequence[Any],
    refused: Callable[[Any, str], object],
) -> None:
    """Log `params`, `tags` or `metrics` in batches; if MLflow refuses a batch, one by one.

    `refused` is called with each value that MLflow refuses, and the reason.
    """
    for start in range(0, len(values), _BATCH[kind]):
        some = values[start : start + _BATCH[kind]]
        alone: list[str] = []
        unless_refused(partial(client.log_batch, run_id, **{kind: some}), alone.append)
        for value in some if alone else ():
            unless_refused(
                partial(client.log_batch, run_id, **{kind: [value]}), partial(refused, value)
            )


_DEFAULT: Final = "Default"
"""MLflow's name of the experiment for runs without one."""


def find_or_make(client: MlflowClient, name: str, experiment_id: str) -> Experiment:
    """Return the experiment with an id or a name, which may have been deleted in MLflow.

    An id takes precedence over the name, unless it is empty. The experiment is created if none has
    the name; if that is empty, it is `_DEFAULT`.

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
