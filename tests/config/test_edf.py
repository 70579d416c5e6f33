"""Environment Definition Files on this machine."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.named_files import (
    Edf,
    NamedFileError,
    may_mount,
    read_edf,
)
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.sites.base import SiteFacts


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


def test_a_definition_inherits_from_local_ones(tmp_path: Path) -> None:
    (tmp_path / "i.sqsh").touch()
    write(
        tmp_path,
        a='base_environment = ["./b.toml", "./c.toml"]\nmounts = ["/a:/a"]',
        b='image = "./i.sqsh"\nmounts = ["/b:/b"]',
        c='base_environment = "./b.toml"\n[env]\nX = "1"',
    )
    files = ("./b.toml", "./i.sqsh", "./c.toml")
    assert read_edf("a.toml", tmp_path) == Edf(
        files, "./i.sqsh", ("/b:/b", "/b:/b", "/a:/a"), whole=True
    )
    write(tmp_path, d='base_environment = "theirs"')
    assert read_edf("d.toml", tmp_path) == Edf((), "", (), whole=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image = [", "not valid TOML"),
        ('mounts = ["/a:/a"]', "names no image"),
        ('image = "x"', "has no mounts"),
        ('image = "x"\nmounts = "/a:/a"', "mounts in 'a.toml' has to be a list"),
        ("image = 3", "has to be a text"),
        ('image = "./x.sqsh"', "image './x.sqsh' of 'a.toml' was not found"),
        ('base_environment = "./b.toml"', "file './b.toml' was not found"),
        ('base_environment = "./a.toml"', "more than 10 levels"),
        ('base_environment = "./../b.toml"', "leaves the project"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, told: str) -> None:
    write(tmp_path, a=text)
    with pytest.raises(NamedFileError, match=told):
        read_edf("a.toml", tmp_path)


@pytest.mark.parametrize(
    ("mount", "fits"),
    [
        ("/scratch:/scratch", True),
        ("/scratch/me/flow/:/scratch/me/flow/:ro", True),
        ("/scratch/me", True),
        ("/scratch:/data", False),
        ("/scratch/me/flow2:/scratch/me/flow2", False),
        ("${SCRATCH}:${SCRATCH}", True),
        ("/scratch/${USER}:/scratch/${USER}", True),
        ("/store/${USER}:/store/${USER}", False),
    ],
)
def test_mounts_that_may_contain_the_workspace(mount: str, fits: bool) -> None:
    assert may_mount([mount], "/scratch/me/flow", "me") == fits


def test_a_workspace_outside_is_refused_once_it_is_known(tmp_path: Path) -> None:
    write(tmp_path, a='image = "x"\nmounts = ["/store:/store"]')
    config = BackendConfig.model_validate(
        {
            "UnicoreApiUrl": "https://u.org",
            "Resources": {"Queue": "q"},
            "Environments": {"train": {"ContainerEngine": {"File": "a.toml"}}},
        }
    )
    planner = Planner(config, None, tmp_path)
    planner.mounts_fit("train", SiteFacts("/store/flow", server=""))
    planner.mounts_fit("", SiteFacts("/scratch/flow", server=""))
    with pytest.raises(UserError, match="would not see the workspace /scratch/flow"):
        planner.mounts_fit("train", SiteFacts("/scratch/flow", server=""))
    assert planner.environment_files("train") == ((tmp_path / "a.toml", "a.toml"),)
