"""The plane's own certificate. A renewed one is in use with the next handshake: whoever is connected stays so."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from kvstore.errors import InvalidRequest


class Certificates:
    """The server's certificate, its key, and the authority of its clients' certificates, from PEM files. None of them
    without a certificate file; without an authority clients need no certificate. Raises InvalidRequest naming the
    file."""

    def __init__(self, certificate_file: str, key_file: str, client_ca_file: str) -> None:
        self._certificate_file = certificate_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._fresh: Any = None
        """The files' content that handshakes do not have yet; None: they have the newest."""
        self.credentials: Any = None
        """TLS credentials for gRPC; None without a certificate file. The listener does not keep them alive."""
        if certificate_file:
            self.credentials = grpc.dynamic_ssl_server_credentials(
                self._configuration(), self._next, require_client_authentication=bool(client_ca_file)
            )

    def read_again(self) -> None:
        """Take what the files have by now, for the handshakes that follow. Raises InvalidRequest where they do not fit,
        as while one of them is replaced before the other: the ones before stay in use."""
        self.check()
        self._fresh = self._configuration()

    def check(self) -> None:
        """Check that the certificate and the key belong together, and that the CA's file has a certificate. Raises
        InvalidRequest naming the setting. Does nothing without a certificate file."""
        if not self._certificate_file:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        names = (self._certificate_file, self._key_file, self._client_ca_file)
        certificate, key, *authority = [Path(each).expanduser() for each in names if each]
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")  # without one OpenSSL would ask the terminal
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"remote.certificate_file = {self._certificate_file}, remote.key_file = {self._key_file}: they must be "
                f"a certificate and its own key, PEM, the key not encrypted ({error})",
                setting="remote.certificate_file",
            ) from error
        try:
            for each in authority:
                context.load_verify_locations(each)
        except OSError as error:
            raise InvalidRequest(
                f"remote.client_ca_file = {self._client_ca_file}: it has no certificate ({error})",
                setting="remote.client_ca_file",
            ) from error

    def _configuration(self) -> Any:
        chain = _read(self._certificate_file, "remote.certificate_file")
        key = _read(self._key_file, "remote.key_file")
        authority = _read(self._client_ca_file, "remote.client_ca_file") if self._client_ca_file else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], authority)

    def _next(self) -> Any:
        """Return what a handshake uses from now on; None: what the one before did. gRPC calls it before each."""
        fresh, self._fresh = self._fresh, None
        return fresh


def _read(name: str, setting: str) -> bytes:
    try:
        data = Path(name).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a zero byte; RuntimeError: ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"{setting} = {name}: cannot be read: {reason}") from error
    if b"-----BEGIN" not in data:
        raise InvalidRequest(f"{setting} = {name}: it is not PEM")
    return data
