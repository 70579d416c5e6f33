"""Where paths are at a site."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths

W = "/w/up3/up2/up1/workdir"


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
        ("../data/x", ".mantik/up/1/data/x", "../data/x"),
        ("..//data/./x", ".mantik/up/1/data/x", "../data/x"),
        ("../data", ".mantik/up/1/data", "../data"),
        ("../../../x", ".mantik/up/3/x", "../../../x"),
        ("../../../{up3}/x", ".mantik/up/2/x", "../../x"),
        ("../../../../{up4}/y/x", ".mantik/up/3/y/x", "../../../y/x"),
        ("../../../../x", ".mantik/outside{far}/x", ".mantik/outside{far}/x"),
        ("..", ".mantik/outside{home}", ".mantik/outside{home}"),
        # A link before a `..` is followed, as the kernel does.
        ("big/../x", ".mantik/up/1/big/x", "../big/x"),
        ("big/x", "big/x", "big/x"),
        ("{home}/run/in/x", "in/x", f"{W}/in/x"),
        ("{home}/run//in/./x", "in/x", f"{W}/in/x"),
        ("{home}/run", ".", W),
        ("{home}/linked/in/x", "in/x", f"{W}/in/x"),
        ("{home}/deep/x", "in/deep/x", f"{W}/in/deep/x"),
        ("{home}/run/big/x", "big/x", f"{W}/big/x"),
        ("{home}/running/x", ".mantik/up/1/running/x", "/w/up3/up2/up1/running/x"),
        ("//usr/share/x", ".mantik/outside/usr/share/x", f"{W}/.mantik/outside/usr/share/x"),
        ("/usr/a b'ü\n", ".mantik/outside/usr/a b'ü\n", f"{W}/.mantik/outside/usr/a b'ü\n"),
        ("/dev/null", None, "/dev/null"),
        ("../../../../../../../../dev/stderr", None, "../../../../../../../../dev/stderr"),
        ("/devices/x", ".mantik/outside/devices/x", f"{W}/.mantik/outside/devices/x"),
        ("~/x", "~/x", "~/x"),
    ],
)
def test_places(home: Path, path: str, place: str | None, called: str) -> None:
    places = JobPaths(home / "run", lambda: f"{W}/")
    above = home.parents
    names = {
        "home": home, "far": above[2], "up3": above[0].relative_to(above[1]),
        "up4": above[1].relative_to(above[2]),
    }  # fmt: skip
    path, called = path.format(**names), called.format(**names)
    place = place and place.format(**names)

    assert places.place(path) == place
    assert places.at_site(path) == called
    if place is not None:
        # And back: the same file.
        expected = (home / "run" / path).resolve()
        assert local_path(place, home / "run").resolve() == expected


def test_the_site_is_not_asked_without_need(home: Path) -> None:
    places = JobPaths(home / "run", lambda: pytest.fail("asked"))
    assert places.at_site("../data/x") == "../data/x"
    assert places.place(f"{home}/run/x") == "x"


def test_our_own_directory_is_nobody_elses(home: Path) -> None:
    places = JobPaths(home / "run", lambda: "/w")
    for path in (".mantik", "in/../.mantik/up/1/x", f"{home}/run/.mantik/attempts/1"):
        with pytest.raises(UserError, match=r"\.mantik"):
            places.place(path)
    assert places.place(".mantik.txt") == ".mantik.txt"


def test_what_the_user_reads() -> None:
    assert display_path(".mantik/outside/data/x") == "/data/x"
    assert display_path(".mantik/up/2/data/x") == "../../data/x"
    assert display_path("data/.mantik/outside/x") == "data/.mantik/outside/x"
