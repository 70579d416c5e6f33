import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.sites import authentication
from snakemake_executor_plugin_mantik.sites.authentication import (
    ApiKey,
    Bearer,
    ClientCredentials,
    Credential,
    DeviceLogin,
    Password,
    Refreshed,
    SshKey,
)
from snakemake_executor_plugin_mantik.sites.authentication import Issuer as TokenIssuer
from snakemake_executor_plugin_mantik.sites.credentials import (
    find_account,
    find_credentials,
    require_all,
)
from tests.support.parrot import Parrot, Say

SECRET = "s3cr3t-VALUE"


class Ring:
    def __init__(self, entries: Mapping[tuple[str, str], str] | None = None) -> None:
        self.entries = dict(entries or {})

    def set_password(self, service_name: str, username: str, password: str) -> None:
        self.entries[service_name, username] = password

    def get_password(self, service_name: str, username: str) -> str | None:
        return self.entries.get((service_name, username))


EMPTY = Ring()


def basic(credential: Credential) -> str:
    kind, encoded = credential.get_auth_header().split()
    assert kind == "Basic"
    return base64.b64decode(encoded).decode()


class TestFinding:
    def test_under_the_name_of_the_api(self) -> None:
        environ = {"MANTIK_UNICORE_USERNAME": "me", "MANTIK_UNICORE_PASSWORD": "p:ä ß"}
        assert basic(find_credentials("juwels", "unicore", environ, EMPTY)) == "me:p:ä ß"

    def test_the_sites_own_come_first(self) -> None:
        environ = {
            "MANTIK_UNICORE_TOKEN": "general",
            "MANTIK_JUWELS_BOOSTER_USERNAME": "me",
            "MANTIK_JUWELS_BOOSTER_PASSWORD": "own",
        }
        assert basic(find_credentials("juwels-booster", "unicore", environ, EMPTY)) == "me:own"
        other = find_credentials("jureca", "unicore", environ, EMPTY)
        assert other.get_auth_header() == "Bearer general"

    def test_own_name_with_a_general_password(self) -> None:
        environ = {"MANTIK_JUWELS_USERNAME": "me", "MANTIK_UNICORE_PASSWORD": "shared"}
        assert basic(find_credentials("juwels", "unicore", environ, EMPTY)) == "me:shared"

    def test_in_the_keyring(self) -> None:
        ring = Ring({("mantik:juwels", "USERNAME"): "me", ("mantik:juwels", "PASSWORD"): "ring"})
        assert basic(find_credentials("juwels", "unicore", {}, ring)) == "me:ring"
        named = {"MANTIK_UNICORE_USERNAME": "you"}
        assert basic(find_credentials("juwels", "unicore", named, ring)) == "you:ring"

    def test_empty_variables_count_as_not_set(self) -> None:
        environ = {"MANTIK_UNICORE_USERNAME": "me", "MANTIK_UNICORE_PASSWORD": ""}
        with pytest.raises(CredentialError):
            find_credentials("juwels", "unicore", environ, EMPTY)

    def test_missing_ones_are_named(self) -> None:
        with pytest.raises(CredentialError) as caught:
            find_credentials("juwels", "unicore", {"MANTIK_UNICORE_USERNAME": "me"}, EMPTY)
        text = str(caught.value)
        for name in ("MANTIK_UNICORE_PASSWORD", "MANTIK_JUWELS_", "mantik:juwels", "_SSH_KEY"):
            assert name in text
        assert "found only USERNAME" in text

    def test_missing_ones_of_all_sites_are_told_at_once(self) -> None:
        environ = {"MANTIK_B_TOKEN": SECRET}
        with pytest.raises(CredentialError) as caught:
            require_all({"a": "unicore", "b": "unicore", "c": "unicore"}, environ, EMPTY)
        assert "site a" in str(caught.value)
        assert "site b" not in str(caught.value)
        assert "site c" in str(caught.value)
        assert SECRET not in str(caught.value)
        assert list(require_all({"b": "unicore"}, environ, EMPTY)) == ["b"]

    def test_system_keyring_without_a_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import keyring
        from keyring.errors import NoKeyringError

        def no_backend(service_name: str, username: str) -> str:
            raise NoKeyringError("No recommended backend was available")

        monkeypatch.setattr(keyring, "get_password", no_backend)
        with pytest.raises(CredentialError):
            find_credentials("juwels", "unicore", {})

    def test_account(self) -> None:
        environ = {"MANTIK_COMPUTE_BUDGET_ACCOUNT": "all", "MANTIK_A_B_COMPUTE_BUDGET_ACCOUNT": "x"}
        assert find_account("a-b", environ) == "x"
        assert find_account("c", environ) == "all"
        assert find_account("c", {}) is None


