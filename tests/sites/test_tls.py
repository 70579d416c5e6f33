"""Nobody gets credentials who cannot prove who he is; a proxy sees addresses and nothing else."""

import asyncio
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteUnreachable
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.sites import rest
from snakemake_executor_plugin_mantik.sites.authentication import (
    ClientCredentials,
    DeviceLogin,
    Issuer,
    Password,
)
from tests.support.benches import any_site, in_use, open_and_close
from tests.support.parrot import Parrot, Say

DAY = datetime.timedelta(days=1)
SECRET = "s3cr3t-4711"


class Authority:
    """Issues certificates for TLS servers on this machine."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        own = self._certificate(name, self._key, ("unused",), DAY, authority=True)
        self.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def _certificate(
        self, name: str, key: ec.EllipticCurvePrivateKey, hosts: tuple[str, ...],
        lasts: datetime.timedelta, *, authority: bool = False,
    ) -> x509.Certificate:  # fmt: skip
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        return (
            x509.CertificateBuilder(issuer, subject, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def context(
        self, hosts: tuple[str, ...] = ("localhost",), lasts: datetime.timedelta = DAY
    ) -> ssl.SSLContext:
        """What a server proves with that it is one of `hosts`."""
        key = ec.generate_private_key(ec.SECP256R1())
        file = self._folder / f"server-{id(key)}.pem"
        file.write_bytes(
            self._certificate("server", key, hosts, lasts).public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


Serve = Callable[[ssl.SSLContext], Parrot]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setattr(rest, "REPEAT_ATTEMPTS", 1)
    parrots: list[Parrot] = []

    def start(context: ssl.SSLContext) -> Parrot:
        parrot = Parrot("/rest/core", context)
        parrot.answers = [Say(404)]
        parrot.thread.start()
        parrots.append(parrot)
        return parrot

    yield start
    for parrot in parrots:
        parrot.stop()


def opens(api: str) -> Callable[[str, Path | None, str | None], None]:
    def ask(url: str, ca_file: Path | None, proxy: str | None) -> None:
        settings = SiteSettings().model_copy(
            update={"ca_file": str(ca_file) if ca_file else None, "proxy": proxy}
        )
        asyncio.run(open_and_close(any_site(api, url, Password("ada", SECRET), settings)))

    return ask


def ask_issuer(url: str, ca_file: Path | None, proxy: str | None) -> None:
    issuer = Issuer(url, ca_file, proxy)
    credential = ClientCredentials(url, "id", SECRET, issuer=issuer)
    asyncio.run(credential.renew())


def log_in(url: str, ca_file: Path | None, proxy: str | None) -> None:
    issuer = Issuer(url, ca_file, proxy)
    DeviceLogin(url, url, "id", SECRET, issuer=issuer, terminal=lambda: True).login()


ASK = [opens("unicore"), opens("firecrest"), ask_issuer, log_in]
Ask = Callable[[str, Path | None, str | None], None]


def secrets_in(parrot: Parrot) -> bool:
    return any("Authorization" in headers for _, _, headers in parrot.asked) or any(
        method == "POST" for method, _, _ in parrot.asked
    )


@pytest.mark.parametrize("ask", ASK)
class TestCertificates:
    def test_of_an_authority_that_is_named(
        self, authority: Authority, serve: Serve, ask: Ask
    ) -> None:
        parrot = serve(authority.context())
        with pytest.raises(MantikError) as caught:
            ask(parrot.url, authority.file, None)
        assert "CERTIFICATE" not in str(caught.value)
        assert secrets_in(parrot)

    @pytest.mark.parametrize(
        ("trouble", "told"),
        [
            ("unknown", "CAFile"),
            ("another", "CAFile"),
            ("host", "names another host"),
            ("expired", "clock of this machine"),
            ("self-signed", "CAFile"),
        ],
    )
    def test_that_prove_nothing(
        self, authority: Authority, serve: Serve, ask: Ask, trouble: str, told: str
    ) -> None:
        tmp_path = authority.file.parent
        ca_file: Path | None = authority.file
        context = authority.context()
        match trouble:
            case "unknown":
                ca_file = None
            case "another":
                ca_file = Authority(tmp_path, "theirs").file
            case "host":
                context = authority.context(("site.example.org", "*.localhost"))
            case "expired":
                context = authority.context(lasts=-DAY)
            case _:
                context = Authority(tmp_path, "ours2").context()
        parrot = serve(context)
        with pytest.raises(SiteUnreachable, match=told) as caught:
            ask(parrot.url, ca_file, None)
        assert SECRET not in str(caught.value)
        assert parrot.asked == []


@dataclass
class Proxy:
    """A HTTP proxy that keeps all it can read."""

    seen: bytes = b""

    def __post_init__(self) -> None:
        proxy = self

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += self.rfile.readline()
                proxy.seen += head
                host, port = head.split()[1].decode().rsplit(":", 1)
                with socket.create_connection((host, int(port))) as there:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    back = threading.Thread(target=proxy.pump, args=(there, self.connection))
                    back.start()
                    proxy.pump(self.connection, there)
                    back.join()

        self.server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    proxy.thread.start()
    yield proxy
    proxy.server.shutdown()
    proxy.thread.join()
    proxy.server.server_close()


@pytest.mark.parametrize("ask", ASK)
def test_a_proxy_reads_nothing(authority: Authority, serve: Serve, proxy: Proxy, ask: Ask) -> None:
    parrot = serve(authority.context())
    with pytest.raises(MantikError):
        ask(parrot.url, authority.file, proxy.url)
    assert secrets_in(parrot), "it came through"
    assert proxy.seen.startswith(b"CONNECT localhost:")
    for readable in (SECRET.encode(), b"Authorization", b"/rest/core"):
        assert readable not in proxy.seen


@pytest.mark.parametrize("ask", ASK)
def test_a_redirect_takes_nothing_elsewhere(authority: Authority, serve: Serve, ask: Ask) -> None:
    here, elsewhere = serve(authority.context()), serve(authority.context())
    for status in (301, 302, 303, 307, 308):
        here.answers = [Say(status, b"", {"Location": f"{elsewhere.url}/x"})]
        with pytest.raises(MantikError):
            ask(here.url, authority.file, None)
    assert here.asked
    assert elsewhere.asked == []


async def test_the_object_store_gets_no_token(authority: Authority, serve: Serve) -> None:
    """A presigned URL is all that it needs, and its host is not the API's."""
    store = serve(authority.context())
    store.answers = [Say(200, b"object")]

    settings = SiteSettings().model_copy(update={"ca_file": str(authority.file)})
    elsewhere, url = "https://firecrest.example.org", f"{store.url}/b/o?X-Amz-Signature=x"
    async with (
        in_use(any_site("firecrest", elsewhere, Password("ada", SECRET), settings)) as site,
        site._connection.download(url, 3) as (_, chunks),
    ):
        assert [chunk async for chunk in chunks] == [b"object"]
    ((method, _, headers),) = store.asked
    assert method == "GET"
    assert not {"authorization", "x-api-key", "cookie"} & {name.lower() for name in headers}
    assert json.dumps(headers).count(SECRET) == 0
