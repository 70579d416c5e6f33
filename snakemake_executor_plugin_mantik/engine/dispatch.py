"""Make the attempts of one site and submit them."""

import asyncio
import posixpath
import shlex
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import starmap

from ..common.errors import (
    MantikError,
    SiteBusy,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
    UserError,
)
from ..jobs.library import library_path, read_library
from ..jobs.paths import SECRETS, is_at, nearest
from ..jobs.reasons import Reason
from ..jobs.resources import memory_per_node
from ..jobs.spec import OutputFile, Predecessor, Resources
from ..journal import Asked, AttemptRecord, AttemptState, FileRecord
from ..sites.base import Submission
from ..staging.local import LocalFile
from .adopt import (
    encode_basis,
    kept_message,
    name_by_makers,
    name_of_maker,
    named_checksums,
    stale_message,
    why_unwanted,
)
from .attempt import Attempt
from .cancel import Canceller
from .evidence import revoke_attempt
from .machine import IF_CHANGED, LISTED, End, choose_attempts
from .plan import NOTHING, Resumed, make_submission, nodes_to_exclude
from .request import JobRequest, fingerprint_of
from .work import SiteWork, Worker

_NOT_DONE = (SiteBusy, SiteUnauthorized, SiteNotFound)
"""After these errors the job does not exist and may be submitted again. A server answers "not
found" for its own services while it starts."""


def _asked(resources: Resources, cores: int | None) -> Asked:
    nodes, gpus = resources.nodes, resources.gpus_per_node
    return Asked(
        cores=cores,
        memory_mib=memory_per_node(resources),
        memory_mib_per_cpu=resources.memory_mib_per_cpu,
        nodes=nodes,
        gpus=gpus and gpus * (nodes or 1),
    )


