"""Certificates that openssl makes, and sidecars that show them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kvstore_client import TLS
from kvstore_ops.sidecar import Sidecar

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")


def make_certificates(place: Path) -> None:
    """A CA, a server's and a client's certificate of it, and a stranger's, in this directory."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=place, check=True, capture_output=True, timeout=60)

    for name in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
                "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    (place / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "1", "-extfile", "extensions", "-out", f"{name}.pem")  # fmt: skip


def tls_sidecar(place: Path, *, mutual: bool) -> Sidecar:
    own = {"CERTIFICATE_FILE": str(place / "server.pem"), "KEY_FILE": str(place / "server.key")}
    if mutual:
        own["CLIENT_CA_FILE"] = str(place / "ca.pem")
    settings = {f"KVSTORE__REMOTE__{name}": value for name, value in own.items()}
    return Sidecar("--capacity", "16 MiB", environment={**os.environ, **settings}, plane="remote")


def shown(place: Path, name: str) -> TLS:
    """Return the TLS settings of a client that has the certificate of this name."""
    own = {"certificate_file": place / f"{name}.pem", "key_file": place / f"{name}.key"}
    return TLS(ca_file=place / "ca.pem", **own)
