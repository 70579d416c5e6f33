"""Values of `envvars:` and credentials reach the job and nothing that stays."""

from pathlib import Path

from tests.support.workflows import Project

SECRET = "tell-nobody-4711 'quoted' $HOME `date`"


def leaks(*directories: Path, words: tuple[str, ...]) -> list[str]:
    """Files below `directories` that hold one of `words`, in any form that bash would write."""
    found = []
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
                found += [f"{path}: {word}" for word in words if word.encode() in content]
    return found


def test_secrets_leave_no_trace(both: Project) -> None:
    both.write(
        "Snakefile",
        r"""
        envvars: "MY_TOKEN"

        rule all:
            input: "good.txt", "bad.txt"

        rule good:
            output: "good.txt"
            shell: "printf %s \"$MY_TOKEN\" | sha256sum > {output}; env | grep -c MY_TOKEN"

        rule bad:
            output: "bad.txt"
            shell: "[ -n \"$MY_TOKEN\" ]; kill -9 $PPID $$"
        """,
    )
    both.extra["MY_TOKEN"] = SECRET
    ours = tuple(
        value
        for name, value in both.place.environment.items()
        if name.endswith(("PASSWORD", "SECRET"))
    )

    said = both.run("--keep-going", "--verbose").output
    twin = both.twin()
    twin.run("--until", "good", local=True).ok()

    assert both.read("good.txt") == twin.read("good.txt")
    assert len(both.tries) == 2, said
    assert ours
    # The secret of a client, and the header of every token.
    words = ("tell-nobody", *ours, "eyJhbGciOi")
    assert leaks(both.directory, both.workspace, words=words) == []
    assert leaks(both.place.server, words=("tell-nobody",)) == []
    assert not [word for word in words if word in said]
