"""Define the values that the executor passes to the engine and gets back."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..jobs.reasons import Reason
from ..jobs.segments import Continuation
from ..jobs.spec import Benchmark, OutputFile
from ..journal import RemoteOutput

JobNumber = int | str
"""Snakemake's id of a job in a run: a number, or a UUID for a group."""


@dataclass(frozen=True)
class Upload:
    """A file that a job needs besides its inputs.

    Attributes:
        path: its path in the workspace.
        local: its local path, if it is a local file.
        content: its content, if it is no local file.
    """

    path: str
    local: Path | None = None
    content: bytes | None = None


@dataclass(frozen=True)
class GroupJob:
    """One of several Snakemake jobs that run as one.

    Attributes:
        job: its identity in every run, as `JobRequest.job`.
        name: the rule and its wildcards, for messages.
        logs: its own log files.
        measured: path of its measurements (`Benchmark.path`); empty if nothing is measured.
    """

    job: str
    name: str
    logs: tuple[str, ...] = ()
    measured: str = ""


@dataclass(frozen=True)
class JobGroup:
    """Several Snakemake jobs that run as one.

    Attributes:
        members: in the order of their numbers.
        report: the output of kind `log` with a line for each member that failed by itself: its
            number and exit code.
    """

    members: tuple[GroupJob, ...]
    report: str


@dataclass
class NamedPaths:
    """The paths that the jobs of a run name, shared by its requests: checkpoints add some later.

    Attributes:
        paths: relative to the workspace; replaced as a whole, by the thread that makes requests.
    """

    paths: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JobRequest:
    """One job that Snakemake requests, independent of a site's API.

    Attributes:
        number: Snakemake's id of the job in this run, for messages and outcomes.
        job: identity of the job, the same in every run (rule, wildcards, outputs).
        name: the rule and its wildcards, for messages.
        site: name of the site to run at.
        command: the argument of the shell's `-c`.
        shell: base name of the shell.
        resources: the rule's resources without Snakemake's built-in defaults.
        variables: environment variables that Snakemake sets around a command.
        inputs: paths relative to the workflow's directory.
        uploads: further files that the job needs.
        outputs: outputs and logs.
        benchmark: how to measure the command, if at all; the first of its commands is `command`.
        umask: file mode mask of this process, so that the job's files get the modes that they would
            get here; None for the site's own.
        environment: the name of the config's environment that it runs in; empty for its default.
        project: the folder of the MLproject whose entry point it runs, relative to the workspace;
            empty if it runs none. The job finds its path in `MANTIK_WORKING_DIRECTORY`.
        own_environment: whether the command makes its environment itself; the image of the backend
            config is then not used.
        secrets: values of the workflow's `envvars:`; never in a script, a log or the journal.
        parameters: the rule's parameters as text, without derived ones.
        forced: whether the user forced it; an attempt that an earlier run finished is then not
            adopted.
        group: the jobs that it consists of, if it is a group of jobs.
        launches: whether the command starts its tasks itself (MPI).
        nested: whether the command runs a Snakemake at the site.
        incomplete: whether to download the outputs of a failed job.
        subject: data for an observer; the engine does not use it.
        unmade: the inputs that other jobs are about to make, and the identity of the job that makes
            each (`job`), by path. Such a job can be presubmitted (`engine/presubmit`).
        storable: those of its inputs that may be remote outputs.
        storage_link: see `JobSpec.storage_link`.
        datasets: see `JobSpec.datasets`.
        continuation: how it goes on past its walltime, if it may.
        named: what the jobs of the run name: other new files of the job are undeclared.
        patience_s: how many seconds it may wait to start before it is withdrawn; None for ever.
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
    environment: str = ""
    project: str = ""
    own_environment: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    parameters: str = ""
    forced: bool = False
    group: JobGroup | None = None
    launches: bool = False
    nested: bool = False
    incomplete: bool = False
    subject: object = None
    unmade: Mapping[str, str] = field(default_factory=dict)
    storable: frozenset[str] = frozenset()
    storage_link: str = ""
    datasets: tuple[str, ...] = ()
    continuation: Continuation | None = None
    named: NamedPaths = field(default_factory=NamedPaths, compare=False)
    patience_s: int | None = None

    @property
    def members(self) -> Mapping[str, str]:
        """Return the names of a group's jobs, by their identities."""
        return {m.job: m.name for m in self.group.members} if self.group is not None else {}

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return its identity and its members'; an open attempt of any of them conflicts."""
        return (self.job, *self.members)

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the path of the measurements of each of its jobs, empty for unmeasured ones."""
        if self.group is not None:
            return tuple(member.measured for member in self.group.members)
        return (self.benchmark.path if self.benchmark is not None else "",)

    @property
    def updated(self) -> tuple[OutputFile, ...]:
        """Return the outputs that the job updates, and therefore needs as inputs."""
        return tuple(output for output in self.outputs if output.keep)

    def made_of(
        self, inputs: Mapping[str, str], environment: str, code: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the digests that must be equal for one attempt's result to serve for another.

        Args:
            inputs: checksum of each input file and upload, and of each file that it updates.
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
"""Most files of a job that a journal entry lists one by one."""


UPDATED = "updated"
"""The part of `JobRequest.made_of` for the contents of `update()` outputs."""


def fingerprint_of(made_of: Mapping[str, str]) -> str:
    """Return `made_of` as one digest; the part `UPDATED` becomes a second one, after a `+`."""
    parts = sorted((name, digest) for name, digest in made_of.items() if name != UPDATED)
    return "+".join([_digest(parts), *([made_of[UPDATED]] if UPDATED in made_of else [])])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Outcome:
    """How a job ended, as the executor reports it to Snakemake.

    Attributes:
        number: that of the request.
        attempt_id: the attempt to commit; empty if there was none, or if it stays open for the next
            run.
        succeeded: whether the job succeeded and all its outputs are local.
        message: for a failure: what happened, where, and what to do now.
        log: local path of the job's log, if it was downloaded.
        site_job: the site's ids of the job, separated by blanks; empty if it has none.
        reason: why it failed; SUCCESS if it did not.
        site: name of the site at which it ran or was to run; empty if the engine did not get it.
        failed: the members of a group that are known to have failed (`GroupJob.job`).
        stored: its outputs that stay at the site.
        withdrawn: whether it had not started in time and certainly never will: it has not ended.
    """

    number: JobNumber
    attempt_id: str
    succeeded: bool
    message: str = ""
    log: Path | None = None
    site_job: str = ""
    reason: Reason = Reason.SUCCESS
    site: str = ""
    failed: tuple[str, ...] = ()
    stored: tuple[RemoteOutput, ...] = ()
    withdrawn: bool = False
