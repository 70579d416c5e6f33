"""Notify the user of a run's first failure and of its end: run the command of `--mantik-notify`.

Nothing here can fail a run, or delay its end for longer than a limit. The command may hold a
secret: no message contains it.
"""

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..common.errors import UserError, one_line
from ..common.humanize import humanize_count, humanize_duration
from ..engine.request import JobNumber, Outcome
from ..jobs.reasons import Reason, find_cause, same_cause
from ..rules.units import job_display_name, list_members

COMMAND_WAIT_S: Final = 20.0
_LONGEST_WAIT_S: Final = COMMAND_WAIT_S + 2.0
_AT_ONCE_S: Final = 3.0
"""Most seconds that the command may take, and that the end of a run waits for it: usually, and if
the user ends the run at once."""

_OUTPUT_BYTES: Final = 2000
_MOST_LISTED: Final = 20
_MOST_NAMED: Final = 3
"""Most failed jobs in the values and in the words of a notice."""

_HIDDEN_FROM: Final = 8
"""Words of the command with so many characters may be secrets."""

ENDS: Final = {
    "succeeded": "succeeded",
    "failed": "failed",
    "cancelled": "was cancelled",
    "detached": "was left to go on by itself",
}
"""How a run ended, and that in words; `detached`: Snakemake ended, its jobs at the sites go on."""


