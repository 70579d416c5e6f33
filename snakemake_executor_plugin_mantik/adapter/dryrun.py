"""Run Snakemake up to the point where it would run jobs, and inspect its workflow there.

Snakemake reads its command line, profiles, configuration and Snakefile, and determines which jobs
would run. Where it would create an executor, it creates one of ours, which inspects the jobs and
ends the run. So nothing can run, not even local rules, and everything before is as in a real run.

This uses `cli.parse_args` and `cli.args_to_api`, which Snakemake's own `main` calls, and its
registry of executors, from which a dry run takes the executor `dryrun`.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, Final, TypeVar

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError

_T = TypeVar("_T")

_NAME: Final = "mantik"

NO_LIMIT: Final = sys.maxsize
"""Numbers of jobs and of cores if the user sets none. Snakemake's dry run would default to one core
and cap the threads of rules. A run at sites has no such number, and fails where a rule reads it.
"""

_OTHER_WORK: Final = (
    "archive", "cleanup_metadata", "cleanup_shadow", "conda_cleanup_envs",
    "conda_create_envs_only", "container_cleanup_images", "containerize", "d3dag", "dag",
    "delete_all_output", "delete_temp_output", "filegraph", "generate_unit_tests", "lint",
    "list_changes", "list_conda_envs", "list_input_changes", "list_params_changes", "list_rules",
    "list_target_rules", "list_untracked", "print_compilation", "report", "reporter", "rulegraph",
    "summary", "detailed_summary", "touch", "unlock",
)  # fmt: skip
"""Options with which Snakemake does something other than run jobs."""


class _Ended(BaseException):
    """Ends Snakemake before anything runs. Not an `Exception`, so Snakemake does not catch it."""


def dry_run(arguments: Sequence[str], look: Callable[[Any, Any, Any], _T]) -> _T | None:
    """Call `look` on the workflow that `snakemake` would run with `arguments`.

    Args:
        arguments: as for the command `snakemake`.
        look: called once all jobs are known, in the workflow's directory, with the workflow, the
            executor's settings and Snakemake's logger.

    Returns:
        The result of `look`, or None if something is wrong, which Snakemake has reported then.

    Raises:
        UserError: the arguments do not run a workflow with this executor.
        SystemExit: Snakemake does not understand the arguments, and has reported it.
    """
    from snakemake import cli
    from snakemake.logging import logger
    from snakemake_interface_common.exceptions import ApiError
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    def only_trouble(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or verbose

    class Looking:
        """Takes the place of an executor, for which Snakemake accepts a class only."""

        def __init__(self, workflow: Any, logger: Any) -> None:
            try:
                found.append(look(workflow, settings, logger))
            except MantikError as error:
                # For other errors Snakemake would show the lines of code that raised them.
                raise ApiError(str(error)) from None
            raise _Ended

    found: list[_T] = []
    verbose = False
    registry = ExecutorPluginRegistry()
    usual = registry.plugins["dryrun"]
    # Output of the Snakefile does not belong to the command's own output.
    with redirect_stdout(sys.stderr):
        parser, args = _parsed(cli, arguments)
        verbose = args.verbose
        settings = registry.get_plugin(_NAME).get_settings(args)
        common = replace(usual.common_settings, non_local_exec=True)
        registry.plugins["dryrun"] = replace(usual, executor=Looking, common_settings=common)
        logger.addFilter(only_trouble)
        try:
            cli.args_to_api(args, parser)
        except _Ended:
            return found[0]
        finally:
            logger.removeFilter(only_trouble)
            registry.plugins["dryrun"] = usual
    return None


def _parsed(cli: Any, arguments: Sequence[str]) -> tuple[Any, Any]:
    try:
        parser, args = cli.parse_args(list(arguments))
    except SystemExit:
        raise
    except Exception as error:  # noqa: BLE001 - any error that Snakemake's main would report
        raise UserError(f"Snakemake does not accept these arguments: {error}") from None
    if args.report_after_run:
        args.report = args.reporter = None
        args.report_after_run = False
    for name in _OTHER_WORK:
        if getattr(args, name, None):
            raise UserError(
                f"with --{name.replace('_', '-')} Snakemake runs no jobs", do="Remove the option"
            )
    if args.executor not in (None, _NAME):
        raise UserError(
            f"--executor {args.executor} submits nothing to a site",
            do=f"Remove the option, or use --executor {_NAME}",
        )
    args.executor = _NAME
    args.dryrun = True
    args.jobs = args.jobs or NO_LIMIT
    args.cores = args.cores or NO_LIMIT
    args.quiet = set()
    return parser, args
