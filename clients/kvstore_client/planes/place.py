"""The address of a sidecar, which decides the plane that reaches it."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvstore.errors import InvalidRequest
from kvstore.units import is_loopback, split_address
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_client.planes.shared_memory.staging import StagingPool
from kvstore_client.planes.stream.session import StreamSession

UNIX = "unix://"


@dataclass(frozen=True, kw_only=True)
class TLS:
    """``ca_file``: the authority that signed the server's certificate (empty: those the system trusts).
    ``certificate_file`` and
    ``key_file``: this client's own, if the server asks for one. ``server_name``: the name in the server's certificate,
    if it is not the address's."""

    ca_file: str | Path = ""
    certificate_file: str | Path = ""
    key_file: str | Path = ""
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials. Raises InvalidRequest naming the file that cannot be read."""
        if bool(self.certificate_file) != bool(self.key_file):
            raise InvalidRequest("tls: certificate_file and key_file go together")
        ca, key, chain = (_pem(name, self) for name in ("ca_file", "key_file", "certificate_file"))
        return grpc.ssl_channel_credentials(ca or _system_authorities(), key, chain)


def _pem(name: str, tls: TLS) -> bytes | None:
    path = getattr(tls, name)
    if not path:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(f"tls: {name} {path} cannot be read: {error.strerror}") from error


def _system_authorities() -> bytes | None:
    """Return the authorities that the system trusts: those of OpenSSL's file and of its directory. None where it names
    none, or where gRPC's own variable names a list: gRPC then takes that list, or the one that it brings."""
    if os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        return None
    paths, found = ssl.get_default_verify_paths(), b""
    files = [Path(paths.cafile)] if paths.cafile else []
    files += sorted(Path(paths.capath).glob("*.[0-9]")) if paths.capath else []
    for each in files:
        with suppress(OSError):  # as OpenSSL does: what cannot be read is not trusted, and fails no connection
            read = each.read_bytes()
            found += b"" if read in found else read + b"\n"  # most of the directory is in the file, too
    return found or None


@dataclass(frozen=True)
class LocalPlace:
    """A sidecar of this host, by its socket. ``is_operator``: for an operator's command, so that a session is had also
    where engines have all of theirs."""

    path: Path
    is_operator: bool = False
    plane = "local"

    def open(self, timeout_s: float) -> MappedSession:
        """Open a session. Raises Unavailable when nobody answers."""
        session = MappedSession(self.path, timeout_s, is_operator=self.is_operator)
        session.staging = StagingPool(session)
        return session

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class RemotePlace:
    """A sidecar by its TCP address."""

    address: str
    token: str = field(repr=False)
    tls: TLS | None
    plane = "remote"

    def open(self, timeout_s: float) -> StreamSession:
        """Open a session. Raises Unavailable when nobody answers, Unauthenticated for a wrong token."""
        credentials = self.tls.credentials() if self.tls else None
        return StreamSession(self.address, self.token, credentials, self.tls.server_name if self.tls else "", timeout_s)

    def __str__(self) -> str:
        return self.address


Place = LocalPlace | RemotePlace


def default_address() -> str:
    """Return the address in $KVSTORE_SOCKET, also where that is a path, else the address of this user's sidecar."""
    named = os.environ.get("KVSTORE_SOCKET")
    if named:
        return named if named.startswith(UNIX) or ("/" not in named and ":" in named) else f"{UNIX}{named}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return f"{UNIX}{Path(runtime) / 'kvstore' / 'kvstore.sock'}"
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"{UNIX}{Path(state) / 'kvstore' / 'run' / 'kvstore.sock'}"


def place_of(address: str | None, token: str | None, tls: TLS | bool | None, *, is_operator: bool = False) -> Place:
    """Return the place of an address; None: of ``default_address``. ``token``: by default $KVSTORE_TOKEN.
    ``is_operator``: see ``LocalPlace``. Raises InvalidRequest for an invalid address, and for a token that would travel
    unencrypted."""
    address = default_address() if address is None else address
    if address.startswith(UNIX):
        if token is not None or tls:
            raise InvalidRequest("token and tls are for HOST:PORT addresses; a unix socket serves its own user")
        path = Path(address.removeprefix(UNIX))
        if not path.name:
            raise InvalidRequest(f"address {address!r}: use unix:///path/to/kvstore.sock, or HOST:PORT")
        return LocalPlace(path, is_operator)
    if "/" in address:
        raise InvalidRequest(f"address {address!r}: use unix:///path/to/kvstore.sock, or HOST:PORT")
    host, _ = split_address(address, "address")
    token = os.environ.get("KVSTORE_TOKEN") if token is None else token
    token = token.strip() if isinstance(token, str) else ""  # a token read from a file may end with a newline
    if not (token and token.isascii() and token.isprintable()):
        raise InvalidRequest(
            f"token: {address} needs one that its server knows (remote.token_file there), here or as $KVSTORE_TOKEN"
        )
    if tls is True:
        tls = TLS()
    if not tls and not is_loopback(host):
        raise InvalidRequest(f"tls: {address} is not this host: the token needs tls= to go there")
    return RemotePlace(address, token, tls or None)