class TestSecrecy:
    @pytest.mark.parametrize(
        "credential",
        [
            Password(SECRET, SECRET),
            Bearer(SECRET),
            Refreshed("https://issuer.example.org", "id", SECRET, refresh_token=SECRET),
        ],
    )
    def test_shows_nothing(self, credential: Credential) -> None:
        assert SECRET not in f"{credential} {credential!r}"

    def test_token_that_no_header_can_carry(self) -> None:
        with pytest.raises(CredentialError) as caught:
            Bearer(f"{SECRET}\n{SECRET}")
        assert SECRET not in str(caught.value)


class TestBearer:
    def test_expiry_is_read_without_checking(self) -> None:
        token = jwt.encode({"exp": 1_900_000_000}, "k" * 32)
        assert Bearer(token).expires_at() == 1_900_000_000

    @pytest.mark.parametrize("token", ["opaque", "a.b.c", "a.e30.c"])
    def test_no_expiry(self, token: str) -> None:
        assert Bearer(token).expires_at() is None

    def test_password_never_expires(self) -> None:
        assert Password("a", "b").expires_at() is None


KEYS: list[tuple[Callable[[], object], str]] = [
    (lambda: rsa.generate_private_key(65537, 2048), "RS256"),
    (lambda: ec.generate_private_key(ec.SECP256R1()), "ES256"),
    (ed25519.Ed25519PrivateKey.generate, "EdDSA"),
]


class TestSshKey:
    @pytest.mark.parametrize(("make", "algorithm"), KEYS)
    @pytest.mark.parametrize("passphrase", [None, "öffne"])
    def test_signs(
        self,
        tmp_path: Path,
        make: Callable[[], ed25519.Ed25519PrivateKey],
        algorithm: str,
        passphrase: str | None,
    ) -> None:
        key = make()
        secret = passphrase.encode() if passphrase else None
        file = tmp_path / "id"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                # encrypted keys of OpenSSH's own form would need the bcrypt package
                serialization.PrivateFormat.PKCS8
                if secret
                else serialization.PrivateFormat.OpenSSH,
                serialization.BestAvailableEncryption(secret)
                if secret
                else serialization.NoEncryption(),
            )
        )
        credential = SshKey("me", file, passphrase)
        token = credential.get_auth_header().removeprefix("Bearer ")
        claims = jwt.decode(token, key.public_key(), algorithms=[algorithm])
        assert (claims["sub"], claims["iss"]) == ("me", "me")
        assert 200 < claims["exp"] - time.time() < 400
        assert credential.get_auth_header() == f"Bearer {token}"

    @pytest.mark.parametrize("text", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"])
    def test_that_is_none(self, tmp_path: Path, text: bytes) -> None:
        file = tmp_path / "id"
        file.write_bytes(text)
        with pytest.raises(CredentialError, match="private key"):
            SshKey("me", file)

    def test_that_is_missing(self, tmp_path: Path) -> None:
        environ = {"MANTIK_A_USERNAME": "me", "MANTIK_A_SSH_KEY": str(tmp_path / "none")}
        with pytest.raises(CredentialError, match=r"site a: the key .* cannot be read"):
            find_credentials("a", "unicore", environ, EMPTY)


class FormServer(Parrot):
    """An HTTP server that answers forms with JSON, as `answer` says."""

    def __init__(self) -> None:
        super().__init__("/token")

    def say(self, path: str, headers: dict[str, str], body: bytes) -> Say:
        form = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        status, answer = self.answer(path, form)
        return Say(status, json.dumps(answer).encode())

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, object]]:
        raise NotImplementedError


