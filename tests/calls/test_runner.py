"""What runs at the site: the function is called, and what it returns is written."""

import pickle
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RUNNER = files("snakemake_executor_plugin_mantik.rules.onsite") / "call_function.py"

MODULE = """
class Array:
    def tolist(self): return [1.5, 2]
class Trainer:
    @staticmethod
    def fit(x): return {"ü": x, "weights": Array()}
def odd(): return [object()]
def unkept(): return lambda: 0
"""


def call(here: Path, function: str, *, pickled: bool = False, **arguments: Any) -> bytes:
    (here / "the_module.py").write_text(MODULE)
    params = SimpleNamespace(
        module="the_module", function=function, arguments=arguments, pickled=pickled
    )
    job = SimpleNamespace(params=params, output=[str(here / "result")])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, "the_module", raising=False)
        runpy.run_path(str(RUNNER), init_globals={"snakemake": job})
    return (here / "result").read_bytes()


def test_json(tmp_path: Path) -> None:
    assert call(tmp_path, "Trainer.fit", x=1).decode() == '{"ü": 1, "weights": [1.5, 2]}\n'


def test_what_json_cannot_hold_is_refused_unless_pickled(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the_module:odd returned what JSON cannot hold \(object"):
        call(tmp_path, "odd")
    (kept,) = pickle.loads((tmp_path / "result.pickle").read_bytes())  # it may have taken hours
    assert type(kept) is object
    with pytest.raises(SystemExit, match=r"cannot hold \(function\)\. Return numbers"):
        call(tmp_path, "unkept")
    assert not (tmp_path / "result").exists()
    (found,) = pickle.loads(call(tmp_path, "odd", pickled=True))
    assert type(found) is object
