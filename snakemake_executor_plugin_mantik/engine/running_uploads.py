"""The uploads to one place that are under way, and how long they are expected to take."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

_MEASURED_S: Final = 5.0
"""Seconds for which an upload must have gone on before its rest can be estimated."""

Report = Callable[[float], None]
Send = Callable[[Report], Awaitable[None]]


class UploadStopped(Exception):  # noqa: N818 - a plain name
    """An upload was ended, since newer contents have replaced what it was to bring."""


@dataclass
class _Upload:
    """An upload; `share` of it was at the site at the time `at`, and `first` at the beginning.

    Attributes:
        withdrawn: whether newer contents have replaced what it brings.
    """

    task: "asyncio.Task[None]"
    began: float = 0.0
    first: float | None = None
    share: float = 0.0
    withdrawn: bool = False


class RunningUploads:
    """The uploads to one place. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._uploads: dict[str, _Upload] = {}
        self._clock = asyncio.get_running_loop().time
        self._moved = asyncio.get_running_loop().create_future()

    def begin(self, bundle: str, send: Send, report: Report | None = None) -> "asyncio.Task[None]":
        """Begin to upload a bundle with `send`, unless that is under way; return the task."""
        if (known := self.task(bundle)) is not None:
            return known

        def moved(share: float) -> None:
            upload = self._uploads[bundle]
            if upload.first is None:
                upload.first, upload.began = share, self._clock()
            upload.share = share
            self._wake()
            if report is not None:
                report(share)

        async def upload() -> None:
            await send(moved)

        task = asyncio.create_task(upload())
        self._uploads[bundle] = _Upload(task)
        # Somebody may only ask for it later.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def task(self, bundle: str) -> "asyncio.Task[None] | None":
        """Return the task that uploads a bundle; None if none is under way."""
        upload = self._uploads.get(bundle)
        if upload is None or upload.task.done() or upload.task.cancelling():
            return None
        return upload.task

    async def wait(self, bundles: Iterable[str]) -> None:
        """Wait until bundles are uploaded. If this is cancelled, the uploads go on.

        Raises:
            UploadStopped: one is not wanted any more.
            MantikError: one cannot be uploaded.
        """
        await self.wait_until_short(bundles, lambda: 0.0)

    async def wait_until_short(
        self, bundles: Iterable[str], longest_s: Callable[[], float]
    ) -> tuple[str, ...]:
        """Wait until bundles are uploaded or nearly; return those that are not all there yet.

        `longest_s` returns the most seconds that their rest may take in all. It is called once, and
        only if an upload is under way.

        Raises:
            UploadStopped, MantikError: as `wait`.
        """
        wanted = [bundle for bundle in bundles if bundle in self._uploads]
        longest: float | None = None
        while left := [bundle for bundle in wanted if self.task(bundle) is not None]:
            longest = longest_s() if longest is None else longest
            rest = [self.rest_s(bundle) for bundle in left]
            known = [each for each in rest if each is not None]
            if longest and len(known) == len(rest) and sum(known) <= longest:
                break
            tasks = [self._uploads[bundle].task for bundle in left]
            await asyncio.wait([*tasks, self._moved], return_when=asyncio.FIRST_COMPLETED)
            self._raise(bundle for bundle in left if self.task(bundle) is None)
        self._raise(bundle for bundle in wanted if bundle not in left)
        return tuple(left)

    def _raise(self, ended: Iterable[str]) -> None:
        for bundle in ended:
            task = self._uploads[bundle].task
            if task.cancelled() or task.cancelling():
                raise UploadStopped
            task.result()

    def rest_s(self, bundle: str) -> float | None:
        """Return the seconds that the rest of an upload is expected to take; None if unknown."""
        upload = self._uploads[bundle]
        if upload.withdrawn or upload.first is None or upload.share <= upload.first:
            return None
        passed = self._clock() - upload.began
        if passed < _MEASURED_S:
            return None
        return (1 - upload.share) * passed / (upload.share - upload.first)

    def stop(self, bundle: str) -> None:
        """End an upload whose files are outdated: from now on it records nothing."""
        if (task := self.task(bundle)) is not None:
            task.cancel()

    def withdraw(self, bundle: str) -> None:
        """Note that the files of an upload are outdated: no try may be submitted before its end."""
        if bundle in self._uploads:
            self._uploads[bundle].withdrawn = True

    async def close(self) -> None:
        """Break off all uploads; the next run continues them."""
        tasks = [upload.task for upload in self._uploads.values() if not upload.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wake(self) -> None:
        if not self._moved.done():
            self._moved.set_result(None)
        self._moved = asyncio.get_running_loop().create_future()