class RunNotices:
    """The notices of one run: one of the first failure, if the run goes on, and one of its end."""

    def __init__(
        self, workflow: Any, setting: str, logger: Any, outcomes: Mapping[JobNumber, Outcome]
    ) -> None:
        """Prepare; `setting` is the value of the option, `outcomes` has those of failed jobs.

        Raises:
            UserError: it is no command.
        """
        self._workflow = workflow
        self._logger = logger
        self._directory = Path.cwd()
        self._words = _read_command(setting, self._directory)
        self._hidden = [w for w in re.split(r"[\s'\";|()]+", setting) if len(w) >= _HIDDEN_FROM]
        self._threads: list[threading.Thread] = []
        self._began = time.time()
        self._outcomes = outcomes
        self._announced = False
        if "://" in setting and any(setting in word for word in sys.argv[1:]):
            logger.warning(
                "The command of --mantik-notify holds an address, and Snakemake writes its command"
                " line into its log. If the address is secret, set SNAKEMAKE_MANTIK_NOTIFY or a"
                " profile's mantik-notify instead."
            )

    def look(self, sites: Sequence[str]) -> None:
        """Announce the first failure, if the run goes on. Any thread may call this method."""
        scheduler = self._workflow.scheduler
        if self._announced or scheduler is None or not scheduler.failed or not scheduler.running:
            return
        self._send(None, sites)

    def end(self, outcome: str, sites: Sequence[str]) -> None:
        """Announce the end of the run, one of `ENDS`; `wait` waits until that is delivered."""
        self._send(outcome, sites)

    def wait(self, *, at_once: bool) -> None:
        """Wait for notices to be delivered, some seconds at most; Ctrl-C ends that."""
        until = time.monotonic() + (_AT_ONCE_S if at_once else _LONGEST_WAIT_S)
        with suppress(KeyboardInterrupt):
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _send(self, outcome: str | None, sites: Sequence[str]) -> None:
        """Begin to deliver a notice, in a thread of its own.

        An error would make Snakemake cancel jobs, or end without closing the run: it is a warning.
        """
        self._announced = True
        name = f"The notice of the run's {'first failure' if outcome is None else 'end'}"
        try:
            given = json.dumps(self._describe(outcome, sites))
            thread = threading.Thread(target=self._deliver, args=(name, given), daemon=True)
            thread.start()
            self._threads.append(thread)
        except Exception as error:  # noqa: BLE001 - such as a limit on the number of threads
            why = one_line(f"{type(error).__name__}: {error}")
            self._logger.warning(f"{name} could not be sent ({why}). Nothing else is affected.")

    def _deliver(self, name: str, given: str) -> None:
        try:
            why = self._run(given)
        except Exception as error:  # noqa: BLE001 - a bug of ours is no reason for a run to fail
            why = f"cannot be run ({getattr(error, 'strerror', None) or type(error).__name__})"
        if why:
            program = Path(self._words[0]).name
            self._logger.warning(f"{name} could not be delivered: {program} {why}.")

    def _run(self, given: str) -> str:
        """Run the command with a text on its standard input; return why it failed, if it did."""
        # Files, not pipes: a child that it leaves in the background may keep these open.
        with tempfile.TemporaryFile() as taken, tempfile.TemporaryFile() as said:
            taken.write(given.encode())
            taken.seek(0)
            process = subprocess.Popen(
                self._words,
                cwd=self._directory,
                stdin=taken,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C does not end it
            )
            try:
                code = process.wait(COMMAND_WAIT_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"did not end within {COMMAND_WAIT_S:.0f} s and was ended"
            said.seek(max(0, said.tell() - _OUTPUT_BYTES))
            lines = said.read().decode(errors="replace").strip().splitlines()
        last = f": {one_line(lines[-1])}" if lines else ""
        for word in self._hidden:
            last = last.replace(word, "…")
        return f"ended with exit code {code}{last}" if code else ""

    def _describe(self, outcome: str | None, sites: Sequence[str]) -> Mapping[str, object]:
        """Return what the command gets; docs/watching.md lists the keys."""
        scheduler = self._workflow.scheduler
        failed = describe_failures(self._workflow, self._outcomes)
        total, done = len(self._workflow.dag), scheduler.finished_jobs
        running = 0 if outcome is not None else len(tuple(scheduler.running))
        seconds = time.time() - self._began

        named = ", ".join(map(_name, failed[:_MOST_NAMED]))
        if len(failed) > _MOST_NAMED:
            named += f" and {len(failed) - _MOST_NAMED} more"
        counts = f"{done} of {humanize_count(total, 'job')} done"
        if outcome is None:
            what = f"{named} failed"
            counts += f", {running} still running" if running else ""
        else:
            what = f"{ENDS[outcome]} after {humanize_duration(seconds)}"
            counts += f", {len(failed)} failed: {named}" if failed else ""
        return {
            "event": "failed" if outcome is None else "finished",
            "outcome": outcome,
            "text": one_line(f"{self._directory.name}: {what}; {counts}."),
            "directory": str(self._directory),
            "host": platform.node(),
            "sites": list(sites),
            "total": total,
            "done": done,
            "running": running,
            "failed": len(failed),
            "failed_jobs": failed[:_MOST_LISTED],
            "began": self._began,
            "seconds": seconds,
        }


def describe_failures(
    workflow: Any, outcomes: Mapping[JobNumber, Outcome]
) -> list[Mapping[str, str | None]]:
    """Return what is known of each failed job; docs/watching.md lists the keys."""
    found: list[Mapping[str, str | None]] = []
    for job in tuple(workflow.scheduler.failed) if workflow.scheduler is not None else ():
        members = list_members(job)
        names = [job_display_name(member) for member in members]
        outcome = outcomes.get(job.jobid)
        found.append({
            "job": names[0] if len(names) == 1 else f"group of {', '.join(names)}",
            "rule": members[0].rule.name,
            "site": outcome.site if outcome else "",
            "site_job": outcome.site_job if outcome else "",
            "reason": outcome.reason if outcome else None,
            "message": one_line(outcome.message.strip().partition("\n")[0]) if outcome else "",
            "log": str(outcome.log or "") if outcome else "",
        })  # fmt: skip
    return found


def sum_up_failures(failed: Sequence[Mapping[str, str | None]]) -> str:
    """Return the text for the end of a run: failed jobs by cause, and how to see their output."""
    causes: dict[object, list[Mapping[str, str | None]]] = {}
    for each in failed:
        cause = same_cause(_cause(each), each["job"] or "")
        causes.setdefault((each["rule"], each["reason"], cause), []).append(each)
    lines = [f"{humanize_count(len(failed), 'job')} failed:"]
    for first, *others in list(causes.values())[:_MOST_LISTED]:
        name = first["job"] or ""
        jobs = f"{first['rule']} ({humanize_count(len(others) + 1, 'job')})" if others else name
        lines.append(f"  {jobs}: {_cause(first)}")
        if first["log"]:
            group = name.startswith("group of ")
            show = first["log"] if group else f"smk-mantik logs {shlex.join(name.split(' '))}"
            lines.append(f"    {show}")
    if len(failed) > min(len(causes), _MOST_LISTED):
        lines.append("smk-mantik jobs --failed lists them all.")
    return "\n".join(lines)


def _cause(failed: Mapping[str, str | None]) -> str:
    words = failed["message"] or "see its error above"
    return find_cause(words, failed["job"] or "", failed["site"] or "")


def _name(failed: Mapping[str, str | None]) -> str:
    """Return a failed job's name, and where and why it failed."""
    why = f" ({Reason(failed['reason']).words})" if failed["reason"] else ""
    return f"{failed['job']}{' at ' if failed['site'] else ''}{failed['site']}{why}"


def _read_command(setting: str, directory: Path) -> Sequence[str]:
    where = "--mantik-notify"
    try:
        words = shlex.split(setting)
    except ValueError as error:
        raise UserError(
            f"the command cannot be read ({error})", where=where, do="Correct its quotes"
        ) from None
    program = os.path.expanduser(words[0]) if words else ""
    found = shutil.which(directory / program if "/" in program else program) if program else None
    if found is None:
        # Of an address no more is shown than its scheme.
        raise UserError(
            f"there is no command {program.partition('://')[0]!r} on this machine",
            where=where,
            do="Give a command that can be executed, which gets JSON on its standard input, such as"
            " curl with an address; a command of the shell's own needs sh -c '…'",
        )
    return (os.path.abspath(found), *words[1:])
