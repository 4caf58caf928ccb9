"""Settings of the remote plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.errors import InvalidRequest
from kvstore.units import is_loopback, split_address

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """gRPC over TCP for clients on other hosts. Off while ``address`` (HOST:PORT) is empty; port 0 takes a free one.

    ``token_file``: one bearer token per line, or its ``sha256:<hex>``; ``#`` begins a comment. ``stall_s``: a reader
    or writer that moves no message for so long is let go.
    """

    address: str = ""
    token_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    message_bytes: Annotated[int, "size"] = 2 * MIB
    stream_count_max: int = 64
    stall_s: Annotated[float, "duration"] = 10.0
    connection_count_max: int = 512
    call_count_max: int = 256

    def __post_init__(self) -> None:
        has_tls = bool(self.certificate_file and self.key_file)
        if self.address:
            host, _ = split_address(self.address, "remote.address")
            if not has_tls and not is_loopback(host):
                raise _wrong(
                    "remote.address", self.address, "it is no loopback address, so it needs TLS: set "
                    "remote.certificate_file and remote.key_file, or listen on 127.0.0.1",
                )  # fmt: skip
        if bool(self.certificate_file) != bool(self.key_file):
            raise _wrong("remote.certificate_file", self.certificate_file, "set remote.key_file with it, or neither")
        if self.client_ca_file and not has_tls:
            raise _wrong("remote.client_ca_file", self.client_ca_file, "set remote.certificate_file and key_file too")
        if not MIB <= self.message_bytes <= 4 * MIB:
            raise _wrong("remote.message_bytes", self.message_bytes, "use 1 MiB to 4 MiB")
        for name in ("stream_count_max", "connection_count_max", "call_count_max"):
            if getattr(self, name) < 1:
                raise _wrong(f"remote.{name}", getattr(self, name), "use at least 1")
        if self.stall_s <= 0:
            raise _wrong("remote.stall_s", self.stall_s, "use more than 0")


def _wrong(setting: str, value: object, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"{setting} = {value}: {remedy}", setting=setting)
