"""The object store for large files, with the needed part of S3's presigned requests."""

import asyncio
import hashlib
import hmac
import secrets
import shutil
import uuid
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from starlette.requests import Request
from starlette.responses import FileResponse, Response

_PART = "part-{}"
_OBJECT = "object"
_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
STORE_LIFETIME = 604_800
"""Validity in seconds that a presigned URL claims (real: 7 days)."""


class ObjectStore:
    """Objects below a directory; presigned URLs give access to them."""

    def __init__(self, directory: Path, url: str) -> None:
        """Keep objects in `directory`, and serve them below `url`."""
        self.url = url
        self._directory = directory
        self._key = secrets.token_bytes(32)

    def new_key(self, path: str) -> str:
        """Return the key of a new object for the file `path`; it stores nothing yet."""
        name = str(uuid.uuid4())
        (self._directory / name).mkdir(parents=True)
        return f"{name}/{path.rpartition('/')[2]}"

    def object_path(self, key: str) -> Path:
        """Return the path that an object has once it is complete."""
        return self._directory / key.partition("/")[0] / _OBJECT

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def presigned(self, method: str, key: str, part: str = "") -> str:
        """Return a URL for one kind of request for an object: PUT of a part, POST, or GET."""
        url = f"{self.url}/{quote(key)}?X-Amz-Expires={STORE_LIFETIME}&partNumber={part}"
        return f"{url}&X-Amz-Signature={self._signature(method, key, part)}"

    def _signature(self, method: str, key: str, part: str) -> str:
        return hmac.digest(self._key, f"{method}\n{key}\n{part}".encode(), hashlib.sha256).hex()

    async def handle(self, request: Request, key: str) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        part = request.query_params.get("partNumber", "")
        signature = request.query_params.get("X-Amz-Signature", "")
        if not hmac.compare_digest(signature.encode(), self._signature(method, key, part).encode()):
            return _error(403, "SignatureDoesNotMatch")
        directory = self.object_path(key).parent
        match method:
            case "PUT":
                return await self._put(request, directory / _PART.format(int(part)))
            case "POST":
                wanted = _parts(await request.body())
                return await asyncio.to_thread(self._complete, directory, wanted)
            case "GET" if (directory / _OBJECT).is_file():
                return FileResponse(directory / _OBJECT, media_type="binary/octet-stream")
        return _error(404, "NoSuchKey")

    @staticmethod
    async def _put(request: Request, path: Path) -> Response:
        digest = hashlib.md5(usedforsecurity=False)
        with path.open("wb") as file:
            async for chunk in request.stream():
                digest.update(chunk)
                file.write(chunk)
        path.with_suffix(".etag").write_text(digest.hexdigest())
        return Response(headers={"ETag": f'"{digest.hexdigest()}"'})

    @staticmethod
    def _complete(directory: Path, wanted: list[tuple[int, str]] | None) -> Response:
        """Join the parts of an object if their ETags match the client's list."""
        if not wanted:
            return _error(400, "MalformedXML")
        paths = [directory / _PART.format(number) for number, _ in wanted]
        for path, (_, tag) in zip(paths, wanted, strict=True):
            there = path.with_suffix(".etag")
            if not there.is_file() or there.read_text() != tag:
                return _error(400, "InvalidPart")
        whole = directory / "whole"
        with whole.open("wb") as file:
            for path in paths:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, file)
                path.unlink()
        whole.rename(directory / _OBJECT)
        return Response(
            "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>",
            media_type="application/xml",
        )


def _parts(body: bytes) -> list[tuple[int, str]] | None:
    """Return number and ETag of each part in the client's list, None if it is malformed."""
    try:
        # The XML comes from this machine's user.
        root = ElementTree.fromstring(body)  # noqa: S314
        return [
            (
                int(part.findtext(f"{_NAMESPACE}PartNumber", "")),
                part.findtext(f"{_NAMESPACE}ETag", "").strip('"'),
            )
            for part in root.iter(f"{_NAMESPACE}Part")
        ]
    except (ElementTree.ParseError, ValueError):
        return None


def _error(status: int, code: str) -> Response:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>"
    return Response(body, status, media_type="application/xml")
