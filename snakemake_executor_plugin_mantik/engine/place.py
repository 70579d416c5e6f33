"""Open places: workspace directories with an identity of their own.

A place has the manifest, the running uploads, the directories of attempts, and the cleanup. A site
is a way to run jobs at a place: sites that see the same directory share the place and its files.
Before its first job a place gets the project files, which no rule names.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import PurePosixPath
from urllib.parse import quote

from ..common.errors import MantikError, PlaceTaken, SiteError, SiteUnreachable, UserError
from ..config.settings import SiteSettings, Timing
from ..jobs.paths import ATTEMPTS, BUNDLES, KEPT, WORK, bundle_done_path, bundle_path
from ..journal import sent_attempt_ids
from ..sites.base import SharedFile, Site, SiteFacts
from ..staging.local import LocalFile, LocalFiles
from ..staging.transfers import stream_file
from .catch_up import PlaceSpare
from .compare import MOST_DIRECTORIES, Looks
from .in_use import InUse
from .leases import Leases
from .plan import Planner
from .site_retry import SiteRetry
from .stage import Stager
from .workflow_context import PlaceContext, WorkflowContext

OPEN_WAIT_S = 60.0
"""Seconds that a site has to answer when it is opened; then a run waits as long as it takes."""
_TIDY_WAIT_S = 30.0
"""Most seconds for tidying up at the end of a run; the next run removes the rest."""


class Place:
    """One workspace directory that this controller leads.

    Attributes:
        id: its identity.
        site: a site that sees it.
        retry: repeats requests there.
        scratch: a local directory for archives of outputs.
        lead: this controller's lead of it.
        stager: uploads missing files.
        looks: looks at outputs that stay there.
        in_use: what attempts use there: it stays, and other files go; conflicting attempts end.
        spare: what a lost journal knew of it.
        leftovers: an observer's directories there, removed at the end of the run.
    """

    def __init__(self, leases: Leases, site: Site, places: "Places", upload_bytes: int) -> None:
        workflow = places.workflow
        self.id = leases.lease.place
        self.leftovers: set[str] = set()
        self.lead = leases
        self.site = site
        self._journal = journal = workflow.journal
        self._notify = workflow.notify
        scratch = workflow.state / "transfers" / quote(site.name, safe="")
        scratch.mkdir(parents=True, exist_ok=True)
        for left in scratch.iterdir():
            left.unlink()  # left by a killed run
        self.scratch = scratch
        self.retry = retry = make_retry(site, workflow.notify)
        self.looks = Looks(site, self.id, retry, MOST_DIRECTORIES)
        self.spare = PlaceSpare(
            site, journal, self.id, retry, leases.assure, stale=leases.was_behind
        )
        at = PlaceContext(self.id, site, retry, workflow)
        self.stager = Stager(
            at,
            places.local,
            fetch=places.fetch,
            share=places.share,
            limit=upload_bytes,
            term=leases.term,
        )
        self.in_use = InUse(at, leases.assure)

    @property
    def project_files(self) -> dict[str, str]:
        """Return the checksums of the uploaded project files, by path."""
        return {path: file.sha256 for path, file in self.stager.project_files.items()}

    # Tidying

    async def tidy(self) -> None:
        """Remove files that are no longer needed at the end of a run, as far as the site answers.

        These are the directories of our journal's attempts and bundles, once no attempt is open
        there, an observer's leftovers, and the place's copies of files that no longer exist here
        (`temp()` outputs, mostly).
        """
        with suppress(TimeoutError, SiteError, PlaceTaken):
            async with asyncio.timeout(_TIDY_WAIT_S):
                self.lead.doubt()  # another controller may follow what lies there
                await self.lead.assure()
                await self.in_use.finish()
                opened = any(r.place == self.id for r in self._journal.all_open_attempts())
                unused = not opened and not any(r.may_run for r in self._journal.uses.of(self.id))
                left = self.leftovers
                if unused:
                    left = {str(PurePosixPath(path).parent) for path in left}
                await asyncio.gather(*(self.site.remove(path) for path in left))
                if unused:
                    await self._empty()

    async def _empty(self) -> None:
        files = self._journal.files
        for bundle, state in files.bundles(self.id).items():
            kept = bundle.startswith(KEPT)
            if kept and state == "uploaded":
                continue
            if kept:
                paths = bundle_path(bundle), bundle_done_path(bundle)
                await asyncio.gather(*map(self.site.remove, paths))
            await self.stager.uploader.end_imports(bundle)
            files.forget_bundle(bundle)

        async def one(bucket: int) -> None:
            # The markers first: by them an older copy of the journal would look for the outputs.
            await self.site.remove(f"{ATTEMPTS}/{bucket}")
            await asyncio.gather(*(self.site.remove(f"{d}/{bucket}") for d in (WORK, BUNDLES)))
            self._journal.bucket_gone(self.id, bucket)

        await asyncio.gather(*map(one, self._journal.retire_buckets(self.id)))


class Places:
    """The places of a workflow's sites. Call all methods from the event loop's thread."""

    def __init__(
        self, workflow: WorkflowContext, open_site: Callable[[str], Awaitable[object]] | None = None
    ) -> None:
        """Make it; `open_site` opens the site with a name, if the run has its backend config."""
        self.workflow = workflow
        self._open_site = open_site
        self.local = LocalFiles(workflow.workdir, workflow.journal.files)
        self._opening = asyncio.Lock()
        self._facts: dict[int, asyncio.Task[SiteFacts]] = {}
        self._of_client: dict[int, Place] = {}
        self._known: dict[str, Place] = {}

    async def open(
        self,
        name: str,
        site: Site,
        planner: Planner,
        check: Callable[[SiteFacts], object] = lambda _: None,
        do: str = "and try again",
    ) -> tuple[SiteFacts, Place]:
        """Open a site, its client once for all names that share it; return its facts and place.

        `check` sees the facts before the place is opened; `do` is what the user can do, besides
        checking the network, if the site does not answer.

        Raises:
            PlaceTaken: another workflow or controller uses its workspace.
            MantikError: the site cannot be opened, or does not answer.
        """
        config = planner.config
        async with answering(name, do, SiteUnreachable):
            if id(site) not in self._facts:
                self._facts[id(site)] = opening = asyncio.create_task(site.open())
                # Retrieve the exception even if no job awaits the task any more.
                opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                async with asyncio.timeout(OPEN_WAIT_S):
                    facts = await asyncio.shield(self._facts[id(site)])
            except BaseException:
                self._facts.pop(id(site), None)
                raise
            check(facts)
            return facts, await self.at(site, facts, config.site, config.server)

    async def at(self, site: Site, facts: SiteFacts, settings: SiteSettings, url: str) -> Place:
        """Return the place of an opened site.

        `url` is the address of the site's API, by which the journal knows it.

        Raises:
            PlaceTaken: another workflow or controller uses its workspace.
            TimeoutError: the site does not answer.
        """
        async with self._opening:  # of two sites at one place the second finds the first one's
            if (place := self._of_client.get(id(site))) is None:
                place = self._of_client[id(site)] = await self._open(site, facts, settings, url)
        return place

    async def _open(self, site: Site, facts: SiteFacts, settings: SiteSettings, url: str) -> Place:
        journal = self.workflow.journal
        same = [s for s in journal.sites().values() if s.workspace == facts.workspace]
        known = next((s.place for s in same if s.url == url), "")
        retry = make_retry(site, self.workflow.notify)
        leases = Leases(
            site, facts.workspace, journal, retry, self.workflow.about,
            seen_s=settings.timing.marker_grace_s,
        )  # fmt: skip

        def mine(place: str) -> list[str]:
            # What was only planned, the former controller may have planned and submitted, too.
            places = {place, *(s.place for s in same)}
            return sent_attempt_ids(r for r in journal.all_open_attempts() if r.place in places)

        held = [place.lead.lease for place in self._known.values()]
        leases.lease, message = await leases.take(known, mine, held)
        if message:
            self.workflow.notify(message)
        identity = leases.lease.place
        if (place := self._known.get(identity)) is None:
            place = self._known[identity] = Place(leases, site, self, facts.upload_bytes)
        return place

    async def fetch(self, file: LocalFile, offset: int) -> AsyncGenerator[bytes, None]:
        """Read a file that is stored at a place, from `offset` to its end; see `stream_file`."""
        place = await self._find(file.stored)
        chunks = stream_file(
            place.site, str(file.local), size=file.size, offset=offset, repeat=place.retry.insist
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def share(self, file: LocalFile) -> SharedFile | None:
        """Let other servers read a file that is stored at a place; see `Site.share`."""
        place = await self._find(file.stored)
        return await place.retry(lambda: place.site.share(str(file.local)))

    async def _find(self, identity: str) -> Place:
        """Return the place with an identity; open a site that sees it if need be.

        Raises:
            MantikError: the run has no such site, or it cannot be opened.
        """
        failed: MantikError | None = None
        for known in [s for s in self.workflow.journal.sites().values() if s.place == identity]:
            if identity not in self._known and self._open_site is not None:
                try:
                    await self._open_site(known.site)
                except MantikError as error:  # another site may see the same place
                    failed = failed or error
            if identity in self._known:
                return self._known[identity]
        raise failed or UserError(
            "an input is stored at a place that no known site sees any more",
            where=f"place {identity}",
            do="Use the backend config that it was made with",
        )

    def known(self, identity: str) -> Place | None:
        """Return an opened place by its identity."""
        return self._known.get(identity)

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._known.values()))


_TIMING = Timing()


def make_retry(site: Site, notify: Callable[[str], None], timing: Timing = _TIMING) -> SiteRetry:
    """Make a `SiteRetry` for a site, whose proof is to make the directory of attempts."""
    return SiteRetry(
        site.name, notify, asyncio.get_running_loop().time,
        missing_s=timing.marker_grace_s, insist_s=timing.fetch_wait_s,
        proof=lambda: site.make_directory(ATTEMPTS),
    )  # fmt: skip


@asynccontextmanager
async def answering(
    name: str, do: str = "and try again", error: type[MantikError] = MantikError
) -> AsyncGenerator[None, None]:
    """Raise `error` if a site that is being opened does not answer in time: a TimeoutError."""
    try:
        yield
    except TimeoutError:
        raise error(
            f"the site has not answered for {OPEN_WAIT_S:.0f} s",
            where=f"site {name}",
            do=f"Check the URL and the network, {do}",
        ) from None
