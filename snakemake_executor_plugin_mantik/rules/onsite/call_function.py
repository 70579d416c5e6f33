"""Call a function and write what it returns: the `script:` of the rule of `smk-mantik call`.

It runs with the Python of the backend config's environment and supports Python 3.7. Snakemake's
local executor puts its own lines before it, so it may import nothing from `__future__`.
"""

import importlib
import json
import os
import pickle
import sys
from typing import Any


def plain(value: Any) -> Any:
    """Return what `json` does not know as what it knows: NumPy's arrays, PyTorch's tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def keep(result: Any, path: str) -> str:
    """Pickle a result that may have taken hours; return a sentence that says where it is."""
    try:
        content = pickle.dumps(result)
        with open(path, "wb") as file:
            file.write(content)
    except Exception:  # noqa: BLE001 - pickling calls code of the user
        return ""
    return f" It is pickled in {path} where the job ran (smk-mantik get brings it)."


def main(job: Any) -> None:
    """Call the function that the job's params name."""
    module, name = job.params.module, job.params.function
    sys.path.insert(0, os.getcwd())
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    result = function(**job.params.arguments)
    if job.params.pickled:
        content = pickle.dumps(result)
    else:
        try:
            content = json.dumps(result, default=plain, ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            sys.exit(
                f"mantik: {module}:{name} returned what JSON cannot hold ({error})."
                f"{keep(result, job.output[0] + '.pickle')} Return numbers, texts, lists and dicts,"
                " write a file that --output names, or ask for --pickle"
            )
    with open(job.output[0], "wb") as file:
        file.write(content)


main(globals()["snakemake"])
