"""A dry run of Snakemake that hands over what it found, and does nothing else.

Snakemake reads its own command line, profiles, configuration and Snakefile, and works out which
jobs would run; then, where it would make an executor, it makes one of ours that looks at them and
ends the run. So nothing can run, not even local rules, and all up to there is as it would be.

What of Snakemake is used: `cli.parse_args` and `cli.args_to_api`, which its own `main` is made of,
and its registry of executors, where a dry run takes the executor `dryrun` from.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError

_T = TypeVar("_T")

_NAME: Final = "mantik"

NO_LIMIT: Final = sys.maxsize
"""Stands for the numbers of jobs and of cores where the user gives none. A dry run would take one
core, and rules no more threads; a run at sites has no number, and fails where a rule asks for it.
"""

_OTHER_WORK: Final = (
    "archive", "cleanup_metadata", "cleanup_shadow", "conda_cleanup_envs",
    "conda_create_envs_only", "container_cleanup_images", "containerize", "d3dag", "dag",
    "delete_all_output", "delete_temp_output", "filegraph", "generate_unit_tests", "lint",
    "list_changes", "list_conda_envs", "list_input_changes", "list_params_changes", "list_rules",
    "list_target_rules", "list_untracked", "print_compilation", "report", "reporter", "rulegraph",
    "summary", "detailed_summary", "touch", "unlock",
)  # fmt: skip
"""Options with which Snakemake does something else than to run jobs."""


class _Ended(BaseException):
    """Ends Snakemake before anything could run; no error, so nothing of Snakemake catches it."""


class _Look(Generic[_T]):
    """What is looked up, and what was found."""

    def __init__(self, look: Callable[[Any, Any, Any], _T], options: Any) -> None:
        self._look = look
        self._options = options
        self.found: list[_T] = []

    def executor(self) -> type:
        """A class that Snakemake takes for an executor's."""
        outer = self

        class Looking:
            def __init__(self, workflow: Any, logger: Any) -> None:
                from snakemake_interface_common.exceptions import ApiError

                try:
                    outer.found.append(outer._look(workflow, outer._options, logger))
                except MantikError as error:
                    # Of other errors Snakemake would show the lines of code that they came from.
                    raise ApiError(str(error)) from None
                raise _Ended

        return Looking


def dry_run(arguments: Sequence[str], look: Callable[[Any, Any, Any], _T]) -> _T | None:
    """What `look` finds in a workflow as `snakemake` with `arguments` would run it.

    Args:
        arguments: as for the command `snakemake`.
        look: is called once all jobs are known, in the workflow's directory, with the workflow, the
            executor's settings and Snakemake's logger.

    Returns:
        What it found; None if something is wrong, which Snakemake has told then.

    Raises:
        UserError: the arguments mean something else than running a workflow with this executor.
        SystemExit: Snakemake does not understand them, and has told so.
    """
    from snakemake import cli
    from snakemake.logging import logger
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    def only_trouble(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or verbose

    verbose = False
    registry = ExecutorPluginRegistry()
    usual = registry.plugins["dryrun"]
    # What the Snakefile prints is no part of what we tell.
    with redirect_stdout(sys.stderr):
        parser, args = _parsed(cli, arguments)
        verbose = args.verbose
        search = _Look(look, registry.get_plugin(_NAME).get_settings(args))
        common = replace(usual.common_settings, non_local_exec=True)
        registry.plugins["dryrun"] = replace(
            usual, executor=search.executor(), common_settings=common
        )
        logger.addFilter(only_trouble)
        try:
            cli.args_to_api(args, parser)
        except _Ended:
            return search.found[0]
        finally:
            logger.removeFilter(only_trouble)
            registry.plugins["dryrun"] = usual
    return None


def _parsed(cli: Any, arguments: Sequence[str]) -> tuple[Any, Any]:
    try:
        parser, args = cli.parse_args(list(arguments))
    except SystemExit:
        raise
    except Exception as error:  # noqa: BLE001 - of many kinds: what Snakemake's main tells as well
        raise UserError(f"Snakemake does not take these arguments: {error}") from None
    if args.report_after_run:
        args.report = args.reporter = None
        args.report_after_run = False
    for name in _OTHER_WORK:
        if getattr(args, name, None):
            raise UserError(
                f"with --{name.replace('_', '-')} Snakemake runs no jobs", do="Leave it out"
            )
    if args.executor not in (None, _NAME):
        raise UserError(
            f"--executor {args.executor} sends nothing to a site",
            do=f"Leave it out, or name {_NAME}",
        )
    args.executor = _NAME
    args.dryrun = True
    args.jobs = args.jobs or NO_LIMIT
    args.cores = args.cores or NO_LIMIT
    args.quiet = set()
    return parser, args
