"""Write the log messages about a job: its site, its times, and advice after a failure."""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, one_line, printable
from ..common.humanize import humanize_count, humanize_duration
from ..jobs.markers import Marker
from ..jobs.paths import display_path
from ..jobs.reasons import Reason
from ..jobs.script import CHECKPOINT, PREDECESSORS
from ..journal import AttemptRecord
from ..sites.base import JobState

_TAIL_LINES = 20
_LAST_LETTERS = 300
"""Most characters of an output's last line in a message of one line."""
_NOT_STARTED = "mantik: the job was not started: its step "
"""How the script's last line begins, which follows the one with the cause (`jobs/bash/main.sh`)."""
_MOST_NAMED = 5
"""Most jobs that a message names."""

_ADVICE = {
    Reason.TIME_LIMIT: "Request more time: set resources: runtime=MINUTES in the rule, or"
    " Resources: Runtime in the backend config",
    Reason.OUT_OF_MEMORY: "Request more memory: set resources: mem_mb=… in the rule, or"
    " Resources: MemoryPerNode in the backend config",
    Reason.NODE_FAILURE: "The node failed, not the job. Run it again; --retries does so"
    " automatically",
    Reason.PREEMPTED: "The site stopped the job in favour of another. Run it again; --retries does"
    " so automatically",
    Reason.CANCELLED: "The job was cancelled at the site. Run it again if that was not intended",
    Reason.REJECTED: "Correct what the site refuses and start again",
    Reason.LAUNCH_FAILURE: "The site could not start it. See the site's message above",
}
_STEPS = {
    PREDECESSORS: (
        "because the jobs that make its inputs had not succeeded",
        "Start again",
    ),
    "workspace": (
        "when it entered the workspace",
        "Check whether that is full or was purged, and start again",
    ),
    "secrets": (
        "when it read the values of envvars:",
        "Check whether the workspace is full or was purged, and start again",
    ),
    "bundles": (
        "when it unpacked its inputs",
        "Correct the cause that its output names, such as a full file system, and start again",
    ),
    "inputs": (
        "because inputs were missing",
        "Something removed files at the site while the job waited; start again",
    ),
    "outputs": (
        "when it made room for its outputs",
        "Check in its output which path cannot be removed or made",
    ),
    CHECKPOINT: (
        "when it looked for its checkpoint",
        "Check that the command saves its state more often than the walltime ends",
    ),
    "modules": (
        "when it loaded the modules",
        "Correct Environment: Modules in the backend config and start again",
    ),
    "variables": (
        "when it set the variables",
        "Correct Environment: Variables in the backend config and start again",
    ),
    "before": (
        "in PreRunCommandOnComputeNode",
        "Correct that command in the backend config and start again",
    ),
    "python": (
        "when it made or activated the virtual environment",
        "Correct Environment: Python in the backend config or its file of requirements, or make the"
        " environment at the site: it is not uploaded",
    ),
    "temporary": (
        "when it looked for a directory for temporary files",
        "Correct the cause that its output names, and start again",
    ),
    "image": (
        "when it looked for Apptainer and its image",
        "Correct Environment: Apptainer in the backend config, or load the module that provides"
        " apptainer",
    ),
    "container": (
        "when it started the container",
        "Correct Environment: ContainerEngine or Pyxis in the backend config, or the mounts; its"
        " output names the cause",
    ),
    "own": (
        "when it made or looked for the rule's own environment",
        "Correct the cause that its output names, or conda:, container: or envmodules: of the rule",
    ),
}
"""For each step before the command (`jobs.script.STEPS`): its words in a message, and advice."""
_UNKNOWN_STEP = ("in its set-up", "Correct the cause that its output names and start again")


@dataclass(frozen=True)
class LastWords:
    """The last output of a failed job.

    Attributes:
        output: its output, or the end of it.
        path: local path of its log, which lacks a part of a very long output; None without one.
        logs: paths and ends of the rule's own log files.
    """

    output: bytes
    path: Path | None
    logs: tuple[tuple[str, bytes], ...] = ()


def waiting_message(name: str, site: str, site_job: str, behind: Sequence[str]) -> str:
    """Return the message about a job that waits at its site for the jobs `behind`, if known."""
    named = ", ".join(behind[:_MOST_NAMED]) + (" …" if len(behind) > _MOST_NAMED else "")
    named = named or "the jobs that make its inputs"
    return f"{name}: waits for {named} at {site}, as {site_job}."


def submitted_message(name: str, site: str, site_job: str, queue: str | None) -> str:
    """Return the message that a job has been submitted."""
    return f"{name}: submitted to {site}, queue {queue or 'default'}, as {site_job}."


def started_message(name: str, site: str) -> str:
    """Return the message that a job runs."""
    return f"{name}: runs at {site}."


def finished_message(
    name: str, site: str, waited: float | None, ran: float, log: Path | None
) -> str:
    """Return the message that a job has succeeded; the seconds it `waited` may be unknown."""
    times = f"ran {humanize_duration(ran)}"
    if waited is not None:
        times = f"waited {humanize_duration(waited)}, {times}"
    kept = f"; output in {log}" if log is not None else ""
    return f"{name}: done at {site}, {times}{kept}."


def ended_message(
    name: str, site: str, reason: Reason, words: str, log: Path | None, *, end: bytes
) -> str:
    """Return the message that a job has failed: one line with the reason and its output's path.

    `end` is the end of its output, of which the message shows the last line with a cause.
    """
    lines = end.decode(errors="replace").strip().splitlines()
    last = one_line(next((line for line in reversed(lines) if _NOT_STARTED not in line), ""))
    ends = f", which ends with: {last[:_LAST_LETTERS]}" if last else "."
    kept = f" Output in {log}{ends}" if log is not None else ""
    return f"{name}: failed at {site} ({reason.words}). {one_line(words).rstrip('.')}.{kept}"


