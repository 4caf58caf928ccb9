"""Tenants' secrets: read from files that are really secret, and never said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import TenantSettings
from kvstore.errors import InvalidRequest
from kvstore.keys import storage_key
from kvstore.seams import TenantKeys
from kvstore.seams.secrets import DEFAULT_TENANT_SECRET
from kvstore.server.secrets import read_keys
from kvstore.spec import Exactness, Provenance
from tests.security.tenancy import write_private

SECRET = "0123456789abcdef0123456789abcdef"


def settings(path: Path | str) -> TenantSettings:
    return TenantSettings(secret_file=str(path), capacity_bytes=8192, nvme_capacity_bytes=0)


def test_names_on_the_device_are_the_secrets_on_every_host(tmp_path: Path) -> None:
    """Golden: another release, or another host, finds what this one stored."""
    one = write_private(tmp_path / "one", SECRET)
    (tmp_path / "two").write_bytes(b"  " + SECRET.encode() + b"\r\n")
    (tmp_path / "two").chmod(0o400)
    keys = read_keys({"a": settings(one)})
    assert keys["a"] == read_keys({"a": settings(tmp_path / "two")})["a"]
    assert keys["default"] == TenantKeys()
    name = storage_key(keys["a"].secret, bytes(32), Provenance.IN_CONTEXT, Exactness.EXACT, bytes(32))
    assert name.hex() == "e6123ce1940fa5c63eff9319b91a6386cef69d4c0b655232f7ec3208cb81ae14"
    assert keys["a"].digest.hex() == "63440c4b74203825ff3dbf0beab97f0c"
    assert SECRET not in repr(keys)


def test_the_default_tenant_keeps_its_published_secret_unless_it_is_given_one(tmp_path: Path) -> None:
    assert read_keys({"default": settings("")})["default"].secret == DEFAULT_TENANT_SECRET
    own = read_keys({"default": settings(write_private(tmp_path / "own", SECRET))})["default"]
    assert own.secret != DEFAULT_TENANT_SECRET


def refused(path: Path | str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_keys({"a": settings(path)})
    assert str(path) in caught.value.message
    assert "tenants.a.secret_file" in caught.value.message
    assert SECRET not in caught.value.message
    return caught.value.message


def test_what_is_no_secret_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "absent")
    assert "no file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "no file" in refused(tmp_path / "pipe")
    for text in ("", "x" * 31, " " * 40, "x" * 5000):
        assert "openssl rand" in refused(write_private(tmp_path / "short", text))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o602, 0o644])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = Path(write_private(tmp_path / "secret", SECRET))
    path.chmod(mode)
    assert "chmod 600" in refused(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write_private(tmp_path / "secret", SECRET)
    os.chown(path, 65534, 65534)
    assert "belongs to user 65534" in refused(path)


def test_two_tenants_never_have_one_secret(tmp_path: Path) -> None:
    one, other = (write_private(tmp_path / name, SECRET) for name in ("one", "other"))
    with pytest.raises(InvalidRequest, match=r"tenants\.b\.secret_file.*tenant a.*its own"):
        read_keys({"a": settings(one), "b": settings(other)})
