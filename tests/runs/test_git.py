"""Projects from git: a real repository here, and the ways in which one is not to be had."""

import json
import shutil
import stat
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.runs import git, local_runs
from snakemake_executor_plugin_mantik.runs.directories import (
    RunDirectory,
    config_of_file,
    config_of_values,
    make_runs_home,
    runs_home,
)
from snakemake_executor_plugin_mantik.runs.projects import (
    missing_values,
    project_values,
    retake_project,
    take_project,
)

WEIRD = "it's a repo %ü"


def config(**more: object) -> BackendConfig:
    values = {"UnicoreApiUrl": "https://x.org/rest/core", "Resources": {"Queue": "q"}, **more}
    return BackendConfig.model_validate(values)


def run(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, "-C", str(directory), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(directory: Path, text: str) -> str:
    (directory / "sub").mkdir(exist_ok=True)
    (directory / "sub" / "train.py").write_text(text)
    (directory / "MLproject").write_text("name: top\n")
    run(directory, "add", "-A")
    run(directory, "commit", "-qm", text)
    return run(directory, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / WEIRD
    made.mkdir()
    run(made, "init", "-q", "-b", "main")
    commit(made, "one")
    return made


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def content(folder: Path) -> str:
    return (folder / "train.py").read_text()


def test_versions_and_folders(repository: Path, directory: RunDirectory) -> None:
    first = run(repository, "rev-parse", "HEAD")
    run(repository, "tag", "v1.0")
    run(repository, "checkout", "-q", "-b", "feature/x")
    second = commit(repository, "two")
    (repository / "sub" / "train.py").write_text("not committed")
    uri = f"file://{repository}".replace("%", "%25")

    for version, text, sha, branch in (
        ("main", "one", first, "main"),
        ("v1.0", "one", first, None),
        ("feature/x", "two", second, "feature/x"),
        (first, "one", first, None),
        (first[:9], "one", first, None),
    ):
        taken = take_project(f"{uri}#sub", version, config(), directory)
        assert content(taken.folder) == text, version
        assert taken.folder.name == "sub"
        assert taken.tags["mlflow.source.git.commit"] == sha
        assert taken.tags.get("mlflow.source.git.branch") == branch
        assert not (directory.path / "clone").exists()
        assert taken.origin is None
        shutil.rmtree(taken.folder)

    # A folder as it is, one in a repository, and the whole of it.
    assert (
        content(take_project(str(repository / "sub"), "", config(), directory).folder)
        == "not committed"
    )
    shutil.rmtree(directory.path / "project")
    assert (
        content(take_project(str(repository / "sub"), "main", config(), directory).folder) == "one"
    )
    whole = take_project(str(repository), "main", config(), directory)
    assert content(whole.folder / "sub") == "one"
    assert not (whole.folder / ".git").exists()
    assert content(repository / "sub") == "not committed"
    assert run(repository, "status", "--porcelain") == "M sub/train.py"
    assert run(repository, "branch", "--show-current") == "feature/x"


def test_a_bare_repository_and_submodules(
    repository: Path, directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Git refuses submodules that are files, unless told so.
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    outer = tmp_path / "outer"
    outer.mkdir()
    run(outer, "init", "-q", "-b", "main")
    run(outer, "submodule", "--quiet", "add", str(repository), "inner")
    commit(outer, "outer")
    run(tmp_path, "clone", "-q", "--bare", str(outer), "bare.git")

    taken = take_project(str(tmp_path / "bare.git"), "", config(), directory)

    assert taken.folder.name == "bare"
    assert content(taken.folder / "inner" / "sub") == "one"


class Closed(SimpleHTTPRequestHandler):
    """Serves files, repositories among them, to whoever gives the right user and password."""

    WANTED = "Basic " + b64encode(b"me@x:p%ss:word/2").decode()

    def do_GET(self) -> None:
        if self.headers["Authorization"] == self.WANTED:
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="x"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def closed(repository: Path, tmp_path: Path) -> Iterator[str]:
    """A server that wants a password, `127.0.0.1:PORT`; its repository is `/repo.git`."""
    run(tmp_path, "clone", "-q", "--bare", str(repository), "served/repo.git")
    run(tmp_path / "served" / "repo.git", "update-server-info")
    handler = partial(Closed, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("before", [0, 1])
def test_a_password_in_a_url_is_git_s_alone(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    kept, trace = tmp_path / "kept", tmp_path / "trace"
    kept.write_text(f"http://me:old-one@{closed}\n")
    monkeypatch.setenv("GIT_TRACE", str(trace))
    if before:  # a helper of the user's own, who would also keep what it is told
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", "credential.helper")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"store --file={kept}")

    git.fetch_project(f"http://me%40x:p%25ss%3Aword%2F2@{closed}/repo.git", "main", tmp_path / "c")

    assert content(tmp_path / "c" / "sub") == "one"
    told = [trace, kept, *(p for p in (tmp_path / "c").rglob("*") if p.is_file())]
    assert not [p for p in told if b"ss:word" in p.read_bytes() or b"p%25ss" in p.read_bytes()]
    assert "git-remote-http" in trace.read_text()
    with pytest.raises(UserError, match="cannot be read"):
        git.fetch_project(f"http://me%40x:wrong@{closed}/repo.git", "main", tmp_path / "d")
    with pytest.raises(UserError, match="cannot be read"):
        git.fetch_project(f"http://{closed}/repo.git", "main", tmp_path / "e")


@pytest.mark.parametrize(
    ("uri", "version", "told"),
    [
        ("{repository}", "man", ["no branch, tag or commit 'man'", "did you mean main?"]),
        ("{repository}", "0123456789", ["no branch, tag or commit '0123456789'"]),
        ("{repository}#gone", "main", ["there is no folder 'gone' in it"]),
        ("{repository}#../x", "main", ["there is no folder '../x' in it"]),
        ("{repository}#out", "", ["leads out"]),
        ("{repository}", "--upload-pack=x", ["may begin with -"]),
        ("{tmp_path}", "main", ["in no git repository"]),
        ("{tmp_path}/gone", "", ["there is no such folder"]),
        ("x.zip", "", ["zip"]),
        ("https://me:hunter2@127.0.0.1:9/x.git", "", ["https://127.0.0.1:9/x.git"]),
        ("file://{tmp_path}/gone", "", ["there is no such folder"]),
    ],
)
def test_what_is_not_to_be_had(
    repository: Path, directory: RunDirectory, tmp_path: Path, uri: str, version: str,
    told: list[str],
) -> None:  # fmt: skip
    (repository / "out").symlink_to("/usr")
    with pytest.raises(UserError) as caught:
        take_project(
            uri.format(repository=repository, tmp_path=tmp_path), version, config(), directory
        )
    for words in told:
        assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_no_access_and_no_git(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(UserError, match="program git is not installed"):
        git.fetch_project("https://example.org/x.git", "", directory.path / "clone")
    stub = programs / "git"
    # What git and a server say to a private repository without credentials.
    stub.write_text(
        "#!/bin/sh\n"
        '[ "$GIT_TERMINAL_PROMPT" = 0 ] || exit 1\n'
        'echo "warning: redirecting to https://me:hunter2@else.org; fatal: could not read Username'
        " for 'https://example.org': terminal prompts disabled\" >&2\nexit 128\n"
    )
    stub.chmod(0o755)
    with pytest.raises(UserError, match="cannot be read") as caught:
        git.fetch_project("https://me:hunter2@example.org/x.git", "", directory.path / "clone")
    assert "credential helper" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_snapshot(
    tmp_path: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "a project\n"
    for path in (
        "MLproject", "train.py", "data/big.bin", "data/keep.csv", "img/x.sif", ".hidden/x",
        "out.log",
        "__pycache__/x.pyc", "mlproject-runs/x/model", "runs/there/request.json", "venv/pyvenv.cfg",
    ):  # fmt: skip
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(path)
    (project / "link.txt").symlink_to("train.py")
    monkeypatch.setenv("MANTIK_RUNS", str(project / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("own")
    excluding = config(
        Exclude=["data/", "*.sif", "*.log", "MLproject"],
        Environment={"Apptainer": {"Path": "img/x.sif"}},
    )

    taken = take_project("a project\n", "", excluding, directory)

    def there() -> set[str]:
        files = (path for path in taken.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(taken.folder)) for path in files}

    assert there() == {"MLproject", "train.py", "img/x.sif", "link.txt"}
    assert taken.folder.name == "a-project"
    given = {
        "a": "a project\n/data/keep.csv", "b": "own.csv", "c": str(project / "data"),
        "d": "train.py", "e": "a project\n/.hidden/x", "f": "gone", "g": "own.csv",
    }  # fmt: skip
    values = project_values(taken, given, {"a", "b", "c", "d", "e", "f"})
    assert values == {
        "a": "data/keep.csv", "b": "mantik-inputs/b/own.csv", "c": "data", "d": "train.py",
        "e": "mantik-inputs/e/x", "f": "gone", "g": "own.csv",
    }  # fmt: skip
    assert (taken.folder / "mantik-inputs/b/own.csv").read_text() == "own"
    assert there() == {
        "MLproject", "train.py", "img/x.sif", "link.txt", "data/keep.csv", "data/big.bin",
        "mantik-inputs/b/own.csv", "mantik-inputs/e/x",
    }  # fmt: skip

    # To submit it again takes all of that, and nothing that came of it.
    result = taken.folder / "mlproject-runs" / "x" / "model"
    result.parent.mkdir(parents=True)
    result.touch()
    again = retake_project(taken.folder, RunDirectory(tmp_path / "again"))
    result.unlink()
    assert {str(p.relative_to(again)) for p in again.rglob("*") if p.is_file()} == there()


def test_a_version_that_changes_while_this_process_lives(
    repository: Path, directory: RunDirectory
) -> None:
    seen = []
    for text in ("two", "three"):
        sha = commit(repository, text)
        taken = take_project(str(repository / "sub"), "", config(), directory)
        seen.append(taken.tags["mlflow.source.git.commit"] == sha)
        shutil.rmtree(taken.folder)
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("/etc/passwd", True),
        ("../../site/alps.yaml", True),  # where the backend config's copy will be
        ("..", True),
        ("train.py", False),
        ("/p/project/at/the/site", False),
    ],
)
def test_a_link_of_somebody_elses_that_leads_out(
    repository: Path, directory: RunDirectory, link: str, told: bool
) -> None:
    (repository / "sub" / "data").symlink_to(link)
    commit(repository, "two")

    if not told:
        assert (
            content(take_project(str(repository), "main", config(), directory).folder / "sub")
            == "two"
        )
        return
    with pytest.raises(UserError, match="symbolic links") as raised:
        take_project(f"{repository}#sub", "main", config(), directory)

    assert f"data -> {link}" in str(raised.value)


def test_paths_that_are_nowhere(repository: Path, directory: RunDirectory) -> None:
    taken = take_project(str(repository / "sub"), "", config(), directory)
    values = {
        "gone": "gone.csv", "there": "train.py", "at_the_site": "/p/x.csv", "none": "",
        "made": "{output}/x", "elsewhere": "s3://b/x", "text": "gone.csv",
    }  # fmt: skip

    assert set(missing_values(taken, values, set(values) - {"text"})) == {"gone"}


# Backend configs as runs are given them, and where runs lie.


KEYS = {"UnicoreApiUrl": "https://x.org/rest/core", "Resources": {"Queue": "q"}}
MLFLOW: dict[str, object] = {
    "ENV_MANAGER": None, "SYNCHRONOUS": False, "DOCKER_ARGS": {}, "STORAGE_DIR": None,
    "build_image": False, "docker_auth": None,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "alps.json"
    made.write_text(json.dumps(KEYS))
    return made


def test_what_mlflow_hands_over(file: Path) -> None:
    named = config_of_values({"config": str(file), "account": "a1", "wait": True, **MLFLOW}, {})
    assert (named.site, named.source, named.account, named.wait) == ("alps", str(file), "a1", True)
    assert named.content == file.read_bytes()
    assert config_of_values({"config": str(file), "site": "other"}, {}).site == "other"
    itself = config_of_values({**KEYS, **MLFLOW, "extra": {"n": 3}}, {})
    assert (itself.site, itself.source, itself.extra) == ("site", "", {"n": "3"})
    assert json.loads(itself.content) == KEYS
    assert config_of_values({**KEYS, "site": "alps"}, {}).site == "alps"
    environ = {"SNAKEMAKE_MANTIK_BACKEND_CONFIG": f"daint={file}"}
    assert config_of_values(MLFLOW, environ).site == "daint"
    assert config_of_file(f"todi={file}", environ).site == "todi"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "a run needs one backend config, found none"),
        ({"config": "gone.yaml"}, "gone.yaml: there is no such file"),
        ({"config": 3}, "config: has to be a text, found 3"),
        (
            {"config": "{file}", **KEYS},
            "keys of a config are given as well: UnicoreApiUrl, Resources",
        ),
        ({**KEYS, "site": "1x"}, "'1x' cannot be the name of a site"),
        ({**KEYS, "wait": "yes"}, "wait: has to be true or false"),
        ({**KEYS, "extra": [1]}, "extra: has to be a mapping"),
        ({"UnicoreApiUrl": "https://x.org/rest/core"}, "Resources"),
        ({**KEYS, "Enviroment": {}}, "Enviroment"),
    ],
)
def test_mistakes(given: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of_values(given, {})
    assert told in str(caught.value)


def test_several_in_the_environment(file: Path) -> None:
    with pytest.raises(UserError, match="found 2 in SNAKEMAKE_MANTIK_BACKEND_CONFIG"):
        config_of_file("", {"SNAKEMAKE_MANTIK_BACKEND_CONFIG": f"{file} b={file}"})


def test_where_runs_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_home({"MANTIK_RUNS": str(tmp_path)}) == tmp_path
    assert runs_home({"XDG_DATA_HOME": "/data"}) == Path("/data/mantik/runs")
    assert runs_home({"XDG_DATA_HOME": "relative"}) == Path.home() / ".local/share/mantik/runs"
    made = make_runs_home({"MANTIK_RUNS": str(tmp_path / "a" / "b")})
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="MANTIK_RUNS"):
        make_runs_home({"MANTIK_RUNS": str(tmp_path / "file" / "b")})
    monkeypatch.setenv("MANTIK_RUNS", str(made))
    (made / "broken").mkdir()
    (made / "broken" / "request.json").write_text("{")
    assert local_runs.list_local_runs() == []
    with pytest.raises(MantikError, match="cannot be read"):
        local_runs.find_local_run("broken")
