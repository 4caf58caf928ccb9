"""Options that many commands take, and the exit codes of all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvstore.config import LoadedSettings, load
from kvstore.errors import (
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvstore_ops.operators.harmless import plain

MESSAGE_CHARACTERS_MAX = 4096
Parsed = TypeVar("Parsed")

ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", "--socket",
        help="The sidecar: unix:///PATH, its socket's path, or HOST:PORT with the token in $KVSTORE_TOKEN "
        "(default: $KVSTORE_SOCKET, else this user's).",
    ),
]  # fmt: skip
TenantOption = Annotated[str, typer.Option("--tenant", help="One of the sidecar's tenants; by unix socket only.")]
TlsOption = Annotated[
    str, typer.Option("--tls", help="For HOST:PORT elsewhere: 'system', CA.pem, or CA.pem,CERTIFICATE.pem,KEY.pem.")
]

NOT_FOUND, NOT_CONFIRMED, NOT_ALL, UNWELL, OUTPUT_LOST = 3, 9, 10, 11, 12
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after SIGINT and SIGTERM, as shells have them."""
EXIT_CODES: dict[type[KVStoreError], int] = {
    InvalidRequest: 2,
    Unavailable: 4,
    Unauthenticated: 5,
    PermissionDenied: 5,
    DeadlineExceeded: 6,
    Exhausted: 7,
    DataLoss: 8,
}
"""Exit codes of commands by the class of their error, or by the nearest class that it descends from; 1 for others.
docs/operations.md has the table."""


def load_settings(config: Path | None, flags: dict[str, object] | None = None) -> LoadedSettings:
    """Load the settings as ``kvstore serve`` does."""
    return load(config, os.environ, flags or {})


def of_option(name: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    """Return the value of an option. Raises InvalidRequest naming it."""
    try:
        return parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}") from error


def exit_code_of(error: KVStoreError) -> int:
    """Return the exit code of a command that failed with this error."""
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), 1)


def failed(error: KVStoreError) -> int:
    """Say on stderr why a command failed. Return its exit code."""
    print(f"kvstore: {plain(error.message, MESSAGE_CHARACTERS_MAX)}", file=sys.stderr)
    return exit_code_of(error)
