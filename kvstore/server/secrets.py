"""Tenants' secrets, read once at the start, and their envelope keys, which may change while the service runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstore.config import DEFAULT_TENANT, TenantSettings
from kvstore.config.fields import wrong_setting
from kvstore.errors import InvalidRequest
from kvstore.seams import EnvelopeKey, TenantKeys

SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 4096
KEY_FILE_BYTES_MAX = 1 << 16
FOLLOWING = "secret_file"
"""This word stands in a key file for the envelope key that is derived from the tenant's secret."""


def read_keys(tenants: Mapping[str, TenantSettings]) -> dict[str, TenantKeys]:
    """Return the keys of every tenant. The default tenant's keys follow from a published constant, unless it has a
    secret file.

    Raises InvalidRequest naming the setting, and never the secret, for a file that cannot be read, that others may
    read, that is too short, or that holds another tenant's secret.
    """
    keys = {DEFAULT_TENANT: TenantKeys()}
    for name, tenant in tenants.items():
        if tenant.secret_file:
            setting = f"tenants.{name}.secret_file"
            keys[name] = TenantKeys.derived(name, _read(Path(tenant.secret_file), setting))
    owners: dict[bytes, str] = {}
    for name, own in keys.items():
        other = owners.setdefault(own.secret, name)
        if other != name:
            raise InvalidRequest(
                f"tenants.{name}.secret_file = {tenants[name].secret_file}: it holds the secret of tenant {other}, "
                "too: give each tenant its own",
                setting=f"tenants.{name}.secret_file",
            )
    return keys


def read_envelope_keys(keys: TenantKeys, tenant: TenantSettings | None) -> list[EnvelopeKey]:
    """Return the keys that seal a tenant's copies, the newest first: those of its key file. Without a file, return the
    key derived from its secret; without a secret, none.

    Raises InvalidRequest naming the setting, and never a key.
    """
    own = [] if keys == TenantKeys() else [EnvelopeKey.following(keys)]
    if tenant is None or not tenant.envelope_key_file:
        return own
    path, setting = Path(tenant.envelope_key_file), f"tenants.{keys.tenant}.envelope_key_file"
    data = read_private(path, setting, KEY_FILE_BYTES_MAX + 1, "one key per line")
    if len(data) > KEY_FILE_BYTES_MAX:
        raise wrong_setting(setting, path, f"it has more than {KEY_FILE_BYTES_MAX} bytes: write one key per line")
    found: list[EnvelopeKey] = []
    for number, line in enumerate(data.splitlines(), start=1):
        text = line.partition(b"#")[0].strip()
        if text == FOLLOWING.encode():
            found += own
        elif 0 < len(text) < SECRET_BYTES_MIN:
            raise wrong_setting(
                setting, path, f"line {number} has {len(text)} characters and a key has {SECRET_BYTES_MIN} or more: "
                "write another, as openssl rand -hex 32 makes them",
            )  # fmt: skip
        elif text:
            found.append(EnvelopeKey.derived(text))
    if not found:
        raise wrong_setting(setting, path, "it has no key: write one per line, as openssl rand -hex 32 makes them")
    return found


def _read(path: Path, setting: str) -> bytes:
    """Return the text of a secret, without the white space around it."""
    text = read_private(path, setting, SECRET_BYTES_MAX + 1, "32 or more random characters").strip()
    if not SECRET_BYTES_MIN <= len(text) <= SECRET_BYTES_MAX:
        raise wrong_setting(
            setting, path, f"it holds {len(text)} characters and a secret has {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX}: write another, as openssl rand -hex 32 makes them",
        )  # fmt: skip
    return text


def read_private(path: Path, setting: str, byte_count_max: int, what: str) -> bytes:
    """Read up to ``byte_count_max`` bytes of a file that only this user may read or write. ``what``: words for its
    intended content.

    Raises InvalidRequest naming the setting, and never the file's content.
    """
    try:
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a zero byte; RuntimeError: ~ of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise wrong_setting(setting, path, f"it cannot be read ({reason}): write it, for this user alone") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise wrong_setting(setting, path, f"it is no file: name one with {what}")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise wrong_setting(setting, path, f"others may read or write it (mode {mode:04o}): run chmod 600 on it")
        if status.st_uid not in (0, os.geteuid()):
            raise wrong_setting(setting, path, f"it belongs to user {status.st_uid}: run chown {os.geteuid()} on it")
        return os.read(descriptor, byte_count_max)
    finally:
        os.close(descriptor)
