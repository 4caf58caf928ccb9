"""The remote plane in TLS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvstore_client import TLS, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from kvstore.spec import Durability
from tests.e2e.remote.certificates import make_certificates, needs_openssl, shown, tls_sidecar
from tests.e2e.remote.peers import SPEC, left
from tests.e2e.test_failures import until
from tests.specs import bits, random_cache, tokens_of


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's and a client's certificate of it, and a stranger's."""
    place = tmp_path_factory.mktemp("tls")
    make_certificates(place)
    return place


@needs_openssl
def test_tls(certificates: Path) -> None:
    tokens, kv = tokens_of(40), random_cache(SPEC, 40)
    with tls_sidecar(certificates, mutual=False) as sidecar:
        with connect(sidecar.address, tls=TLS(ca_file=certificates / "ca.pem")) as client:
            assert client.store(SPEC, tokens, kv).wait(10.0) is Durability.MEMORY
            fetched = client.fetch(SPEC, tokens)
            assert fetched.token_count == 40
            assert (bits(fetched[0][0]) == kv[0][0]).all()
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, timeout_s=5.0)  # in the open, to a port that speaks TLS
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, tls=TLS(ca_file=certificates / "stranger.pem"), timeout_s=5.0)
        with pytest.raises(Unavailable, match="tls="):
            connect(sidecar.address, tls=TLS(ca_file=certificates / "ca.pem", server_name="other"), timeout_s=5.0)
        with pytest.raises(Unauthenticated, match="token"):
            connect(sidecar.address, token="another-token-than-ours", tls=TLS(ca_file=certificates / "ca.pem"))
        until(lambda: left(sidecar) == (0,) * 7)


@needs_openssl
@pytest.mark.parametrize(("file", "directory"), [("ca.pem", "none"), ("none", "trusted"), ("stranger.pem", "trusted")])
def test_the_authorities_that_the_system_trusts_are_trusted(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, directory: str
) -> None:
    """Also one that the list which gRPC brings does not have. Of a directory beside a file, too."""
    (tmp_path / "trusted" / "00000000.0").mkdir(parents=True)  # a name that cannot be read spoils nothing
    shutil.copy(certificates / "ca.pem", tmp_path / "trusted" / "01234567.0")
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / file))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / directory))
    with (
        tls_sidecar(certificates, mutual=False) as sidecar,
        connect(sidecar.address, tls=True, timeout_s=5.0) as client,
    ):
        assert client.stats().sessions.session_count == 1


@needs_openssl
def test_a_list_that_is_named_to_grpc_goes_before_the_systems(certificates: Path) -> None:
    """gRPC reads it once in a process."""
    ask = "import sys; from kvstore_client import connect; connect(sys.argv[1], tls=True, timeout_s=5.0).close()"
    with tls_sidecar(certificates, mutual=False) as sidecar:
        for name, code in (("ca.pem", 0), ("stranger.pem", 1)):
            environment = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificates / name)}
            command = [sys.executable, "-c", ask, sidecar.address]
            assert subprocess.run(command, env=environment, timeout=60, stderr=subprocess.DEVNULL).returncode == code


@needs_openssl
def test_mutual_tls(certificates: Path) -> None:
    with tls_sidecar(certificates, mutual=True) as sidecar:
        with connect(sidecar.address, tls=shown(certificates, "client")) as client:
            assert client.stats().sessions.session_count == 1
        for tls in (TLS(ca_file=certificates / "ca.pem"), shown(certificates, "stranger")):
            with pytest.raises(Unavailable, match="tls="):
                connect(sidecar.address, tls=tls, timeout_s=5.0)
        with pytest.raises(InvalidRequest, match="certificate_file"):
            connect(sidecar.address, tls=TLS(key_file=certificates / "client.key"))


def test_tls_to_a_port_without(remote: Sidecar) -> None:
    with pytest.raises(Unavailable, match="tls="):
        connect(remote.address, tls=True, timeout_s=5.0)


@needs_openssl
@pytest.mark.parametrize(
    ("certificate", "key", "authority", "words"),
    [
        ("server.pem", "client.key", "", "remote.certificate_file"),
        ("server.key", "server.pem", "", "remote.certificate_file"),
        ("server.pem", "server.key", "ca.key", "remote.client_ca_file"),
    ],
)
def test_certificates_that_cannot_be_used_are_named_and_not_the_address(
    certificates: Path, certificate: str, key: str, authority: str, words: str
) -> None:
    own = {"CERTIFICATE_FILE": certificate, "KEY_FILE": key} | ({"CLIENT_CA_FILE": authority} if authority else {})
    settings = {f"KVSTORE__REMOTE__{name}": str(certificates / value) for name, value in own.items()}
    sidecar = Sidecar("--capacity", "16 MiB", environment={**os.environ, **settings}, plane="remote")
    with pytest.raises(Unavailable, match=f"kvstore: {words} = ") as caught:
        sidecar.start()
    assert "remote.address" not in caught.value.message.rpartition("kvstore: ")[2]
