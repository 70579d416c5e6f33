"""Report a missing script as a mistake of the user's.

Snakemake (9.27, `dag.ScriptProcessor`) looks for all scripts before it creates the executor, and
shows a traceback of its own code if there is none. So a filter of its log replaces that text.
"""

import logging
import sys
import traceback
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import UserError, printable
from snakemake_executor_plugin_mantik.common.mistakes import SeveralMistakes


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "exception", "") == FileNotFoundError.__name__:
            found = _explain(sys.exc_info()[1])
            if found is not None:
                record.msg, record.args = printable(str(found)), ()
        return True


_FILTER = _Filter()


def register_filter() -> None:
    """Explain missing scripts from now on, however often this is called."""
    logging.getLogger("snakemake.logging").addFilter(_FILTER)


def _explain(error: BaseException | None) -> UserError | None:
    """Return the user's mistake, if an error is about the script or notebook of a rule."""
    if not isinstance(error, FileNotFoundError):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        rule: Any = getattr(frame.f_locals.get("job"), "rule", None)
        if frame.f_code.co_name == "process_job" and rule is not None:
            kind, path = ("script", rule.script) if rule.is_script else ("notebook", rule.notebook)
            return _find_others(frame.f_locals["self"].dag) or UserError(
                f"{kind}: {path} does not exist ({error.filename})",
                where=f"rule {rule.name}",
                do="Correct the path, which is relative to the directory of the Snakefile; nothing"
                " was submitted",
            )
    return None


def _find_others(dag: Any) -> UserError | None:
    """Return the mistakes of the workflow, that one among them; None if it is the only one."""
    # Imported here because this module is imported for every command of Snakemake.
    from snakemake_interface_common.exceptions import WorkflowError

    from snakemake_executor_plugin_mantik.adapter.checks import check_workflow

    workflow, quiet = dag.workflow, logging.Logger("mantik", logging.CRITICAL)
    try:
        check_workflow(workflow, dag, workflow.executor_settings, quiet)
    except SeveralMistakes as error:
        return error
    except (UserError, WorkflowError, OSError):
        pass  # nothing more can be found out while a script is missing
    return None
