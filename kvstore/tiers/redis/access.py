"""Describes a server to a byte mover: its address, the credentials for it, and how the line is secured."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from kvstore.config import RedisAddress, RedisSettings
from kvstore.errors import Unavailable

PASSWORD_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Access:
    """The sidecar's credentials for a server, and how its lines are secured. Files are read anew at each connect."""

    username: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    database: int = 0
    setting: str = "tiers.redis.password_file"
    """The setting of ``password_file``."""

    @staticmethod
    def of(settings: RedisSettings, address: RedisAddress) -> Access:
        """Return the access that the settings and their URL describe."""
        return Access(
            username=settings.username or address.username, password=address.password,
            password_file=settings.password_file, is_tls=address.is_tls, ca_file=settings.ca_file,
            certificate_file=settings.certificate_file, key_file=settings.key_file, database=address.database,
        )  # fmt: skip

    @staticmethod
    def of_sentinels(settings: RedisSettings, address: RedisAddress) -> Access:
        """Return the access to the Sentinels, who have users and passwords of their own."""
        return replace(
            Access.of(settings, address), username=settings.sentinel_username, password="", database=0,
            password_file=settings.sentinel_password_file, setting="tiers.redis.sentinel_password_file",
        )  # fmt: skip

    def credentials(self) -> tuple[str, ...]:
        """Return (password), (user, password), or nothing, as they are now. Raises Unavailable naming the setting."""
        password = self.password
        if self.password_file:
            try:
                with Path(self.password_file).expanduser().open("rb") as file:
                    password = file.read(PASSWORD_BYTES_MAX).decode().strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is no text"
                raise Unavailable(f"{self.setting} = {self.password_file}: it cannot be read ({reason})") from None
        if not password:
            return ()
        return (self.username, password) if self.username else (password,)

    def tls(self) -> ssl.SSLContext:
        """Return a TLS context of the files as they are now. Raises Unavailable naming the files."""
        trusted = self.ca_file or ssl.get_default_verify_paths().cafile or ""
        try:
            states = _states_of((trusted, self.certificate_file, self.key_file))
            return _context(self.ca_file, self.certificate_file, self.key_file, states)
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"tiers.redis.ca_file, certificate_file or key_file cannot be used: {error}") from error


def _states_of(paths: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return what differs once a file was replaced."""
    found = [os.stat(path) for path in paths if path]
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


@lru_cache(maxsize=8)
def _context(ca_file: str, certificate_file: str, key_file: str, _states: tuple[object, ...]) -> ssl.SSLContext:
    """Return a context of files in these states. It is kept: reading the system's authorities takes 20 ms and more, in
    which the service does nothing else."""
    context = ssl.create_default_context(cafile=ca_file or None)
    if certificate_file:
        context.load_cert_chain(certificate_file, key_file)
    return context


@dataclass(frozen=True, slots=True)
class Server:
    """One server. ``path`` is that of its socket; without one it listens at ``host`` and ``port``. ``is_asked``: a slot
    is being migrated to it, and each command on the slot's keys begins with ASKING."""

    access: Access
    host: str = ""
    port: int = 0
    path: str = ""
    is_asked: bool = False

    @property
    def is_near(self) -> bool:
        """True when the server is on this machine for certain: behind an address of loopback may be a tunnel."""
        return bool(self.path)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"
