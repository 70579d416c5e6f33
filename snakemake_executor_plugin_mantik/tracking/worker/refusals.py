"""Which of MLflow's errors are a definite no, and which may be none the next time.

Needs mlflow, so it is part of the worker.
"""

from typing import Final

from mlflow.exceptions import MlflowException

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