class Issuer(FormServer):
    """A token endpoint that gives a new refresh token each time and takes only the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.valid = "first"
        self.count = 0
        self.expires_in = 3600.0
        self.status = 200

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, object]]:
        if self.status != 200:
            return self.status, {}
        if form["client_secret"] != "cs":
            return 401, {"error": "invalid_client"}
        self.count += 1
        if form["grant_type"] == "client_credentials":
            assert set(form) == {"grant_type", "client_id", "client_secret"}
            return 200, {"access_token": f"access-{self.count}", "expires_in": self.expires_in}
        if form["refresh_token"] != self.valid:
            return 400, {"error": "invalid_grant"}
        self.valid = f"refresh-{self.count}"
        return 200, {
            "access_token": f"access-{self.count}",
            "refresh_token": self.valid,
            "expires_in": self.expires_in,
        }


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer().running() as server:
        yield server


async def header(credential: Credential) -> str:
    await credential.renew()
    return credential.get_auth_header()


def refreshed(issuer: Issuer, token: str = "first") -> Refreshed:
    return Refreshed(issuer.url, "id", "cs", refresh_token=token)


def of_client(issuer: Issuer) -> ClientCredentials:
    return ClientCredentials(issuer.url, "id", "cs")


@pytest.mark.parametrize("make", [refreshed, of_client])
def test_one_request_for_many_at_the_same_time(
    issuer: Issuer, make: Callable[[Issuer], Credential]
) -> None:
    async def many() -> list[str]:
        credential = make(issuer)
        return list(await asyncio.gather(*(header(credential) for _ in range(20))))

    assert asyncio.run(many()) == ["Bearer access-1"] * 20


@pytest.mark.parametrize("make", [refreshed, of_client])
@pytest.mark.parametrize(
    ("lifetime", "used_for"),
    [(20, 10), (45, 5), (60, 20), (90, 45), (100, 50), (120, 60), (300, 240), (3600, 3540)],
)
def test_tokens_are_never_used_with_less_than_30_s_left(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, lifetime: float, used_for: float,
    make: Callable[[Issuer], Credential],
) -> None:  # fmt: skip
    """The server refuses them then; those that live shorter are used for half their life.

    Each renewal brings another refresh token, and the newest one counts.
    """
    assert lifetime - used_for > 30 or lifetime < 30
    issuer.expires_in = lifetime
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    credential = make(issuer)
    for number in range(1, 6):
        assert asyncio.run(header(credential)) == f"Bearer access-{number}"
        now += used_for - 0.5
        assert asyncio.run(header(credential)) == f"Bearer access-{number}"
        now += 1


class TestRefreshed:
    def test_refused(self, issuer: Issuer) -> None:
        with pytest.raises(CredentialError, match="refused") as caught:
            asyncio.run(header(refreshed(issuer, SECRET)))
        assert SECRET not in str(caught.value)

    def test_issuer_in_trouble(self, issuer: Issuer) -> None:
        issuer.status = 503
        with pytest.raises(SiteUnreachable):
            asyncio.run(header(refreshed(issuer)))

    @pytest.mark.parametrize("host", ["issuer.example.org", "localhost.example.org"])
    def test_over_plain_http(self, host: str) -> None:
        with pytest.raises(CredentialError, match="https"):
            Refreshed(f"http://{host}/token", "id", refresh_token="first")


class TestClientCredentials:
    def test_a_token_that_a_server_refused_is_renewed(self, issuer: Issuer) -> None:
        credential = of_client(issuer)
        assert asyncio.run(header(credential)) == "Bearer access-1"
        old = credential.headers()
        assert credential.refused(old)
        assert asyncio.run(header(credential)) == "Bearer access-2"
        assert credential.refused(old)  # told late: it has been renewed since
        assert asyncio.run(header(credential)) == "Bearer access-2"

    def test_refused(self, issuer: Issuer) -> None:
        credential = ClientCredentials(issuer.url, "id", SECRET)
        with pytest.raises(CredentialError, match="CLIENT_SECRET") as caught:
            asyncio.run(header(credential))
        assert SECRET not in f"{caught.value} {credential!r}"


class TestFirecrest:
    def find(
        self, environ: dict[str, str], token_url: str | None = "https://i/token"
    ) -> Credential:
        return find_credentials("alps", "firecrest", environ, EMPTY, issuer=TokenIssuer(token_url))

    def test_kinds(self) -> None:
        one = {"MANTIK_FIRECREST_CLIENT_ID": "id", "MANTIK_FIRECREST_CLIENT_SECRET": "cs"}
        assert isinstance(self.find(one), ClientCredentials)
        key = {**one, "MANTIK_FIRECREST_API_KEY": "key"}
        assert self.find(key).headers() == {"X-API-Key": "key"}
        refresh = {**key, "MANTIK_FIRECREST_REFRESH_TOKEN": "r"}
        assert isinstance(self.find(refresh), Refreshed)
        token = {**refresh, "MANTIK_FIRECREST_TOKEN": "t"}
        assert self.find(token).headers() == {"Authorization": "Bearer t"}

    def test_the_issuer(self, issuer: Issuer) -> None:
        environ = {"MANTIK_ALPS_CLIENT_ID": "id", "MANTIK_ALPS_CLIENT_SECRET": "cs"}
        assert asyncio.run(header(self.find(environ, issuer.url))) == "Bearer access-1"
        environ["MANTIK_ALPS_TOKEN_URL"] = issuer.url
        assert asyncio.run(header(self.find(environ))) == "Bearer access-2"
        assert asyncio.run(header(self.find(environ, None))) == "Bearer access-3"

    def test_missing_ones_are_named(self) -> None:
        with pytest.raises(CredentialError) as caught:
            self.find({"MANTIK_FIRECREST_CLIENT_ID": "id"})
        told = str(caught.value)
        assert "MANTIK_FIRECREST_CLIENT_SECRET" in told
        assert "TOKEN_URL" not in told
        assert "found only CLIENT_ID" in told
        with pytest.raises(CredentialError, match="MANTIK_FIRECREST_TOKEN_URL"):
            self.find({}, None)

    def test_those_of_the_other_api_do_not_count(self) -> None:
        with pytest.raises(CredentialError):
            self.find({"MANTIK_UNICORE_TOKEN": "t", "MANTIK_FIRECREST_USERNAME": "me"})

    def test_all_sites(self) -> None:
        environ = {
            "MANTIK_UNICORE_TOKEN": "t",
            "MANTIK_FIRECREST_CLIENT_ID": "id",
            "MANTIK_FIRECREST_CLIENT_SECRET": "cs",
        }
        sites = {"juwels": "unicore", "alps": "firecrest"}
        found = require_all(sites, environ, EMPTY, issuers={"alps": TokenIssuer("https://i/token")})
        assert isinstance(found["alps"], ClientCredentials)
        with pytest.raises(CredentialError, match="https"):
            require_all(
                sites, environ, EMPTY, issuers={"alps": TokenIssuer("http://i.example.org/token")}
            )

    def test_keys_that_no_header_carries(self) -> None:
        with pytest.raises(CredentialError):
            ApiKey("a\nb")


class TestRefused:
    """What a site refuses is looked for again where it came from."""

    @staticmethod
    def renewed(credential: Credential) -> None:
        credential.advise(SiteUnauthorized("no"))
        credential._next_look = 0.0
        asyncio.run(credential.renew())

    def test_new_password_in_the_keyring(self) -> None:
        ring = Ring()
        environ = {"MANTIK_UNICORE_USERNAME": "me", "MANTIK_UNICORE_PASSWORD": "old"}
        credential = find_credentials("juwels", "unicore", environ, ring)
        self.renewed(credential)
        assert basic(credential) == "me:old"
        ring.set_password("mantik:juwels", "PASSWORD", "new")
        asyncio.run(credential.renew())
        assert basic(credential) == "me:old", "it is not asked for each request"
        for turn in ("new", "old", "new"):
            self.renewed(credential)
            assert basic(credential) == f"me:{turn}", "whichever it is that the site takes"
        assert credential.origin == "MANTIK_UNICORE_USERNAME, MANTIK_UNICORE_PASSWORD"
        ring.set_password("mantik:juwels", "PASSWORD", "newest")
        asyncio.run(credential.renew())
        assert basic(credential) == "me:new", "only one that was refused is looked for"
        self.renewed(credential)
        assert basic(credential) == "me:newest"

    def test_of_the_keyring_from_the_start(self) -> None:
        ring = Ring({("mantik:a", "USERNAME"): "me", ("mantik:a", "PASSWORD"): "old"})
        credential = find_credentials("a", "unicore", {}, ring)
        self.renewed(credential)
        assert basic(credential) == "me:old"
        ring.set_password("mantik:a", "PASSWORD", "new")
        self.renewed(credential)
        assert basic(credential) == "me:new"

    def test_new_token_in_its_file(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("old\n")
        environ = {"MANTIK_ALPS_TOKEN_FILE": str(file)}
        credential = find_credentials("alps", "firecrest", environ, EMPTY)
        assert credential.headers() == {"Authorization": "Bearer old"}
        assert credential.origin == "MANTIK_ALPS_TOKEN_FILE"
        for half in ("", "no token\x01"):
            file.write_text(half)
            self.renewed(credential)
            assert credential.headers() == {"Authorization": "Bearer old"}
        file.write_text("new\n")
        self.renewed(credential)
        assert credential.headers() == {"Authorization": "Bearer new"}

    def test_file_that_is_not_there(self, tmp_path: Path) -> None:
        environ = {"MANTIK_ALPS_TOKEN_FILE": str(tmp_path / "none")}
        with pytest.raises(CredentialError, match=r"site alps: .*none cannot be read") as caught:
            find_credentials("alps", "firecrest", environ, EMPTY)
        assert "MANTIK_ALPS_TOKEN_FILE" in caught.value.do

    def test_general_file_that_is_not_needed(self, tmp_path: Path) -> None:
        environ = {"MANTIK_FIRECREST_TOKEN_FILE": str(tmp_path / "none"), "MANTIK_ALPS_TOKEN": "t"}
        assert find_credentials("alps", "firecrest", environ, EMPTY).headers()

    def test_client_that_its_issuer_refuses(self, issuer: Issuer) -> None:
        ring = Ring()
        environ = {
            "MANTIK_ALPS_CLIENT_ID": "id", "MANTIK_ALPS_CLIENT_SECRET": "wrong",
            "MANTIK_ALPS_TOKEN_URL": issuer.url,
        }  # fmt: skip
        credential = find_credentials("alps", "firecrest", environ, ring)
        with pytest.raises(CredentialError):
            asyncio.run(credential.renew())
        ring.set_password("mantik:alps", "CLIENT_SECRET", "cs")
        asyncio.run(credential.renew())
        assert credential.get_auth_header().startswith("Bearer ")

    def test_other_errors_look_for_nothing(self) -> None:
        ring = Ring({("mantik:a", "PASSWORD"): "new"})
        environ = {"MANTIK_UNICORE_USERNAME": "me", "MANTIK_UNICORE_PASSWORD": "old"}
        credential = find_credentials("a", "unicore", environ, ring)
        credential.advise(SiteUnreachable("no answer"))
        asyncio.run(credential.renew())
        assert basic(credential) == "me:old"


GRANT = "urn:ietf:params:oauth:grant-type:device_code"
KEPT = ("mantik:alps", "REFRESH_TOKEN")


class DeviceIssuer(FormServer):
    """Issues tokens once a person has confirmed; `says` are its answers until then."""

    def __init__(self) -> None:
        super().__init__()
        self.device_url = self.url.replace("/token", "/device")
        self.says = ["authorization_pending", "slow_down", "authorization_pending"]
        self.refreshable = {"good"}
        self.begun: dict[str, object] = {"interval": 0.01, "expires_in": 30}
        self.forms: list[tuple[str, dict[str, str]]] = []

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, object]]:
        self.forms.append((path, form))
        tokens: dict[str, object] = {"access_token": "at", "refresh_token": "newer"}
        tokens["expires_in"] = 300
        if path == "/device":
            page = {"verification_uri": "https://sso.example.org/device"}
            return 200, {"device_code": "dc", "user_code": "WXYZ-1", **page, **self.begun}
        if form["grant_type"] == "refresh_token":
            known = form["refresh_token"] in self.refreshable
            return (200, tokens) if known else (400, {"error": "invalid_grant"})
        assert (form["grant_type"], form["device_code"]) == (GRANT, "dc")
        return (400, {"error": self.says.pop(0)}) if self.says else (200, tokens)


@pytest.fixture
def sso(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceIssuer]:
    monkeypatch.setattr(authentication, "INTERVAL_S", 0.01)
    with DeviceIssuer().running() as server:
        yield server


def login(sso: DeviceIssuer, ring: Ring, *, terminal: bool = True) -> DeviceLogin:
    environ = {"MANTIK_FIRECREST_DEVICE_URL": sso.device_url, "MANTIK_ALPS_CLIENT_ID": "me"}
    found = find_credentials("alps", "firecrest", environ, ring, issuer=TokenIssuer(sso.url))
    assert isinstance(found, DeviceLogin)
    found._terminal = lambda: terminal
    return found


def kinds(sso: DeviceIssuer) -> list[str]:
    return [form.get("grant_type", path) for path, form in sso.forms]


def test_a_person_confirms_and_the_next_run_asks_nobody(
    sso: DeviceIssuer, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = Ring()
    first = login(sso, ring)
    first.login()
    first.login()
    asyncio.run(first.renew())
    assert first.get_auth_header() == "Bearer at"
    assert kinds(sso) == ["/device", GRANT, GRANT, GRANT, GRANT]
    told = capsys.readouterr().err
    assert "open https://sso.example.org/device and confirm the code WXYZ-1" in told
    assert ring.entries == {KEPT: "newer"}

    sso.forms.clear()
    sso.refreshable = {"newer"}
    second = login(sso, ring, terminal=False)
    second.login()
    assert kinds(sso) == ["refresh_token"]
    assert capsys.readouterr().err == ""


def test_an_earlier_login_that_has_ended_is_made_again(sso: DeviceIssuer) -> None:
    ring = Ring({KEPT: "ended"})
    login(sso, ring).login()
    assert kinds(sso)[:2] == ["refresh_token", "/device"]
    assert ring.entries[KEPT] == "newer"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("access_denied", "was refused"),
        ("expired_token", "in time"),
        ("odd", "refused"),
        ("unauthorized_client", "unauthorized_client"),
    ],
)
def test_what_ends_it(sso: DeviceIssuer, says: str, words: str) -> None:
    sso.says = [says]
    with pytest.raises(CredentialError, match=words):
        login(sso, Ring()).login()


def test_nobody_confirms(sso: DeviceIssuer) -> None:
    sso.says = ["authorization_pending"] * 1000
    sso.begun["expires_in"] = 0.1
    with pytest.raises(CredentialError, match="in time"):
        login(sso, Ring()).login()


def test_nobody_is_there(sso: DeviceIssuer) -> None:
    with pytest.raises(CredentialError, match="no terminal"):
        login(sso, Ring(), terminal=False).login()
    assert sso.forms == []


def test_urls_that_others_could_listen_to(sso: DeviceIssuer) -> None:
    environ = {
        "MANTIK_FIRECREST_DEVICE_URL": "http://sso.example.org/device",
        "MANTIK_FIRECREST_CLIENT_ID": "me",
        "MANTIK_FIRECREST_TOKEN_URL": sso.url,
    }
    with pytest.raises(CredentialError, match="https"):
        find_credentials("alps", "firecrest", environ, Ring())


def test_no_issuer_answers(sso: DeviceIssuer) -> None:
    found = login(sso, Ring())
    found._device_url = "http://127.0.0.1:1/device"
    with pytest.raises(SiteUnreachable, match="from the issuer"):
        found.login()
