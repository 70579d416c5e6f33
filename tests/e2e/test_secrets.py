"""Values of `envvars:` and credentials reach the job and nothing that stays."""

import base64
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.workflows import Project, until


def new_secret() -> tuple[str, str]:
    """A secret, and its plain beginning. Other tests at the same server have others meanwhile."""
    plain = f"tell-nobody-{uuid.uuid4().hex}"
    return f"{plain} 'quoted' $HOME `date`", plain


def forms(words: Iterable[str]) -> Iterator[bytes]:
    """What a word looks like where it is plain, or somewhere in what is base64."""
    for word in words:
        plain = word.encode()
        yield plain
        for before in range(3):
            coded = base64.b64encode(b"x" * before + plain)
            # Without the letters that what stands before and behind has a part in.
            yield coded[4 if before else 0 : -4]


def leaks(*directories: Path, words: tuple[str, ...]) -> list[str]:
    """Files below `directories` that hold one of `words`, in any form that bash would write."""
    found = []
    for path in (path for directory in directories for path in files(directory)):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        if content.startswith(b"\x1f\x8b"):
            # As much as there is of it: somebody may be at it.
            content += zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(content)
        found += [f"{path}: {form!r}" for form in forms(words) if form in content]
    return found


def files(directory: Path) -> Iterator[Path]:
    """All files below a directory in which others make and remove some meanwhile."""
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)


def shown_of_processes() -> bytes:
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(lines)


def test_secrets_beside_the_snakefile_go_to_no_site(both: Project) -> None:
    """One line tells which stay here; what is included goes, and so does what a rule names."""
    secret, _ = new_secret()
    first = both.write("site.txt", secret)
    os.link(first, both.directory / "again.txt")
    both.extra["MANTIK_ELSEWHERE_PASSWORD_FILE"] = "site.txt"
    both.write("closed.txt", secret).chmod(0o600)
    both.write("keys/mine", f"-----BEGIN OPENSSH PRIVATE KEY-----\n{secret}\n")
    both.write("credentials.json", secret)
    outside = both.directory.parent / "outside.txt"
    outside.write_text(secret)
    (both.directory / "link.txt").symlink_to(outside)
    both.write("run.sh", "echo ran").chmod(0o700)
    both.write("input.txt", "named").chmod(0o600)
    both.config.write_text(
        both.config.read_text().replace("Site:\n", "Site:\n  Include: [run.sh]\n")
    )
    both.write(
        "Snakefile",
        """
        rule good:
            input: "input.txt"
            output: "good.txt"
            shell: "./run.sh > {output}; cat {input} >> {output}; ls -A . keys >> {output} || true"
        """,
    )

    said = both.run().ok().output

    assert both.read("good.txt").startswith("ran\nnamed")
    assert leaks(both.place.server, words=(secret,)) == []
    (line,) = [line for line in said.splitlines() if "Site: Include" in line]
    for name in (
        "closed.txt", "keys/mine", "credentials.json", "link.txt", "site.txt", "again.txt"
    ):  # fmt: skip
        assert name in line
        assert f"{name}\n" not in both.read("good.txt")
    assert "run.sh" not in line
    assert "input.txt" not in line


def test_secrets_leave_no_trace(both: Project, tmp_path: Path) -> None:
    both.write(
        "Snakefile",
        r"""
        envvars: "MY_TOKEN"

        rule all:
            input: "good.txt", "bad.txt"

        rule good:
            output: "good.txt"
            shell:
                "touch good.started; until [ -e go ]; do sleep 0.05; done;"
                "printf %s \"$MY_TOKEN\" | sha256sum > {output}; env | grep -c MY_TOKEN"

        rule bad:
            output: "bad.txt"
            shell:
                "touch bad.started; until [ -e go ]; do sleep 0.05; done;"
                "[ -n \"$MY_TOKEN\" ]; kill -9 $PPID $$"
        """,
    )
    elsewhere = tmp_path / "elsewhere"
    secret, plain = new_secret()
    both.extra["MY_TOKEN"] = secret
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        both.extra[name] = str(elsewhere / name)
        (elsewhere / name).mkdir(parents=True)
    ours = tuple(
        value
        for name, value in both.place.environment.items()
        if name.endswith(("PASSWORD", "SECRET"))
    )
    assert ours
    # The secret of a client, and the header of every token.
    words = (plain, *ours, "eyJhbGciOi")

    def looked(*sites: Path) -> list[str]:
        found = leaks(both.directory, elsewhere, *sites, words=words)
        return [*found, *leaks(both.place.server, words=(plain,))]

    running = both.start("--keep-going", "--verbose")
    site = both.workspace
    until(lambda: all((site / f"{n}.started").exists() for n in ("good", "bad")), "both run")
    shown = shown_of_processes()
    while_they_run = looked(site)
    (site / "go").touch()
    said = running.end().output
    (both.directory / "go").touch()
    twin = both.twin()
    twin.run("--until", "good", local=True).ok()

    assert both.read("good.txt") == twin.read("good.txt")
    assert len(both.attempts) == 2, said
    assert while_they_run == []
    assert looked(site) == []
    assert b"--executor" in shown or b"sleep" in shown
    assert not [form for form in forms(words) if form in shown]
    assert not [form for form in forms(words) if form in said.encode()]