def _secret_assignments(secrets: Mapping[str, str]) -> bytes:
    """Return the file that sets the secrets in a job's bash, whatever characters they contain."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    return "".join(lines).encode()


class Dispatcher(Worker):
    """Make attempts from requests and submit them, at one site.

    Attributes:
        end_dependents: ends the attempts that wait for attempts with the given ids.
        gone_on: the ids of the attempts after which this run lets a job go on.
    """

    end_dependents: Callable[[Iterable[str]], Awaitable[None]]

    def __init__(self, work: SiteWork, canceller: Canceller) -> None:
        super().__init__(work)
        self._canceller = canceller
        self._there: dict[str, asyncio.Task[None]] = {}
        self._was_purged = False
        self._excluded: set[str] = set()
        self.gone_on: set[str] = set()

    async def look_at_files(
        self, request: JobRequest, unmade: Container[str] = ()
    ) -> list[LocalFile]:
        """Read the files that a job needs, except its inputs that are `unmade`.

        Raises:
            UserError: a file is missing or cannot be read.
        """
        wanted, others = self._planner.needed_files(
            request, self._journal.files, self._place.id, unmade
        )
        return [*await self._local.look_at(wanted), *others]

    def _made_of(self, request: JobRequest, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return the parts of a job's fingerprint (`JobRequest.made_of`)."""
        environment = self._planner.environment(request.environment)
        return request.made_of(inputs, environment, self._code(request, inputs))

    def _code(self, request: JobRequest, inputs: Container[str]) -> dict[str, str]:
        """Return the checksums of project files that a job's command names, without its inputs."""
        project_files = {p: sha for p, sha in self._place.project_files.items() if p not in inputs}
        return named_checksums(_text(request), project_files)

    def requested_resources(self, request: JobRequest) -> dict[str, str]:
        resources = self._planner.resources(request.resources, request.threads)
        return {name: str(value) for name, value in asdict(resources).items() if value is not None}

    async def choose_attempt(
        self, request: JobRequest, files: list[LocalFile], makers: Mapping[str, str] | None = None
    ) -> AttemptRecord:
        """Return an open attempt to adopt, or a new one; give up the other open ones.

        `files` are the files that the job needs, without those that the attempts `makers` (ids by
        path) are to make.
        """
        inputs = {file.path: file.sha256 for file in files}
        inputs |= {path: name_of_maker(maker) for path, maker in (makers or {}).items()}

        def made_of(record: AttemptRecord | None = None) -> dict[str, str]:
            if record is None or not record.after:
                return self._made_of(request, inputs)
            named = name_by_makers(inputs, record.makers, self._journal.made)
            return self._made_of(request, named)

        await self._place.in_use.ended(self._journal.open_attempts(*request.jobs))
        attempts = self._journal.open_attempts(*request.jobs)
        followed = self._journal.attempts(record.follows for record in attempts)
        adopted, unwanted = choose_attempts(
            request,
            lambda record: fingerprint_of(made_of(record)),
            attempts,
            given_up={record.id for record in followed if record.state is AttemptState.ABANDONED},
            already=self._is_already_updated(request, files),
        )
        if adopted is not None:  # from now on no other job ends it
            self._place.in_use.mine.add(adopted.id)
        left = self._journal.left_attempts(request.jobs, self._place.id)
        gone = [*unwanted, *left]
        for record in gone:
            # The user knows why what this run has presubmitted is not wanted any more.
            if record.id in self._place.in_use.mine:
                continue
            if message := why_unwanted(request, record, made_of(record)):
                self._notify(message)
        await self.end_dependents([record.id for record in unwanted])
        await self._give_up(unwanted)
        # They are in this workspace, even if their site's name means another one now.
        await self._canceller.give_up(left)
        if adopted is not None:
            if message := kept_message(adopted, self.requested_resources(request)):
                self._notify(message)
            project_files = self._place.stager.project_files.values()
            if message := stale_message(
                adopted, fingerprint_of(self._place.project_files), project_files
            ):
                self._retry.note(message)
        before = None if adopted or makers else self._goes_on_from(request, made_of)
        record = adopted or self._new_attempt(request, made_of(), makers, before)
        own = (record, *self._journal.segments.waiting_after(record.id))
        self._place.in_use.mine.update(one.id for one in own)
        return record

    def _is_already_updated(self, request: JobRequest, files: list[LocalFile]) -> bool:
        """Check that the local updated outputs are as the last job at the site left them."""
        paths = [output.path for output in request.updated]
        there = self._journal.files.remote_files_at(self._place.id, paths)
        below = tuple(f"{path}/" for path in paths)
        here = {f.record for f in files if not f.directory and f"{f.path}/".startswith(below)}
        return bool(here) and _contents(here) == _contents(there)

    def _new_attempt(
        self,
        request: JobRequest,
        made_of: Mapping[str, str],
        makers: Mapping[str, str] | None,
        before: AttemptRecord | None,
    ) -> AttemptRecord:
        most = request.continuation.most if request.continuation is not None else 0
        follows, segment = (before.id, before.segment + 1) if before is not None else ("", 0)
        basis = encode_basis(
            made_of, self.requested_resources(request), fingerprint_of(self._place.project_files),
            [output.path for output in request.outputs],
        )  # fmt: skip
        return self._journal.new_attempt(
            site=request.site, job=request.job, rule=request.rule, name=request.name,
            fingerprint=fingerprint_of(made_of), members=request.members, makers=makers,
            made_of=basis,
            logs=[output.path for output in request.outputs if output.kind == "log"],
            follows=follows, segment=segment if segment < most else 0, segments=most,
        )  # fmt: skip

    def next_segment(self, before: AttemptRecord) -> AttemptRecord:
        """Return a new attempt that goes on after another one, if that asks for it."""
        record = self._journal.new_attempt(
            site=before.site, job=before.job, rule=before.rule, name=before.name,
            fingerprint=before.fingerprint, made_of=before.made_of, makers=before.makers,
            logs=before.log_files, follows=before.id, segment=before.segment + 1,
            segments=before.segments,
        )  # fmt: skip
        self._place.in_use.mine.add(record.id)
        return record

    def _goes_on_from(
        self, request: JobRequest, made_of: Callable[[AttemptRecord], Mapping[str, str]]
    ) -> AttemptRecord | None:
        """Return the attempt from whose checkpoint a new one goes on, if there is one.

        A job that the user forced begins anew.
        """
        if request.continuation is None:
            return None
        found = self._journal.segments.last(request.job, self._place.id)
        if found is None or (request.forced and found.id not in self.gone_on):
            return None
        return found if fingerprint_of(made_of(found)) == found.fingerprint else None

    def _resumed(self, record: AttemptRecord) -> Resumed:
        """Return what an attempt finds of the one whose checkpoint it goes on from."""
        if not record.follows or self._journal.segments.was_followed(record):
            return NOTHING  # another attempt of the same job may have changed the checkpoint
        before = next(iter(self._journal.attempts([record.follows])), None)
        if before is None:
            return NOTHING  # the journal was lost, and its spare has only what was open
        return Resumed(
            tuple(self._journal.segments.checkpoint(before.id)) if before.goes_on == LISTED else (),
            before.paths if before.goes_on == IF_CHANGED else None,
        )

    async def observe(self, request: JobRequest, attempt: Attempt, *, waits: bool = False) -> None:
        """Get an observer's additions to an attempt.

        `waits` is set for a segment that waits for another one (`Observer.prepare`).
        """
        attempt.whole, attempt.own = request, []
        attempt.extras = added = await self._observer.prepare(
            request, attempt.record, self._facts.workspace, waits=waits
        )
        if added is None:
            return
        attempt.whole = replace(
            request,
            variables={**request.variables, **added.variables},
            secrets={**request.secrets, **added.secrets},
        )
        if added.directory:
            output = OutputFile(added.directory, "log", directory=True, keep=True)
            attempt.whole = replace(attempt.whole, outputs=(*request.outputs, output))
            made = [(f"{added.directory}/{path}", content) for path, content in added.files.items()]
            attempt.own = list(starmap(LocalFile.holding, made))

    async def submit(
        self,
        attempt: Attempt,
        *,
        after: Sequence[Predecessor] = (),
        after_jobs: Sequence[str] = (),
    ) -> None:
        """Submit an attempt.

        `after` are the attempts that make its other inputs, and `after_jobs` the scheduler's ids of
        these.

        Raises:
            SiteRejected: the site refuses it.
        """
        request, files = attempt.whole, attempt.files
        await self._place.lead.assure()
        await self._place.in_use.follow()
        outputs = [output.path for output in request.outputs]
        made = [output.path for output in request.outputs if output.kind == "output"]
        if attempt.record.follows:  # what the job updates lies there, as the segment before left it
            updated = [output.path for output in request.updated]
            files = [f for f in files if not any(is_at(f.path, path) for path in updated)]
        code = self._code(request, {file.path for file in files})
        files = [*files, *map(self._place.stager.project_files.__getitem__, code)]
        for message in await self._place.in_use.make_way(files, made):
            self._notify(message)
        await self._place.in_use.free(attempt.record, made, of_this_run=False)
        limit = self._settings.timing.inline_limit_bytes
        unmade = {path for one in after for path in one.makes}
        named = [path for path in request.inputs if path not in unmade]
        staged = await self._place.stager.stage(
            files, named, outputs, attempt.own, inline_limit=limit,
            free=partial(self._place.in_use.free, attempt.record),
        )  # fmt: skip
        spec = self._planner.spec(
            request, attempt.record, self._facts, staged, term=self._place.lead.term, after=after,
            resumed=self._resumed(attempt.record),
        )  # fmt: skip
        spec = replace(spec, live=attempt.live, resources=self._avoiding(spec.resources))
        submission = replace(make_submission(spec), after=tuple(after_jobs))
        # From now on the job may change its outputs at the site, whether it succeeds or not.
        self._place.stager.lost(outputs)
        self._journal.files.forget_stored(o.path for o in request.outputs if not o.stored)
        self._journal.files.lose(o.path for o in request.outputs if o.stored)
        self._journal.files.carry(self._place.id, attempt.record.id, staged.carried, made)
        self._begin_uses(request, attempt.record, files)
        if not attempt.sent:
            attempt.submitted_at = time.time()
        self._observer.submitting(attempt.record, spec, submission.script)
        self._place.in_use.sending.add(attempt.record.id)
        try:
            site_job = await self._send(attempt.record, submission, request.secrets, spec.cores)
        except SiteRejected as error:
            revoke = partial(revoke_attempt, self._site, attempt.record)
            if attempt.sent and not await self._retry.found(revoke):
                return  # an earlier submission of it has started after all
            await self._refused(attempt, error, End.AGAIN if after else End.REFUSED)
            raise
        finally:
            self._place.in_use.sending.discard(attempt.record.id)
        attempt.sent += 1
        attempt.staged.append(staged)
        if site_job:
            if attempt.sent_at is None:
                attempt.sent_at = self._site.clock
            # Earlier ids stay: any of them may be the one that runs.
            attempt.ids.append(site_job)
            self._observer.submitted(attempt.record, site_job, spec.resources.queue or "")

    def _avoiding(self, resources: Resources) -> Resources:
        """Return the resources of a job without the nodes that have failed others in this run."""
        if self._settings.scheduler != "slurm" or resources.pool is not None:
            return resources
        failed = self._journal.failed_nodes(self._site.name)
        nodes = nodes_to_exclude(resources, self._facts, list(failed))
        for node in [node for node in nodes if node not in self._excluded]:
            self._excluded.add(node)
            self._notify(
                f"{failed[node].name}: its node {node} at {self._site.name} failed. Jobs that this"
                f" run submits there from now on avoid it (--exclude={node})."
            )
        exclude = ",".join(filter(None, [resources.exclude, *nodes]))
        return replace(resources, exclude=exclude or None)

    def _begin_uses(
        self, request: JobRequest, record: AttemptRecord, files: Iterable[LocalFile]
    ) -> None:
        """Record what must stay at the places until an attempt has ended."""
        inputs = dict.fromkeys(request.inputs)
        continuation = request.continuation
        checkpoint = continuation.paths if continuation else ()
        paths = dict.fromkeys([*inputs, *(o.path for o in request.outputs), *checkpoint])
        paths |= dict.fromkeys(file.path for file in files if nearest(file.path, inputs) is None)
        moved = [f for f in files if f.stored not in ("", self._place.id)]
        self._journal.uses.begin(
            record.id, self._place.id, [*paths, record.paths.claim, record.paths.work],
            checkpoint=checkpoint,
            elsewhere={(f.stored, nearest(f.path, inputs) or f.path) for f in moved},
        )  # fmt: skip

    async def abandon_if_unsent(self, attempt: Attempt, error: MantikError) -> None:
        """Close an attempt that a user's mistake kept here; the next run makes another.

        An attempt that was ever submitted, and one with another error, stays open.
        """
        planned = attempt.record.state is AttemptState.PLANNED and not attempt.sent
        if isinstance(error, UserError) and planned:
            await self._refused(attempt, error, End.REFUSED)

    async def _refused(self, attempt: Attempt, error: MantikError, end: End) -> None:
        reason = Reason.REJECTED if end is End.REFUSED else None
        await self._canceller.record_end(attempt.record, end, error.what, reason=reason)

    async def _send(
        self,
        record: AttemptRecord,
        submission: Submission,
        secrets: Mapping[str, str],
        cores: int | None,
    ) -> str | None:
        """Submit an attempt; return the site's id of it, None if the submission's fate is unknown.

        Submitting an attempt again is harmless: its claim lets it run once. `cores` is how many it
        occupies, if known.

        Raises:
            SiteRejected: the site refuses it; the job does not exist.
        """
        paths = record.paths
        await self._directory(paths.attempts)  # the job makes its claim there
        await self._once(library_path(), self._put_library)
        for path, content in submission.beside.items():
            await self._retry.found(partial(self._site.put, path, content))
        if secrets:
            await self._directory(SECRETS, private=True)
            content = _secret_assignments(secrets)
            self._journal.secrets_sent(record.id)
            await self._retry.found(lambda: self._site.put(paths.secrets, content, private=True))

        def begin() -> None:
            # Not earlier: a request that still waits its turn is not made if this process dies.
            resources = submission.resources
            asked = _asked(resources, cores)
            self._journal.submitting(record.id, resources.queue or "", resources.runtime_s, asked)

        async def submit() -> str:
            with suppress(SiteRejected):  # if that lasts, the submission meets it, too
                await self._retry.found(self._place.spare.renew)
            return await self._site.submit(submission, begin)

        try:
            site_job = await self._retry(submit, repeat=_NOT_DONE)
        except SiteUnreachable as error:
            self._retry.failed(error)
            return None
        self._journal.submitted(record.id, site_job, self._site.clock)
        return site_job

    def purged(self) -> None:
        """Let the next submission write again what jobs need: the workspace has lost files."""
        self._there.clear()
        self._was_purged = True

    async def _directory(self, path: str, *, private: bool = False) -> None:
        await self._once(path, lambda: self._site.make_directory(path, private=private))

    async def _put_library(self) -> None:
        """Upload the library unless it is there; after `purged` it may be there and damaged."""
        folder, name = posixpath.split(library_path())
        with suppress(SiteNotFound):
            there = (await self._site.list(folder)).get(name)
            size = there and there.size
            if size == len(read_library()) and not self._was_purged:
                return
        await self._site.put(library_path(), read_library())

    async def _once(self, path: str, write: Callable[[], Awaitable[None]]) -> None:
        """Write what all jobs need, once per run, and again after `purged`."""
        if path not in self._there:
            self._there[path] = asyncio.create_task(self._retry.found(write))
        try:
            await self._there[path]
        except BaseException:
            self._there.pop(path, None)  # the next job tries again
            raise


def _text(request: JobRequest) -> str:
    """Return the command and the generated files of a job as one text."""
    made = [u.content.decode(errors="replace") for u in request.uploads if u.content is not None]
    return "\n".join([request.command, *made])


def _contents(files: Iterable[FileRecord]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size, file.sha256) for file in files}
