"""What a Python script at a site is told of its job: the data of its `snakemake` object.

Snakemake pickles its own object, which needs Snakemake where it is read. Here its values travel,
and `onsite/mantik_script.py` makes an object of them that answers alike. Tables and arrays among
the parameters travel as plain values, as they do with Snakemake: their packages may have other
versions there. So do the numbers of NumPy, which rows of tables are made of, and which stay plain
where there is no NumPy. Other values are pickled as they are.
"""

import base64
import pickle
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from snakemake.iocontainers import Namedlist, Snakemake

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules.onsite import mantik_script

RUNNER = Path(mantik_script.__file__)
"""The file that makes the object of the data."""

_NUMBERS = (bool, int, float, complex, str)
_PROTOCOL = 4
"""Python 3.7 knows no later one."""


class NodeTmpdir(str):
    """Stands among the resources for the node's directory for temporary files."""

    __slots__ = ()


class _Pickler(pickle.Pickler):
    """Writes Snakemake's lists and strings so that no module of Snakemake is needed to read them.

    What it writes for them, `mantik_script._Unpickler` reads.
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
    """The data of a job, in letters that a shell leaves alone.

    Args:
        job: what Snakemake would give a script.

    Raises:
        UserError: a value of it cannot travel.
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
        # Snakemake makes plain values of tables and arrays, and notes what they were.
        "params": job._params_store,
        "params_types": job._params_types,
    }
    buffer = BytesIO()
    try:
        _Pickler(buffer, _PROTOCOL).dump(values)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"params or config hold a value that a script cannot be given ({error})",
            where=f"rule {job.rule}",
            do="Give the rule plain values: text, numbers, lists, mappings",
        ) from error
    return base64.b64encode(buffer.getvalue()).decode()
