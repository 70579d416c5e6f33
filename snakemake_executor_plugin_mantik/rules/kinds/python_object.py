"""Encode the `snakemake` object of a Python script for a site.

Snakemake pickles its own object, which needs Snakemake to load. Here only its values are pickled,
and `onsite/mantik_script.py` builds an equivalent object from them. As in Snakemake, tables and
arrays among the parameters are converted to plain values, since a site may have other versions of
their packages. So are NumPy's numbers (from rows of tables), which stay plain at a site without
NumPy. Other values are pickled as they are.
"""

import base64
import pickle
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from snakemake.iocontainers import Namedlist, Snakemake

from snakemake_executor_plugin_mantik.common.errors import UserError

from ..onsite import mantik_script

RUNNER = Path(mantik_script.__file__)
"""The file that builds the object from the data."""

_NUMBERS = (bool, int, float, complex, str)
_PROTOCOL = 4
"""The latest protocol of Python 3.7."""


class NodeTmpdir(str):
    """Placeholder among the resources for the node's temporary directory."""

    __slots__ = ()


class _Pickler(pickle.Pickler):
    """Pickles Snakemake's lists and strings so that loading them needs no module of Snakemake.

    `mantik_script._Unpickler` loads them.
    """

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, NodeTmpdir):
            return ("tmpdir",)
        if isinstance(obj, Namedlist):
            return type(obj).__name__, list(obj), list(obj._get_names())
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.generic):
            plain = obj.item()
            if type(plain) in _NUMBERS:
                return "numpy", obj.dtype.str, plain
        if isinstance(obj, str) and type(obj).__module__.startswith("snakemake"):
            return "str", str(obj)
        return None


def encode_object(job: Snakemake) -> str:
    """Encode a job's data as base64, which needs no quoting in a shell.

    `job` is the object that Snakemake would pass to a script.

    Raises:
        UserError: a value cannot be pickled.
    """
    values = {
        "input": job.input,
        "output": job.output,
        "wildcards": job.wildcards,
        "threads": job.threads,
        "resources": job.resources,
        "log": job.log,
        "config": job.config,
        "rule": job.rule,
        "bench_iteration": job.bench_iteration,
        # Snakemake converts tables and arrays to plain values, and notes their types.
        "params": job._params_store,
        "params_types": job._params_types,
    }
    buffer = BytesIO()
    try:
        _Pickler(buffer, _PROTOCOL).dump(values)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"params or config contain a value that cannot be passed to a script ({error})",
            where=f"rule {job.rule}",
            do="Use plain values: text, numbers, lists, mappings",
        ) from error
    return base64.b64encode(buffer.getvalue()).decode()
