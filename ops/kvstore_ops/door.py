"""The sidecar and the tenant that a command addresses, from its options --address, --tenant and --tls."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore_client import TLS, Client, connect
from kvstore_client.planes.place import UNIX, default_address, place_of

from kvstore.config import DEFAULT_TENANT
from kvstore.errors import InvalidRequest

SYSTEM = "system"
"""Value of --tls for certificates that the system trusts."""


@dataclass(frozen=True)
class Door:
    """The address of one tenant of a sidecar. ``address`` and ``tls`` are the arguments of ``connect``. Over TCP the
    token in $KVSTORE_TOKEN admits the client."""

    address: str
    tls: TLS | bool | None = None

    @property
    def socket(self) -> Path | None:
        """The path of the unix socket; None for a TCP address."""
        return Path(self.address.removeprefix(UNIX)) if self.address.startswith(UNIX) else None

    def of_tenant(self, name: str) -> Door:
        """Return the door of another tenant of the same sidecar. Raises InvalidRequest for a TCP address, where the
        token decides the tenant."""
        if self.socket is None:
            raise InvalidRequest(
                f"--tenant {name}: at {self.address} the token in $KVSTORE_TOKEN says which tenant asks"
            )
        door = Door(f"{UNIX}{self.socket.parent / name / self.socket.name}")
        if self.socket.exists() and door.is_absent():
            others = self.tenants_beside()
            known = ", ".join([DEFAULT_TENANT, *others] if others is not None else ["this user may not read which"])
            raise InvalidRequest(f"--tenant {name}: there is no such tenant. There are: {known}")
        return door

    def is_absent(self) -> bool:
        """True when the socket is certainly not there. A socket in another user's directory cannot be seen."""
        assert self.socket is not None
        try:
            self.socket.stat()
        except PermissionError:
            return False
        except OSError:
            return True
        return False

    def tenants_beside(self) -> list[str] | None:
        """Return the names of the tenants whose sockets lie beside the default tenant's, or may lie there unseen; None
        where this user may not read the directory, as where tenants have users of their own."""
        assert self.socket is not None
        above = self.socket.parent
        if not os.access(above, os.R_OK):
            return None
        names = sorted(os.listdir(above)) if above.is_dir() else []
        return [name for name in names if not Door(f"{UNIX}{above / name / self.socket.name}").is_absent()]

    def open(self) -> Client:
        """Connect an operator's client. Raises as ``connect`` does."""
        client = Client(place_of(self.address, None, self.tls, is_operator=True))
        try:
            client.connect_now()
        except BaseException:
            client.close()
            raise
        return client

    def check_engine(self) -> None:
        """Connect as an engine does, and end it again. Raises as ``connect`` does."""
        connect(self.address, tls=self.tls).close()


def door_of(address: str | None, tenant: str = "", tls: str = "") -> Door:
    """Return the door that the options name. ``address``: unix:///PATH, a socket's path, or HOST:PORT; None: this
    user's sidecar. ``tls``: "system", or one or three files, CA or CA,CERTIFICATE,KEY. Raises InvalidRequest."""
    if address is None:
        address = default_address()
    elif "://" not in address and ("/" in address or ":" not in address):
        address = f"{UNIX}{address}"  # a path
    door = Door(address, _tls(tls))
    is_default = not tenant or (tenant == DEFAULT_TENANT and door.socket is not None)
    return door if is_default else door.of_tenant(tenant)


def _tls(text: str) -> TLS | bool | None:
    if not text:
        return None
    if text == SYSTEM:
        return True
    files = text.split(",")
    if len(files) not in (1, 3) or not all(files):
        raise InvalidRequest(f"--tls {text}: use {SYSTEM}, CA.pem, or CA.pem,CERTIFICATE.pem,KEY.pem")
    return TLS(**dict(zip(("ca_file", "certificate_file", "key_file"), files, strict=False)))
