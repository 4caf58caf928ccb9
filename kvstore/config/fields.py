"""The parts of every class of settings: types that are read with units, and the error that names a wrong value.

The string below a setting is its entry in docs/configuration.md: the meaning, and after "Default:" its default, if
that depends on the machine or on other settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from kvstore.errors import InvalidRequest

Size = Annotated[int, "size"]
"""Bytes; read from texts like "64 GiB", too."""
Duration = Annotated[float, "duration"]
"""Seconds; read from texts like "30 s", too."""


NATIVE_NUMBER_MAX = (1 << 31) - 1
"""The largest number that gRPC and ZMQ take as an option."""
SOCKET_PATH_BYTES_MAX = 99
"""The kernel takes 107 bytes."""


def is_socket_path(path: Path) -> bool:
    """True for a path that is short enough for a socket. A letter may take several bytes."""
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def without_password(text: str) -> str:
    """Return a text that may be shown: of a URL, also of one without a scheme, the part before its last "@" is
    hidden."""
    scheme, slashes, rest = text.partition("://") if "://" in text else ("", "", text)
    hidden, at, shown = rest.rpartition("@")
    is_url = slashes or (":" in hidden and not hidden.startswith("/"))
    return f"{scheme}{slashes}***@{shown}" if at and is_url else text


def wrong_setting(setting: str, value: object, remedy: str) -> InvalidRequest:
    """Return the error that names a setting, its value and the remedy. Passwords in URLs are not shown."""
    shown = str(value).lower() if isinstance(value, bool) else value
    shown = without_password(shown) if isinstance(shown, str) else shown
    return InvalidRequest(f"{setting} = {shown}: {remedy}", setting=setting)


def check_setting(condition: bool, setting: str, value: object, remedy: str) -> None:
    """Raises InvalidRequest unless ``condition`` holds."""
    if not condition:
        raise wrong_setting(setting, value, remedy)


def checks_of(section: str) -> Callable[[bool, str, object, str], None]:
    """Return ``check_setting`` for the settings of one section, which takes their names without the section."""

    def check(condition: bool, name: str, value: object, remedy: str) -> None:
        check_setting(condition, f"{section}.{name}", value, remedy)

    return check
