"""What holds secrets is no project file, whatever it is called and wherever links lead."""

import asyncio
import filecmp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common import state_directory
from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.exclude import Exclude, Include
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.sites.credentials import credential_files
from snakemake_executor_plugin_mantik.staging.local import LocalFiles
from snakemake_executor_plugin_mantik.staging.project_files import (
    ProjectFileFilter,
    ProjectFiles,
    list_candidates,
)
from snakemake_executor_plugin_mantik.staging.secret_files import CredentialFiles, SecretFiles

NASTY = "a b'\"\n#%*$HOME`ü;-"
PEM = "-----BEGIN {}PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcw\n"


def write(path: Path, content: str = "x\n", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def chosen(root: Path, *include: str, exclude: tuple[str, ...] = ()) -> ProjectFiles:
    return ProjectFileFilter(root, Exclude(exclude), include=Include(include)).select(1 << 25)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, which the process is in."""
    workdir = tmp_path / "work dir"
    workdir.mkdir()
    monkeypatch.chdir(workdir)
    return workdir


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o200, 0o000])
@pytest.mark.parametrize("name", ["data.csv", NASTY])
def test_files_closed_to_others_stay_here(here: Path, name: str, mode: int) -> None:
    write(here / "d" / name, mode=mode)
    write(here / "open", mode=0o640)
    write(here / "world", mode=0o604)
    found = chosen(here)
    assert found.paths == ("open", "world")
    assert f"closed to others, mode {mode:04o}" in found.withheld
    assert "Site: Include" in found.withheld
    assert "\n" not in found.withheld


@pytest.fixture
def closing_umask() -> Iterator[None]:
    """A process whose new files are all closed to others."""
    state_directory.read_umask.cache_clear()
    old = os.umask(0o077)
    yield
    os.umask(old)
    state_directory.read_umask.cache_clear()


@pytest.mark.usefixtures("closing_umask")
def test_a_mode_that_every_new_file_has_says_nothing(here: Path) -> None:
    for name in ("train.py", "token.txt"):
        (here / name).write_text("x")
        assert stat.S_IMODE((here / name).stat().st_mode) == 0o600
    assert chosen(here).paths == ("train.py",)


@pytest.mark.parametrize(
    "content",
    [
        PEM.format(""),
        PEM.format("RSA "),
        PEM.format("EC "),
        PEM.format("DSA "),
        PEM.format("ENCRYPTED "),
        PEM.format("OPENSSH ").replace("\n", "\r\n"),
        "Bag Attributes\n  localKeyID: 01\n" + PEM.format(""),
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n" + PEM.format(""),
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF\n",
        '{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\nMIIE"}',
        "tls:\n  key: |\n    -----BEGIN PRIVATE KEY-----\n    MIIE\n",
        'KEY = """-----BEGIN RSA PRIVATE KEY-----\nMIIE"""\n',
        "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nP2/56wAAA\n",
        "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\n",
        "# created: today\nAGE-SECRET-KEY-1QQPQQPZZRRYY00112233445566\n",
        "x" * 400_000 + "\n" + PEM.format(""),
    ],
)
def test_private_keys_of_every_format_and_name_stay_here(here: Path, content: str) -> None:
    write(here / "notes.txt", content)
    write(here / "utf16.txt").write_text(content, encoding="utf-16")
    found = chosen(here)
    assert found.paths == ()
    assert found.withheld.count("a private key") == 2


def test_what_only_speaks_of_keys_goes(here: Path) -> None:
    write(here / "find.py", 'if "-----BEGIN RSA PRIVATE KEY-----" in text: refuse()\n')
    write(here / "key.pub", "ssh-ed25519 AAAAC3Nz me@here\n")
    write(here / "ca.pem", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    write(here / "public.pem", "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n")
    assert len(chosen(here).paths) == 4


@pytest.mark.parametrize(
    "name",
    [
        "credentials.json", "credentials", "Credentials.CSV", "aws_credentials", "my-secrets.yaml",
        "secret.txt", "hpc1.password", "db_password.txt", "passwords.csv", "passwd", "token",
        "token.txt", "github-token.json", "api_key.txt", "apikey", "access-key.csv", "id_rsa",
        "id_ed25519", "id_ecdsa_sk", "netrc", "_netrc", "env", "prod.env", "env.local", "site.key",
        "cert.p12", "store.jks", "me.ppk", "me.keytab", "kubeconfig", "pgpass", "htpasswd",
        "client_secret_123.apps.json", "my-service-account.json", "token.txt.bak", "credentials~",
    ],
)  # fmt: skip
def test_names_of_secrets_stay_here(here: Path, name: str) -> None:
    write(here / "conf" / name)
    found = chosen(here)
    assert found.paths == ()
    assert f"conf/{name} (named like a secret)" in found.withheld


@pytest.mark.parametrize(
    "name",
    [
        "token.py", "tokenizer.json", "special_tokens_map.json", "tokens.txt", "secrets.py",
        "password_strength.R", "environment.yaml", "env.yaml", "keys.csv", "id_rsa.pub",
        "credentials_test.py", "monkey", "turkey.txt", "tokenize.sh", "secretary.txt",
    ],
)  # fmt: skip
def test_other_names_go(here: Path, name: str) -> None:
    write(here / name)
    assert chosen(here).paths == (name,)


def test_links_that_lead_out_stay_here(here: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "private")
    write(here / "real.txt")
    write(here / ".ssh" / "config")
    (here / "inside").symlink_to("real.txt")
    (here / "absolute").symlink_to(here / "real.txt")
    (here / "out").symlink_to(outside)
    (here / "relative").symlink_to("../outside/private")
    (here / "chain").symlink_to("out")
    (here / "hidden").symlink_to(".ssh/config")
    (here / "beside").symlink_to(write(tmp_path / "work dir 2" / "x"))
    found = chosen(here)
    assert found.paths == ("absolute", "inside", "real.txt")
    for name in ("out", "relative", "chain", "beside"):
        assert f"{name} (a link out of the directory)" in found.withheld
    assert "hidden (in a directory of secrets)" in found.withheld


def test_a_link_counts_as_what_it_leads_to(here: Path) -> None:
    write(here / ".env")
    write(here / "data" / "token.txt")
    (here / "settings").symlink_to(".env")
    (here / "plain.txt").symlink_to("data/token.txt")
    assert chosen(here).paths == ()


def test_a_working_directory_behind_a_link_is_inside(here: Path, tmp_path: Path) -> None:
    write(here / "real.txt")
    (here / "inside").symlink_to(here / "real.txt")
    (tmp_path / "link").symlink_to(here)
    assert chosen(tmp_path / "link").paths == ("inside", "real.txt")


def test_what_is_included_goes_and_is_no_longer_told(here: Path, tmp_path: Path) -> None:
    write(here / "run.sh", mode=0o700)
    write(here / "keys" / "token.txt", mode=0o600)
    (here / "data.bin").symlink_to(write(tmp_path / "shared.bin"))
    found = chosen(here, "run.sh", "keys/", "data.bin")
    assert found.paths == ("data.bin", "run.sh", "keys/token.txt")
    assert found.withheld == ""
    assert chosen(here, "*.sh", "*.txt", "!keys/token.txt").paths == ("run.sh",)
    assert chosen(here, "*", exclude=("keys/",)).paths == ("data.bin", "run.sh")


@pytest.mark.parametrize(
    "variable",
    ["MANTIK_HPC1_PASSWORD_FILE", "MANTIK_FIRECREST_TOKEN_FILE", "MANTIK_OTHER_SITE_SSH_KEY"],
)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_credentials_own_file_never_goes(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, absolute: bool
) -> None:
    """Under any name, by links and hard links, wherever it lies, whatever is included."""
    held = write(tmp_path / "elsewhere" / "x")
    named = write(here / "data" / "plain.txt")
    os.link(named, here / "hard.txt")
    (here / "soft.txt").symlink_to("data/plain.txt")
    write(here / "other.txt", "y\n")
    monkeypatch.setenv(variable, str(named) if absolute else "data/plain.txt")
    found = chosen(here, "*")
    assert found.paths == ("other.txt",)
    for name in ("hard.txt", "soft.txt", "data/plain.txt"):
        assert f"{name} ({variable})" in found.withheld
    monkeypatch.setenv(variable, str(held))
    os.link(held, here / "linked.txt")
    assert "linked.txt" not in chosen(here, "*").paths
    assert "linked.txt" not in dict(list_candidates(here, Exclude(()), (), Include(["*"])))


def test_a_copy_of_a_credentials_file_never_goes(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = write(tmp_path / "elsewhere" / "x", "hunter2\n")
    write(here / "copy.txt", "hunter2\n")
    write(here / "same-size.txt", "hunter3\n")
    write(here / "longer.txt", "hunter2\n\n")
    monkeypatch.setenv("MANTIK_HPC1_PASSWORD_FILE", str(held))
    found = chosen(here, "*")
    assert found.paths == ("longer.txt", "same-size.txt")
    assert "copy.txt (a copy of MANTIK_HPC1_PASSWORD_FILE)" in found.withheld
    assert dict(list_candidates(here, Exclude(()), (), Include(["*"]))).keys() == set(found.paths)


def test_an_empty_credential_has_no_copies(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANTIK_HPC1_PASSWORD_FILE", str(write(tmp_path / "empty", "")))
    write(here / "__init__.py", "")
    assert chosen(here).paths == ("__init__.py",)


def test_a_file_of_another_size_is_not_read(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = write(tmp_path / "elsewhere" / "x", "hunter2\n")
    monkeypatch.setenv("MANTIK_HPC1_PASSWORD_FILE", str(held))
    credentials = CredentialFiles(os.environ)
    compared: list[object] = []
    monkeypatch.setattr(filecmp, "cmp", lambda *paths, shallow: compared.append(paths))
    for name, content in (("short", "x\n"), ("same", "hunter3\n")):
        path = write(here / name, content)
        credentials.why(str(path), path.stat())
    assert compared == [(held, str(here / "same"))]


def test_the_files_that_variables_name(tmp_path: Path) -> None:
    key = write(tmp_path / "named", f"{tmp_path}/key\n")
    found = credential_files(
        {
            "MANTIK_A_PASSWORD_FILE": "~/p",
            "MANTIK_A_SSH_KEY_FILE": str(key),
            "MANTIK_B_SSH_KEY": "k",
            "MANTIK_B_TOKEN_FILE": "",
            "MANTIK_C_PASSWORD_FILE": "~nobody-of-this-name/p",
            "MANTIK_D_SSH_KEY_FILE": str(tmp_path / "missing"),
            "MANTIK_A_PASSWORD": "p",
            "OTHER_FILE": "x",
        }
    )
    assert found == {
        "MANTIK_A_PASSWORD_FILE": Path.home() / "p",
        "MANTIK_A_SSH_KEY_FILE": key,
        "MANTIK_A_SSH_KEY": tmp_path / "key",
        "MANTIK_B_SSH_KEY": Path("k"),
        "MANTIK_C_PASSWORD_FILE": Path("~nobody-of-this-name/p"),
        "MANTIK_D_SSH_KEY_FILE": tmp_path / "missing",
    }


@pytest.mark.parametrize("path", ["p.txt", "hard.txt", "soft.txt", "data", "data/hard.txt"])
def test_a_credential_is_no_input(here: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    named = write(here / "p.txt", "hunter2\n")
    write(here / "data" / "x")
    for link in ("hard.txt", "data/hard.txt"):
        os.link(named, here / link)
    (here / "soft.txt").symlink_to("p.txt")
    monkeypatch.setenv("MANTIK_HPC1_PASSWORD_FILE", "p.txt")
    journal = Journal(here / ".snakemake" / "mantik")
    files = LocalFiles(here, journal.files)
    try:
        with pytest.raises(UserError, match="MANTIK_HPC1_PASSWORD_FILE"):
            asyncio.run(files.look_at([(path, None)]))
        assert len(asyncio.run(files.look_at([("data/x", None)]))) == 1
    finally:
        journal.close()


RANDOM = "Zx9Kq2Lm4Vb7Nw3Rt6Yp8Hd1Fg5Js0AcEu"
"""Its parts look like those of tokens."""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.py", f"TOKEN = 'ghp_{RANDOM}12'"),
        ("a.md", f"glpat-{RANDOM[:20]}"),
        ("a.sh", f"export HF=hf_{RANDOM.translate(str.maketrans('0123456789', 'abcdefghij'))}"),
        ("a.txt", f"https://hooks.slack.com/services/T00/B00/{RANDOM[:24]}"),
        ("a.ipynb", f'{{"source": ["key = \\"sk-ant-{RANDOM * 2}\\""]}}'),
        ("a.csv", f"u,eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{RANDOM}"),
        ("b.yaml", "mantik-notify: curl -d @- http://host/services/T000/B000/X"),
        ("aws.ini", f"[default]\naws_secret_access_key = {RANDOM}/+xyz"),
        ("config.yaml", "db:\n  password: hunter2\n"),
        ("config.json", '{"a": 1, "db_password": "hunter2"}'),
        ("settings.toml", 'api-key = "hunter2"'),
        ("requirements.txt", "--index-url https://me:hunter2@pypi.lab.org/simple"),
    ],
)
def test_secrets_in_contents_stay_here(here: Path, name: str, content: str) -> None:
    write(here / name, content)
    found = chosen(here)
    assert (found.paths, name in found.withheld) == ((), True)
    assert chosen(here, name).paths == (name,)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", "use ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx or AKIAIOSFODNN7EXAMPLE"),
        ("login.py", 'password = "hunter2"'),
        ("config.yaml", "password: ''\ntoken: null\nsecret: ${SECRET}\napi_key: <yours>\n"),
        ("tokenizer_config.json", '{"pad_token": "<pad>", "max_tokens": 512, "token": "[CLS]"}'),
        ("params.yaml", "password_file: /run/secret\nsecret: true\nmax_token: 12345678901234567\n"),
        ("schema.json", '{"password": {"type": "string"}, "nextToken": "abcdefghij0123456789"}'),
        ("users.csv", "name,password\nme,hunter2\n"),
        ("doc.txt", "password: is what you type\n"),
        ("data.bin", f"\0ghp_{RANDOM}12"),
        ("sums.yaml", "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"),
    ],
)
def test_ordinary_contents_go(here: Path, name: str, content: str) -> None:
    write(here / name, content)
    assert chosen(here).paths == (name,)


def test_of_a_large_file_only_the_beginning_is_read(here: Path) -> None:
    write(here / "large.csv", "x\n" * (1 << 19) + f"ghp_{RANDOM}12\n")
    write(here / "token.csv", f"ghp_{RANDOM}12\n" + "x\n" * (1 << 19))
    found = ProjectFileFilter(here, Exclude(()), file_limit=1 << 25).select(1 << 25)
    assert found.paths == ("large.csv",)


def test_profiles_of_this_machine_stay_here(here: Path) -> None:
    for name in ("default/config.yaml", "a/profile.yaml", "b/config.v9+.yaml", "default/x.yaml"):
        write(here / "profiles" / name)
    found = chosen(here)
    assert found.paths == ("profiles/default/x.yaml",)
    assert found.withheld == ""


def test_a_directory_that_cannot_be_read_hides_no_secret_beside_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here / "data/key.txt", PEM.format(""))
    (here / "data/closed").mkdir()
    listed = os.listdir

    def listdir(path: Path) -> list[str]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert "data/key.txt" in SecretFiles(Include(())).look_at("data", str(here / "data"))
