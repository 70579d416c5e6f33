"""Which variables of this process a job gets."""

from contextlib import AbstractContextManager
from io import StringIO
from types import SimpleNamespace

from snakemake_executor_plugin_mantik.rules.make_request import workflow_variables

SNAKEFILE = """\
os.environ["SET"] = "1"
environ['QUOTED'] += "1"
    os.environ.setdefault("DEFAULT", "1")
if os.environ["COMPARED"] == "1": pass
x = os.environ["READ"]
# os.environ["COMMENT"] = "1"
os.environ["PATH"] = os.environ["HOME"] = "/here"
os.environ["MY_LIB_PATH"] = "/here"
os.environ["DB_PASSWORD"] = "secret"
os.environ["ASKED_TOKEN"] = "secret"
os.environ["MLFLOW_RUN_ID"] = "1"
os.environ["SNAKEMAKE_PROFILE"] = "none"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GONE"] = "1"; del os.environ["GONE"]
"""


def test_variables_that_snakefiles_set_go_along_unless_they_are_for_this_machine() -> None:
    def opened(source: str) -> AbstractContextManager[StringIO]:
        return StringIO(source)

    workflow = SimpleNamespace(
        envvars={"ASKED_TOKEN"}, included=[SNAKEFILE], sourcecache=SimpleNamespace(open=opened)
    )
    names = [
        "SET", "QUOTED", "DEFAULT", "COMPARED", "READ", "COMMENT", "PATH", "HOME", "MY_LIB_PATH",
        "DB_PASSWORD", "ASKED_TOKEN", "MLFLOW_RUN_ID", "SNAKEMAKE_PROFILE", "OMP_NUM_THREADS",
    ]  # fmt: skip
    found = workflow_variables(workflow, dict.fromkeys(names, "value"))
    assert found == dict.fromkeys(["ASKED_TOKEN", "DEFAULT", "QUOTED", "SET"], "value")
