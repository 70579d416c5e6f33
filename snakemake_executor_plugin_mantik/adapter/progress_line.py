"""Show how far a run is, in one line below Snakemake's log on a terminal."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from snakemake_executor_plugin_mantik.adapter.bottom_line import BottomLine
from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.engine.transfer_meter import (
        TransferMeter,
        TransferView,
    )

PROGRESS_CHOICES: Final = ("auto", "none")

_VERBS: Final = {
    "upload": "uploading", "download": "downloading", "move": "moving", "import": "importing",
}  # fmt: skip
"""For each direction of a transfer (`engine.transfer_meter.Direction`)."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run is.

    Attributes:
        done, total, failed: numbers of jobs, local ones among them.
        states: numbers of jobs by what they do: running, queued, staging.
        transfers: what is under way.
    """

    done: int
    total: int
    failed: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    transfers: Sequence["TransferView"] = ()


def describe_progress(progress: RunProgress, width: int) -> str:
    """Return one line of at most `width` characters; what matters least is left out first."""
    jobs = [f"{progress.done} of {humanize_count(progress.total, 'job')} done"]
    if progress.failed:
        jobs.append(f"{progress.failed} failed")
    jobs += [f"{number} {state}" for state, number in progress.states.items() if number]
    short = [f"{progress.done}/{progress.total} done", *jobs[1:]]
    forms = [(jobs, 3), (jobs, 2), (short, 2), (short, 1)]
    forms += [(short[:number], 0) for number in range(len(short), 0, -1)]
    lines = [
        " | ".join(filter(None, [", ".join(words), _transfers(progress.transfers, detail)]))
        for words, detail in forms
    ]
    return next((line for line in lines if len(line) <= width), lines[-1][:width])


def _transfers(transfers: Iterable["TransferView"], detail: int) -> str:
    """Return the sums of transfers in each direction.

    `detail` is 1 for the share that has come, 2 for size and rate, too, 3 for the time left; with 0
    return ''.
    """
    found: defaultdict[str, list[TransferView]] = defaultdict(list)
    for transfer in transfers:
        found[_VERBS[transfer.direction]].append(transfer)
    words = []
    for verb, views in found.items() if detail else ():
        size, moved = sum(view.size for view in views), sum(view.moved for view in views)
        rate = sum(view.rate or 0.0 for view in views)
        share = humanize_size(moved) if detail == 3 else f"{moved / size:.0%}"
        text = f"{verb} {share}" if detail == 1 else f"{verb} {share} of {humanize_size(size)}"
        if rate and detail > 1:
            text += f", {humanize_size(rate)}/s"
        if rate and detail == 3:
            text += f", {humanize_duration((size - moved) / rate)} left"
        words.append(text)
    return "; ".join(words)


def open_progress_line(
    workflow: Any,
    logger: logging.Logger,
    count: Callable[[], Mapping[str, int]],
    meter: "TransferMeter",
) -> BottomLine | None:
    """Show a run's progress, where Snakemake logs to a terminal; return None where it does not.

    Also return None with `--quiet`, with `--mantik-progress none`, and for terminals that cannot
    erase. `count` returns `RunProgress.states`.
    """
    from snakemake.settings.enums import Quietness

    quiet = set(workflow.output_settings.quiet or ())
    # A logger plugin that writes to the terminal may have a progress bar of its own.
    handlers = [each for each in logger.handlers if each.name == "DefaultStreamHandler"]
    terminal: TextIO | None = getattr(handlers[0], "stream", None) if handlers else None
    if terminal is None or not terminal.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    if workflow.executor_settings.progress == "none":
        return None
    if quiet & {Quietness.PROGRESS, Quietness.ALL}:
        return None

    def look() -> RunProgress:
        scheduler = workflow.scheduler
        return RunProgress(
            done=scheduler.finished_jobs if scheduler is not None else 0,
            total=len(workflow.dag),
            failed=len(scheduler.failed) if scheduler is not None else 0,
            states=count(),
            transfers=meter.views(),
        )

    seen = look()

    def refresh() -> None:
        nonlocal seen
        seen = look()

    def text(width: int) -> str:
        scheduler = workflow.scheduler
        # Children of local jobs write to the terminal themselves.
        if scheduler is not None and any(job.is_local for job in tuple(scheduler.running)):
            return ""
        return describe_progress(seen, width)

    line = BottomLine(terminal, text, refresh)
    line.open(handlers)
    return line
