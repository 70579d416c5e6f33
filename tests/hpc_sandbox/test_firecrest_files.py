"""What the sandbox's firecREST does, held against what was measured at a real one: files."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from hpc_sandbox.firecrest.commands import shown_name
from tests.support.sandbox import FirecrestClient, firecrest_site, message

MIB = 1 << 20


class TestFiles:
    def test_names_in_listings(self, fire: FirecrestClient, there: str) -> None:
        for name in ("ü", "a b", "#%&+", ".hidden"):
            assert fire.upload(there, name, b"1").status_code == 204
        listing = fire.ops("GET", "ls", params={"path": there}).json()["output"]
        assert [file["name"] for file in listing] == ["#%&+", "a b", "\\303\\274"]
        listing = fire.ops("GET", "ls", params={"path": there, "showHidden": "true"})
        assert len(listing.json()["output"]) == 4
        single = fire.ops("GET", "ls", params={"path": f"{there}/a b"}).json()["output"]
        assert [file["name"] for file in single] == [f"{there}/a b"]
        assert shown_name('q"b\\n\n') == 'q"b\\n\\n'

    def test_names_of_uploads(self, fire: FirecrestClient, there: str) -> None:
        assert fire.upload(there, 'a"b', b"1").status_code == 204
        listing = fire.ops("GET", "ls", params={"path": there}).json()["output"]
        assert [file["name"] for file in listing] == ["a%22b"]

    def test_single_quotes(self, fire: FirecrestClient, there: str) -> None:
        for answer in (
            fire.ops("GET", "stat", params={"path": f"{there}/it's"}),
            fire.refused_upload(there, "it's"),
            fire.ops("POST", "mkdir", json={"path": f"{there}/it's"}),
        ):
            assert message(answer, 500).startswith("Remote process failed with exit status:2")
        # Two of them vanish: it is another path.
        fire.upload(there, "a'b'c", b"1")
        assert fire.ops("GET", "stat", params={"path": f"{there}/abc"}).status_code == 200

    def test_paths_outside(self, fire: FirecrestClient, there: str) -> None:
        for path in ("/etc", f"{there}/../../../../etc"):
            answer = fire.ops("GET", "ls", params={"path": path})
            assert "does not match any of the defined filesystem paths" in message(answer, 400)
        answer = fire.ops("GET", "ls", params={"path": "relative"})
        assert "is not an absolute path" in message(answer, 400)
        assert fire.ops("GET", "ls", params={"path": f"{there}/x/.."}).status_code == 404
        assert fire.ops("GET", "ls", params={"path": f"{there}/."}).status_code == 200

    def test_missing(self, fire: FirecrestClient, there: str) -> None:
        """What else is missing is compared in test_same_answers.py."""
        for name in ("view", "head"):
            answer = fire.ops("GET", name, params={"path": f"{there}/nothing"})
            assert "No such file or directory" in message(answer, 404)
        assert message(fire.refused_upload(f"{there}/nothing", "x"), 404)
        archive = {"sourcePath": f"{there}/a.tgz", "targetPath": there}
        assert message(fire.ops("POST", "extract", json=archive), 404)
        view = fire.ops("GET", "view", params={"path": there})
        assert message(view, 500).startswith("Remote process failed")

    def test_empty_upload_takes_too_long_and_happens(
        self, fire: FirecrestClient, there: str
    ) -> None:
        assert message(fire.upload(there, "empty", b""), 408)
        found = fire.ops("GET", "stat", params={"path": f"{there}/empty"}).json()["output"]
        assert found["size"] == 0

    def test_downloads_that_are_given_up(self, fire: FirecrestClient, there: str) -> None:
        """Nobody reads what is beyond the limit, and the command waits (measured: 5.5 MB)."""
        file = Path(there) / "large"
        file.write_bytes(bytes(5_505_024))
        url = {"path": str(file)}
        assert fire.ops("GET", "download", params=url).status_code == 413
        file.write_bytes(bytes(5_505_027))
        answers = []
        for _ in range(2):
            answers.append(fire.ops("GET", "download", params=url))
            fire.wait_for_the_end_of_the_connection()
        assert {answer.status_code: answer.json()["message"] for answer in answers} == {
            500: "('Channel not open for sending',)",
            408: "Command execution timeout limit exceeded.",
        }

    def test_view_in_parts(self, fire: FirecrestClient, there: str) -> None:
        fire.upload(there, "file", b"0123456789")
        for size, offset, text in ((4, 0, "0123"), (4, 3, "3456"), (4, 8, "89"), (100, 5, "56789")):
            params = {"path": f"{there}/file", "size": size, "offset": offset}
            assert fire.ops("GET", "view", params=params).json()["output"] == text
        params = {"path": f"{there}/file", "size": 5 * MIB + 1}
        assert message(fire.ops("GET", "view", params=params), 400)
        fire.upload(there, "binary", b"\xff\x00a")
        view = fire.ops("GET", "view", params={"path": f"{there}/binary"})
        assert view.json()["output"] == "\ufffd\x00a"

    @pytest.mark.parametrize(
        ("name", "params", "content"),
        [
            ("head", {"lines": "2"}, "0\n1\n"),
            ("head", {"bytes": "3"}, "0\n1"),
            ("head", {"lines": "10", "skipTrailing": "true"}, "0\n1\n"),
            ("tail", {"lines": "2"}, "10\n11\n"),
            ("tail", {"lines": "17"}, "".join(f"{n}\n" for n in range(12))),
            ("tail", {"bytes": "3"}, "11\n"),
            ("tail", {"lines": "11", "skipHeading": "true"}, "10\n11\n"),
            ("tail", {"bytes": "24", "skipHeading": "true"}, "11\n"),
            ("tail", {}, "".join(f"{n}\n" for n in range(2, 12))),
        ],
    )
    def test_ends(
        self, fire: FirecrestClient, there: str, name: str, params: dict[str, str], content: str
    ) -> None:
        fire.upload(there, "lines", "".join(f"{n}\n" for n in range(12)).encode())
        answer = fire.ops("GET", name, params={"path": f"{there}/lines", **params})
        assert answer.json()["output"]["content"] == content

    def test_packing(self, fire: FirecrestClient, there: str) -> None:
        fire.upload(there, "file", b"1" * 1000)
        for kind in ("none", "gzip", "bzip2", "xz"):
            packed = {
                "sourcePath": f"{there}/file",
                "targetPath": f"{there}/a",
                "compression": kind,
            }
            assert fire.ops("POST", "compress", json=packed).status_code == 204
            target = fire.directory(f"{there.rpartition('/')[2]}/{kind}")
            unpacked = {"path": f"{there}/a", "target_path": target, "compression": kind}
            assert fire.ops("POST", "extract", json=unpacked).status_code == 204
            stat = fire.ops("GET", "stat", params={"path": f"{target}/file"}).json()["output"]
            assert stat["size"] == 1000
        broken = {"path": f"{there}/file", "targetPath": there}
        assert "not in gzip format" in message(fire.ops("POST", "extract", json=broken), 500)

    def test_mode_has_the_type_of_the_file(self, fire: FirecrestClient, there: str) -> None:
        stat = fire.ops("GET", "stat", params={"path": there}).json()["output"]
        assert stat["mode"] & 0o170000 == 0o040000
        assert list(stat) == [
            "mode", "ino", "dev", "nlink", "uid", "gid", "size", "atime", "ctime", "mtime"
        ]  # fmt: skip


class TestTransfers:
    def directives(self, **more: Any) -> dict[str, Any]:
        return {"transferDirectives": {"transferMethod": "s3", "fileSize": 10, **more}}

    def test_in_parts(self, tmp_path: Path) -> None:
        for fire in firecrest_site(tmp_path, max_part_size=4):
            target = f"{fire.home}/in parts"
            answer = fire.http.post(
                "/filesystem/hpc2/transfer/upload", json={"path": target, **self.directives()}
            )
            assert answer.status_code == 201
            given = answer.json()["transferDirectives"]
            assert (given["transferMethod"], given["maxPartSize"]) == ("s3", 4)
            tags = [
                httpx.put(url, content=part).headers["ETag"]
                for url, part in zip(
                    given["partsUploadUrls"], (b"0123", b"4567", b"89"), strict=True
                )
            ]
            done = self.complete(given["completeUploadUrl"], ['"wrong"', *tags[1:]])
            assert (done.status_code, "InvalidPart" in done.text) == (400, True)
            assert self.complete(given["completeUploadUrl"], tags).status_code == 200
            fire.ended(answer.json()["transferJob"]["jobId"])
            view = fire.ops("GET", "view", params={"path": target})
            assert view.json()["output"] == "0123456789"

    def complete(self, url: str, tags: list[str]) -> httpx.Response:
        parts = "".join(
            f"<Part><ETag>{tag}</ETag><PartNumber>{number}</PartNumber></Part>"
            for number, tag in enumerate(tags, 1)
        )
        name = "CompleteMultipartUpload"
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        return httpx.post(url, content=f'<{name} xmlns="{space}">{parts}</{name}>')

    def test_urls_are_for_one_thing(self, fire: FirecrestClient) -> None:
        path = "/filesystem/hpc2/transfer/upload"
        answer = fire.http.post(path, json={"path": f"{fire.home}/x", **self.directives()})
        url = answer.json()["transferDirectives"]["partsUploadUrls"][0]
        assert httpx.get(url).status_code == 403
        assert httpx.put(url.replace("partNumber=1", "partNumber=2")).status_code == 403
        fire.http.delete(f"/compute/hpc2/jobs/{answer.json()['transferJob']['jobId']}")

    def test_methods(self, fire: FirecrestClient) -> None:
        path = "/filesystem/hpc2/transfer/upload"
        body = {"path": f"{fire.home}/x", **self.directives(transferMethod="streamer")}
        text = message(fire.http.post(path, json=body), 400)
        assert text == "Requested transfer method is not available."
        answer = fire.http.post(
            "/filesystem/hpc2/transfer/download",
            json={"path": f"{fire.home}/nothing", **self.directives()},
        )
        assert "No such file" in message(answer, 404)

    @pytest.mark.parametrize("own_site", [{"account_needed": True}], indirect=True)
    def test_account(self, own_site: FirecrestClient) -> None:
        body = {"sourcePath": own_site.home, "targetPath": f"{own_site.home}/x"}
        path = "/filesystem/hpc2/transfer/cp"
        text = message(own_site.http.post(path, json=body), 400)
        assert text == "Account parameter is required on this system."
        answer = own_site.http.post(path, json={**body, "account": "sandbox"})
        assert answer.status_code == 201
        systems = own_site.http.get("/status/systems").json()["systems"]
        lines = systems[0]["dataOperation"]["datatransfer_jobs_directives"]
        assert "#SBATCH --account={account}" in lines