def describe_os_error(error: OSError) -> str:
    """Return the operating system's message and the file that it is about."""
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what


def _tail(log: bytes) -> str:
    lines = printable(log.decode(errors="replace")).strip().splitlines()[-_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines) if lines else "    (no output)"


def compose(what: str, where: str, said: LastWords, advice: str) -> str:
    """Return the message about a job that failed: `what` happened, `where`, and what to do."""
    shown = ""
    if said.output.strip() or not said.logs:
        shown = f"Its output ended with:\n{_tail(said.output)}\n"
    for path, end in said.logs:
        shown += f"Its log file {path} ended with:\n{_tail(end)}\n"
    kept = f"All of its output: {said.path}. " if said.path is not None else ""
    return f"{what.removesuffix('.')} ({where}).\n{shown}{kept}{advice}.\n"


def failed_message(
    marker: Marker,
    where: str,
    said: LastWords,
    reason: Reason,
    members: Sequence[tuple[str, int]] = (),
) -> str:
    """Return the message about a job whose marker reports a failure.

    `where` names the site and the site's id of the job. `members` are the names and exit codes of
    the failed members of a group.
    """
    if reason is Reason.TIME_LIMIT:
        return compose("The job reached its time limit", where, said, _ADVICE[reason])
    if marker.signal:
        why = "" if reason is Reason.CANCELLED else f": {reason.words}"
        what = f"The job was ended by a signal ({marker.signal}){why}"
        return compose(what, where, said, _ADVICE.get(reason, _ADVICE[Reason.CANCELLED]))
    if marker.failed_step:
        words, advice = _STEPS.get(marker.failed_step, _UNKNOWN_STEP)
        what = f"The job failed before its command, {words}"
        return compose(what, where, said, advice)
    ends = [f"{name} ended with {_code(code)}" for name, code in members]
    what = "; ".join(ends) or f"The command ended with {_code(marker.exit_code)}"
    advice = "Correct the command or its inputs and start again"
    if reason in _ADVICE:
        what, advice = f"{what}: {reason.words}", _ADVICE[reason]
    elif _signal(marker.exit_code) == "SIGKILL":
        advice = f"This often means a lack of memory. {_ADVICE[Reason.OUT_OF_MEMORY]}"
    return compose(what, where, said, advice)


def _code(exit_code: int) -> str:
    killer = _signal(exit_code)
    meaning = f", which means that it was ended by {killer}" if killer else ""
    return f"exit code {exit_code}{meaning}"


def _signal(exit_code: int) -> str:
    """Return the name of the signal that a shell's exit code stands for, or an empty text."""
    try:
        return signal.Signals(exit_code - 128).name
    except ValueError:
        return ""


def stopped_message(state: JobState | None, where: str, said: LastWords) -> str:
    """Return the message about a job that ended without a marker; `state` is the scheduler's."""
    reason = state.reason if state is not None and state.reason is not None else Reason.UNKNOWN
    detail = f": {printable(state.detail)}" if state is not None and state.detail else ""
    advice = _ADVICE.get(reason, "Run it again; if it happens again, ask the site's support")
    if reason is Reason.REJECTED and "invalid account" in detail.lower():
        advice = (
            "Set MANTIK_COMPUTE_BUDGET_ACCOUNT, or slurm_account of the rule, to an account of"
            " yours there and start again"
        )
    if reason is Reason.UNKNOWN and detail:
        what = f"The job ended at the site{detail}"
    elif reason in (Reason.UNKNOWN, Reason.SUCCESS, Reason.EXIT_CODE):
        what = f"The job ended at the site without reporting how{detail}"
    else:
        what = f"The job ended: {reason.words}{detail}"
    return compose(what, where, said, advice)


def unchecked_message(names: Sequence[str]) -> str:
    """Return the message about resources that cannot be checked before the submission."""
    return (
        f"{', '.join(names)}: not checked, since the site reports no limits of the queue; if a job"
        " exceeds one, the scheduler refuses it, or lets it wait for a reason that is reported"
    )


def presubmitted_message(records: Sequence[AttemptRecord]) -> str:
    """Return the message about jobs that go on although no controller runs."""
    awaited = {maker for record in records for maker in record.makers.values()}
    last = [record.name for record in records if record.id not in awaited]
    named = ", ".join(last[:_MOST_NAMED]) + (" …" if len(last) > _MOST_NAMED else "")
    if len(records) == 1:
        return (
            f"1 job waits at its site and starts without this machine when the jobs before it have"
            f" ended: {named}."
        )
    return (
        f"{humanize_count(len(records), 'job waits', 'jobs wait')} at their sites and start without"
        f" this machine when the jobs before them have ended; the last: {named}."
    )


def stays_message(site: str, users: Iterable[AttemptRecord]) -> str:
    """Return that a removed file stays at a site while it is used, to follow the file's path."""
    names = ", ".join(dict.fromkeys(user.name for user in users))
    return f"stays at {site} until a run after the end of {names}, which uses it."


def lost_error(
    path: str, where: object, how: str = "is no longer at the place where it was made"
) -> UserError:
    """Return the error that a remote output does not exist any more."""
    do = "Run the workflow again: the rule that makes it then runs, too"
    return UserError(f"{display_path(path)} {how}", where=str(where), do=do)


def learned_error(paths: Iterable[str]) -> UserError:
    """Return the error that Snakemake has decided what to run without these remote outputs."""
    first, *others = sorted(paths)
    return UserError(
        f"the journal did not know of {humanize_count(1 + len(others), 'output')} at the sites,"
        f" {first} for example; now it does",
        do="Start again: what is there is not made again",
    )
