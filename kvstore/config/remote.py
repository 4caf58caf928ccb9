"""Settings of the gRPC server for clients on other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.fields import NATIVE_NUMBER_MAX, Duration, Size, check_setting
from kvstore.units import MIB, is_loopback, split_address


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """gRPC over TCP for clients on other hosts ([remote.md](remote.md))."""

    address: str = ""
    """`HOST:PORT` or `[V6]:PORT` to listen on; port 0 takes a free one. Empty: off."""
    token_file: str = ""
    """File of mode 0600 with the clients' tokens: one per line, or `sha256:` and its digest in hex; the word
    `admin` after it gives its bearer the operator's right; `#` begins a comment."""
    certificate_file: str = ""
    """The server's certificate, PEM; needed unless the address is loopback."""
    key_file: str = ""
    """The key of that certificate, PEM."""
    client_ca_file: str = ""
    """PEM; only clients with a certificate of this authority are let in."""
    message_bytes: Size = 2 * MIB
    """Bytes per message, 1 to 4 MiB; a larger strip has a message of its own."""
    stream_count_max: int = 64
    """Open byte streams of one session."""
    stall_s: Duration = 10.0
    """A stream ends when its reader takes no message, or its writer sends none, for this time."""
    connection_count_max: int = 512
    """Open connections of all tenants; a further one is closed."""
    call_count_max: int = 256
    """Calls of one tenant in progress; a further one is refused before its message is read. Streams that last as long
    as their callers (sessions, watches, partial prefills) have as many places of their own. gRPC reads a message of up
    to 64 MiB before anything can be said of it: as many of each kind may be in memory at once."""

    def __post_init__(self) -> None:
        certificate, key, authority = self.certificate_file, self.key_file, self.client_ca_file
        if self.address:
            is_local = is_loopback(split_address(self.address, "remote.address")[0])
            remedy = (
                "it is no loopback address, so it needs TLS: set remote.certificate_file and remote.key_file, or "
                "listen on 127.0.0.1"
            )
            check_setting(is_local or bool(certificate and key), "remote.address", self.address, remedy)
        both = bool(certificate) == bool(key)
        check_setting(both, "remote.certificate_file", certificate, "set remote.key_file with it, or neither")
        has_own = bool(certificate) or not authority
        check_setting(has_own, "remote.client_ca_file", authority, "set remote.certificate_file and key_file too")
        fits = MIB <= self.message_bytes <= 4 * MIB
        check_setting(fits, "remote.message_bytes", self.message_bytes, "use 1 MiB to 4 MiB")
        for name in ("stream_count_max", "connection_count_max", "call_count_max"):
            check_setting(getattr(self, name) >= 1, f"remote.{name}", getattr(self, name), "use at least 1")
        most = self.connection_count_max
        fits = most <= NATIVE_NUMBER_MAX
        check_setting(fits, "remote.connection_count_max", most, f"use at most {NATIVE_NUMBER_MAX}")
        check_setting(self.stall_s > 0, "remote.stall_s", self.stall_s, "use more than 0")
