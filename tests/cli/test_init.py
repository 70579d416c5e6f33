from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.init import PROFILE, init
from snakemake_executor_plugin_mantik.common.errors import ConfigError, UserError
from snakemake_executor_plugin_mantik.config.known_sites import KNOWN_SITES, KnownSite
from snakemake_executor_plugin_mantik.config.reading import read_backend_config, read_configs

URL = "https://hpc.example.org:8080/SITE/rest/core"


def run(*words: str) -> Result:
    app = typer.Typer()
    app.command()(init)
    return CliRunner().invoke(app, list(words))


def test_what_is_written_is_read_without_a_word(tmp_path: Path) -> None:
    done = run("--site", "big-one", "--url", URL, "--queue", "gpu & more", "-d", str(tmp_path))
    assert isinstance(done.exception, ConfigError)
    assert not list(tmp_path.iterdir())
    done = run("--site", "big-one", "--url", URL, "--queue", "batch", "-d", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "MANTIK_BIG_ONE_PASSWORD" in done.output
    assert "MANTIK_COMPUTE_BUDGET_ACCOUNT" in done.output
    profile = YAML(typ="safe", pure=True).load((tmp_path / PROFILE).read_text())
    assert profile == {
        "executor": "mantik",
        "jobs": 50,
        "mantik-backend-config": ["big-one.yaml"],
        "nolock": True,
        "rerun-incomplete": True,
    }
    loaded = read_configs(profile["mantik-backend-config"], tmp_path)["big-one"]
    assert loaded.warnings == ()
    assert loaded.config.api_url == URL
    assert loaded.config.resources.queue == "batch"


def test_what_is_commented_out_can_be_used_as_it_stands(tmp_path: Path) -> None:
    run("--site", "juwels", "--queue", "batch", "-d", str(tmp_path))
    text = (tmp_path / "juwels.yaml").read_text()
    head, _, body = text.partition("\n\n")
    assert head.startswith("#")
    used = [
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        for line in body.splitlines()
    ]
    (tmp_path / "full.yaml").write_text("\n".join(used))
    config, warnings = read_backend_config(tmp_path / "full.yaml")
    assert warnings == []
    assert config.api_url == KNOWN_SITES["juwels"].url
    assert config.environment.apptainer is not None
    assert config.resources.memory_mib_per_node == 65536
    assert config.environment.variables == {"OMP_PROC_BIND": "true"}
    assert config.exclude == ("*.ckpt", "data/raw/")
    assert config.site.max_jobs == 100


@pytest.mark.parametrize("site", KNOWN_SITES.values(), ids=lambda site: site.name)
def test_configs_of_known_sites_pass_the_check(site: KnownSite, tmp_path: Path) -> None:
    where = () if site.url else ("--url", URL)
    done = run("--site", site.name, "--environment", "none", *where, "-d", str(tmp_path))
    assert done.exit_code == 0, done.output
    file = tmp_path / f"{site.name}.yaml"
    checked = CliRunner().invoke(_app(), ["check", str(file), "--project", str(tmp_path)])
    assert (checked.exit_code, checked.stderr) == (0, ""), checked.output
    config = read_configs([file.name], tmp_path)[site.name].config
    assert (config.api, config.api_url) == (site.api, site.url or URL)
    assert config.resources.queue == site.queues[0]
    if config.firecrest:
        assert (config.firecrest.machine, config.firecrest.token_url) == (
            site.machine,
            site.token_url,
        )
    variable = "CLIENT_SECRET" if site.api == "firecrest" else "PASSWORD"
    assert f"MANTIK_{site.name.upper()}_{variable}" in done.output
    assert site.source in file.read_text()


@pytest.mark.parametrize(
    ("site", "words", "cores"),
    [
        ("juwels", ("--queue", "batch"), 48),
        ("daint", ("--environment", "modules"), 288),
        ("daint", ("--environment", "uenv"), None),  # no pool can run its jobs
        ("daint", ("--queue", "debug"), None),  # which has a short limit
        ("bristen", (), None),  # it is not known whether jobs get whole nodes
    ],
)
def test_where_jobs_get_whole_nodes_short_ones_share_them(
    site: str, words: tuple[str, ...], cores: int | None, tmp_path: Path
) -> None:
    done = run("--site", site, *words, "-d", str(tmp_path))
    assert done.exit_code == 0, done.output
    config = read_configs([f"{site}.yaml"], tmp_path)[site].config
    pools = list(config.pools.values())
    assert [(pool.cpus_per_node, pool.takes_s) for pool in pools] == [(cores, 900)] * bool(cores)
    assert [pool.queue for pool in pools] == [config.resources.queue] * bool(cores)
    assert "short: {Queue:" in (tmp_path / f"{site}.yaml").read_text()


@pytest.mark.parametrize("there", [(), ("requirements.txt", "venv/pyvenv.cfg")], ids=str)
@pytest.mark.parametrize(
    ("kind", "path", "part"),
    [
        ("apptainer", "", "python"),
        ("apptainer", "/p/i.sif", "Apptainer /p/i.sif"),
        ("container-engine", "", "ContainerEngine my-environment"),
        ("container-engine", "/p/e.toml", "ContainerEngine /p/e.toml"),
        ("uenv", "", "Uenv prgenv-gnu/24.11:v1"),
        ("pyxis", "", "Pyxis nvcr.io#nvidia/pytorch:24.01-py3"),
        ("venv", "", "Python venv"),
        ("venv", "/p/v", "Python /p/v"),
        ("modules", "GCC, Python/3.12", "UNICORE"),
        ("none", "", "queue batch"),
    ],
)
def test_every_environment_passes_the_check_as_it_is(
    kind: str, path: str, part: str, there: tuple[str, ...], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    words = ("--site", "a", "--url", URL, "--queue", "batch", "--environment", kind)
    done = run(*words, *(("--path", path) if path else ()), "-d", str(tmp_path))
    assert done.exit_code == 0, done.output
    file = tmp_path / "a.yaml"
    checked = CliRunner().invoke(_app(), ["check", str(file), "--project", str(tmp_path)])
    assert (checked.exit_code, checked.stderr) == (0, ""), checked.output
    assert part in checked.stdout


def test_on_a_terminal_what_is_missing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_mantik.cli.init._is_terminal", lambda: True)
    app = typer.Typer()
    app.command()(init)
    done = CliRunner().invoke(app, ["-d", str(tmp_path)], input=f"mine\n{URL}\ngpu\n")
    assert done.exit_code == 0, done.output
    config = read_configs(["mine.yaml"], tmp_path)["mine"].config
    assert (config.api_url, config.resources.queue) == (URL, "gpu")


def test_the_known_sites_are_listed(tmp_path: Path) -> None:
    done = run("--list", "-d", str(tmp_path))
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines] == list(KNOWN_SITES)
    for line, site in zip(lines, KNOWN_SITES.values(), strict=True):
        assert (site.url or "no URL is published") in line
        assert ", ".join(site.queues) in line
    assert not list(tmp_path.iterdir())


def test_options_win_over_what_is_known(tmp_path: Path) -> None:
    words = "--site my-alps --url https://f.example.org/v2 --machine alp --queue gpu"
    words += f" --token-url https://t.example.org --environment python -d {tmp_path}"
    assert run(*words.split(), "--path", "/p/ve nv").exit_code == 0
    config = read_configs(["my-alps.yaml"], tmp_path)["my-alps"].config
    assert config.firecrest is not None
    assert (config.api_url, config.firecrest.machine) == ("https://f.example.org/v2", "alp")
    assert config.environment.python is not None
    assert (config.resources.queue, config.environment.python.path) == ("gpu", "/p/ve nv")
    assert run("--site", "daint", "--queue", "debug", "-d", str(tmp_path)).exit_code == 0
    assert read_configs(["daint.yaml"], tmp_path)["daint"].config.resources.queue == "debug"


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    config, profile = tmp_path / "a.yaml", tmp_path / PROFILE
    words = ("--site", "a", "--url", URL, "--queue", "q", "-d", str(tmp_path))
    config.write_text("mine")
    done = run(*words)
    assert isinstance(done.exception, UserError)
    assert (config.read_text(), profile.exists()) == ("mine", False)
    config.unlink()
    profile.parent.mkdir(parents=True)
    profile.write_text("executor: slurm\n")
    done = run(*words)
    assert done.exit_code == 0
    assert f"Kept {profile}; for this site and executor it has to say" in done.output
    assert "  executor: mantik\n" in done.output
    assert profile.read_text() == "executor: slurm\n"
    done = run(*words, "--force")
    assert done.exit_code == 0
    assert "executor: mantik" in profile.read_text()


@pytest.mark.parametrize(
    ("taken", "before", "after"),
    [
        ("profiles/default/config.yaml", "jobs: 3 # few\n{}: [b.yaml]\n",
         'jobs: 3 # few\n{}: [b.yaml, "a.yaml"]\n'),
        ("default/config.yaml", "# mine\n{}:\n  - x=b.yaml # first\n\n# more\ncores: 4",
         '# mine\n{}:\n  - x=b.yaml # first\n  - "a.yaml"\n\n# more\ncores: 4\n'),
        ("workflow/profiles/default/profile.v9+.yaml", "{}: b.yaml", '{}: ["b.yaml", "a.yaml"]\n'),
        ("profiles/default/profile.yaml", "cores: 4", 'cores: 4\n'),
        ("profiles/default/profile.yaml", "", ""),
    ],
)  # fmt: skip
def test_a_site_is_added_to_the_profile_that_snakemake_uses(
    tmp_path: Path, taken: str, before: str, after: str
) -> None:
    """That is the only one, and what stands in it stays."""
    words = ("--site", "a", "--url", URL, "--queue", "q", "-d", str(tmp_path))
    profile = tmp_path / taken
    profile.parent.mkdir(parents=True)
    profile.write_text(before.format("mantik-backend-config"))
    (profile.parent / "profile.v99+.yaml").write_text("")
    done = run(*words)
    assert done.exit_code == 0
    assert f"Added a.yaml to {profile}: " in done.output
    text = profile.read_text()
    assert text.startswith(after.format("mantik-backend-config"))
    options = YAML(typ="safe", pure=True).load(text)
    assert options.keys() >= {"executor", "jobs", "nolock", "rerun-incomplete"}
    assert options["mantik-backend-config"][-1] == "a.yaml"
    assert run(*words, "--force").exit_code == 0
    assert profile.read_text() == text, "it is there already"
    (profile.parent / "config.yaml").touch()
    said = run(*words, "--force").output
    assert ("keep only one" in said) == (Path(taken).name == "profile.yaml")
    assert (tmp_path / PROFILE).exists() == ("profiles/default" in taken[:16])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--site", "unheard-of"), "juwels"),
        (("--site", "a b", "--url", URL), "letters, digits"),
        (("--site", "../up", "--url", URL), "letters, digits"),
        (("--site", "max", "--url", URL), "Snakemake"),
        (("--site", "a", "--url", "hpc.example.org"), "https://"),
        (("--site", "jusuf"), "daint"),
        (("--site", "a", "--url", URL, "--machine", "m"), "--token-url"),
        (("--site", "a", "--url", URL, "--path", "x"), "--environment"),
        (("--site", "a", "--url", URL, "--queue", ""), "--queue"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    queue = () if "--queue" in words else ("--queue", "q")
    done = run(*words, *queue, "-d", str(tmp_path / "x"))
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--site", "juwels", "--queue", "q", "-d", str(tmp_path / "file"))
    assert isinstance(done.exception, UserError)
    assert "cannot be written" in str(done.exception)


def test_without_options_an_example_is_written_and_said_to_be_one(tmp_path: Path) -> None:
    done = run("-d", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "examples" in done.output
    loaded = read_configs(["hpc.yaml"], tmp_path)["hpc"]
    assert loaded.config.api_url == "https://unicore.example.org/SITE/rest/core"


def test_files_stay_if_that_is_wanted(tmp_path: Path) -> None:
    words = ("--site", "juwels", "--queue", "batch", "-d", str(tmp_path), "--files-stay")
    assert run(*words).exit_code == 0
    profile = YAML(typ="safe", pure=True).load((tmp_path / PROFILE).read_text())
    assert profile["default-storage-provider"] == "mantik"
    assert profile["default-storage-prefix"] == "mantik:"
    assert profile["shared-fs-usage"] == [
        "persistence", "software-deployment", "sources", "source-cache",
    ]  # fmt: skip
