"""Where paths are at a site."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with a working directory `run` in it, and links."""
    for folder in ("run/in/deep", "data", "big/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "linked").symlink_to("run")
    (tmp_path / "deep").symlink_to("run/in/deep")
    (tmp_path / "run/big").symlink_to("../big/deep")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "place", "called"),
    [
        ("in/x", "in/x", "in/x"),
        ("./in//x", "in/x", "./in//x"),
        ("in/../x", "x", "x"),
        ("../run/in/x", "in/x", "in/x"),
        ("../linked/in/x", "in/x", "in/x"),
        ("../data/x", ".mantik/outside{home}/data/x", ".mantik/outside{home}/data/x"),
        ("../data", ".mantik/outside{home}/data", ".mantik/outside{home}/data"),
        ("..", ".mantik/outside{home}", ".mantik/outside{home}"),
        # A link before a `..` is followed, as the kernel does.
        ("big/../x", ".mantik/outside{home}/big/x", ".mantik/outside{home}/big/x"),
        ("big/x", "big/x", "big/x"),
        ("{home}/run/in/x", "in/x", "/w/in/x"),
        ("{home}/run//in/./x", "in/x", "/w/in/x"),
        ("{home}/run", ".", "/w"),
        ("{home}/linked/in/x", "in/x", "/w/in/x"),
        ("{home}/deep/x", "in/deep/x", "/w/in/deep/x"),
        ("{home}/run/big/x", "big/x", "/w/big/x"),
        (
            "{home}/running/x",
            ".mantik/outside{home}/running/x",
            "/w/.mantik/outside{home}/running/x",
        ),
        ("//usr/share/x", ".mantik/outside/usr/share/x", "/w/.mantik/outside/usr/share/x"),
        ("/usr/a b'ü\n", ".mantik/outside/usr/a b'ü\n", "/w/.mantik/outside/usr/a b'ü\n"),
        ("/dev/null", None, "/dev/null"),
        ("../../../../../../../../dev/stderr", None, "../../../../../../../../dev/stderr"),
        ("/devices/x", ".mantik/outside/devices/x", "/w/.mantik/outside/devices/x"),
        ("~/x", "~/x", "~/x"),
    ],
)
def test_places(home: Path, path: str, place: str | None, called: str) -> None:
    places = JobPaths(home / "run", lambda: "/w/")
    path, called = path.format(home=home), called.format(home=home)
    place = place and place.format(home=home)

    assert places.place(path) == place
    assert places.at_site(path) == called
    if place is not None:
        # And back: the same file.
        expected = (home / "run" / path).resolve()
        assert local_path(place, home / "run").resolve() == expected


def test_the_site_is_not_asked_without_need(home: Path) -> None:
    places = JobPaths(home / "run", lambda: pytest.fail("asked"))
    assert places.at_site("../data/x") == f".mantik/outside{home}/data/x"
    assert places.place(f"{home}/run/x") == "x"


def test_our_own_directory_is_nobody_elses(home: Path) -> None:
    places = JobPaths(home / "run", lambda: "/w")
    for path in (".mantik", "in/../.mantik/outside/x", f"{home}/run/.mantik/tries/1"):
        with pytest.raises(UserError, match=r"\.mantik"):
            places.place(path)
    assert places.place(".mantik.txt") == ".mantik.txt"


def test_what_the_user_reads() -> None:
    assert display_path(".mantik/outside/data/x") == "/data/x"
    assert display_path("data/.mantik/outside/x") == "data/.mantik/outside/x"
