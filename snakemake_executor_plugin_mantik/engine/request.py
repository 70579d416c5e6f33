"""What the executor asks of the engine, and what it hears back: values."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile

JobNumber = int | str
"""Snakemake's id of a job in a run: a number, of a group a UUID."""


@dataclass(frozen=True)
class Upload:
    """A file that a job needs beside its inputs.

    Attributes:
        path: where it belongs in the workspace.
        local: where it is on this machine, if it is a file here.
        content: what it holds, if it is none.
    """

    path: str
    local: Path | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class GroupJob:
    """One of several jobs of Snakemake's that run as one.

    Attributes:
        job: what it is, the same in every run, as `JobRequest.job`.
        name: readable: the rule and its wildcards.
        logs: its own log files.
        measured: where its measurements go (`Benchmark.path`), empty if nothing is measured.
    """

    job: str
    name: str
    logs: tuple[str, ...] = ()
    measured: str = ""


@dataclass(frozen=True)
class JobGroup:
    """Several jobs of Snakemake's that run as one.

    Attributes:
        members: in the order of their numbers.
        report: the output of kind `log` in which a line for each member that failed tells its
            number and exit code.
    """

    members: tuple[GroupJob, ...]
    report: str


@dataclass(frozen=True)
class JobRequest:
    """One job that Snakemake wants run, with all that concerns it and nothing of a site's API.

    Attributes:
        number: Snakemake's id of the job in this run, for messages and answers.
        job: what the job is, the same in every run (rule, wildcards, outputs).
        rule: the rule's name.
        name: readable: the rule and its wildcards.
        site: the name of the site to run at.
        command: what the shell is given after `-c`.
        shell: base name of the shell.
        resources: the rule's resources without Snakemake's built-in defaults.
        threads: the rule's threads.
        variables: environment variables that Snakemake sets around a command.
        inputs: paths relative to the workflow's directory.
        uploads: further files that the job needs.
        outputs: outputs and logs.
        benchmark: how the command is measured, if it is; the first of its commands is `command`.
        umask: file mode mask of this process: what the job makes gets the modes that it would get
            here; None for the site's own.
        own_environment: whether the command makes its environment itself: the image of the backend
            config is not used.
        secrets: values of the workflow's `envvars:`; never in a script, a log or the journal.
        parameters: the rule's parameters as text, those derived from other things left out.
        forced: whether the user asked to run it whatever is there: what an earlier run finished
            is not taken for it.
        group: the jobs that it consists of, if it is a group of jobs.
        launches: whether the command starts its tasks itself (MPI).
        full: whether the command runs a Snakemake at the site.
        incomplete: whether the outputs of a job that failed come back.
        subject: what an observer wants to know of it; nothing to the engine.
    """

    number: JobNumber
    job: str
    rule: str
    name: str
    site: str
    command: str
    shell: str
    resources: Mapping[str, object]
    threads: int
    variables: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[OutputFile, ...]
    uploads: tuple[Upload, ...] = ()
    benchmark: Benchmark | None = None
    umask: int | None = None
    own_environment: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    parameters: str = ""
    forced: bool = False
    group: JobGroup | None = None
    launches: bool = False
    full: bool = False
    incomplete: bool = False
    subject: object = None

    @property
    def members(self) -> Mapping[str, str]:
        """Of a group, the names of the jobs that it consists of, by these jobs."""
        return {m.job: m.name for m in self.group.members} if self.group is not None else {}

    @property
    def jobs(self) -> tuple[str, ...]:
        """What it is, and what it consists of: an open try of any of these is in its way."""
        return (self.job, *self.members)

    @property
    def measured(self) -> tuple[str, ...]:
        """For each job that it consists of, where its measurements go; empty if nothing is."""
        if self.group is not None:
            return tuple(member.measured for member in self.group.members)
        return (self.benchmark.path if self.benchmark is not None else "",)

    @property
    def updated(self) -> tuple[OutputFile, ...]:
        """The outputs that the job changes rather than makes: it needs what they hold."""
        return tuple(output for output in self.outputs if output.keep)

    def made_of(
        self, inputs: Mapping[str, str], environment: str, code: Mapping[str, str]
    ) -> dict[str, str]:
        """What must be the same for the result of one try to be the result of another: digests.

        Args:
            inputs: checksum of each input file and upload, and of what it updates.
            environment: the site's environment as text.
            code: checksum of each source that the command names.
        """
        below = tuple(f"{output.path}/" for output in self.updated)
        before = {path: sha for path, sha in inputs.items() if f"{path}/".startswith(below)}
        inputs = {path: sha for path, sha in inputs.items() if path not in before}
        parts: dict[str, object] = {
            "command": [self.command, self.shell, self.benchmark and self.benchmark.commands],
            "parameters": self.parameters,
            "site": self.site,
            "environment": [environment, self.own_environment],
            "variables": [sorted(self.variables.items()), sorted(self.secrets)],
            "outputs": [(o.path, o.kind, o.directory) for o in self.outputs],
        }
        if self.updated:
            parts[UPDATED] = sorted(before.items())
        files = [(f"{kind} {path}", found) for kind, of in (("input", inputs), ("code", code))
                 for path, found in sorted(of.items())]  # fmt: skip
        if len(files) <= _MOST_NAMED:
            parts |= dict(files)
        else:
            parts |= {"inputs": sorted(inputs.items()), "code": sorted(code.items())}
        return {name: _digest(part) for name, part in parts.items()}


_MOST_NAMED = 100
"""A journal entry names the files that a job is made of one by one, up to that many."""


UPDATED = "updated"
"""The part of what a job is made of that it changes itself: what its `update()` outputs hold."""


def fingerprint_of(made_of: Mapping[str, str]) -> str:
    """What a job is made of, as one digest; what it changes itself in a second one, after a `+`."""
    parts = sorted((name, digest) for name, digest in made_of.items() if name != UPDATED)
    return "+".join([_digest(parts), *([made_of[UPDATED]] if UPDATED in made_of else [])])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as the executor reports it to Snakemake.

    Attributes:
        number: that of the request.
        try_id: the try whose end it is; empty if there was none.
        succeeded: whether the job did, and all its outputs are here.
        message: for a failure: what happened, where, and what to do now.
        log: the job's log, where it is here.
        site_job: the site's id of the job, empty if it has none.
        reason: why it failed.
        site: where it ran or was to run; empty if it did not get that far.
        failed: of a group, the members that failed, as far as that is known (`Member.job`).
    """

    number: JobNumber
    try_id: str
    succeeded: bool
    message: str = ""
    log: Path | None = None
    site_job: str = ""
    reason: Reason = Reason.SUCCESS
    site: str = ""
    failed: tuple[str, ...] = ()
