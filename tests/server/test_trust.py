"""Envelope keys: read from files that are really secret, changed while the service runs, and never said; and which
envelope a tier's copies get."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.config import RedisSettings, S3Settings, TenantSettings, load
from kvstore.errors import InvalidRequest
from kvstore.seams import EnvelopeKey, EnvelopeRing, TenantKeys
from kvstore.server.secrets import read_envelope_keys
from kvstore.server.trust import Rings, trust_of
from kvstore.server.world import TierOwner
from tests.security.tenancy import write_private

ONE, TWO = "one" * 20, "two" * 20
KEYS = TenantKeys.derived("a", b"the naming secret of tenant a, long")


def settings(path: Path | str) -> TenantSettings:
    return TenantSettings(envelope_key_file=str(path), capacity_bytes=8192, nvme_capacity_bytes=0)


def test_the_first_line_seals_and_all_open(tmp_path: Path) -> None:
    path = write_private(
        tmp_path / "keys", f"# newest first\n{ONE}\n\n  {TWO}  # until all have the new one\nsecret_file"
    )
    found = read_envelope_keys(KEYS, settings(path))
    assert found == [*(EnvelopeKey.derived(each.encode()) for each in (ONE, TWO)), EnvelopeKey.following(KEYS)]
    assert not any(text in repr(found) for text in (ONE, TWO))


def test_without_a_file_the_key_follows_from_the_secret_and_the_published_one_gives_none() -> None:
    assert read_envelope_keys(KEYS, None) == [EnvelopeKey.following(KEYS)]
    assert read_envelope_keys(KEYS, settings("")) == [EnvelopeKey.following(KEYS)]
    assert read_envelope_keys(TenantKeys(), None) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no key"), ("# none", "no key"), ("short", "line 1 has 5"), (ONE + "\n" + "x" * 70000, "more")],
)
def test_what_is_no_key_file_is_refused_and_named(tmp_path: Path, text: str, words: str) -> None:
    path = write_private(tmp_path / "keys", text)
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_envelope_keys(KEYS, settings(path))
    assert "tenants.a.envelope_key_file" in caught.value.message
    assert ONE not in caught.value.message


@pytest.mark.parametrize("path", ["~of-nobody-here/keys", "a\0b", "/nowhere/keys"])
def test_a_file_that_cannot_be_opened_is_named(path: str) -> None:
    """Also where its name is none: a start says which setting it is, and a reload changes nothing."""
    with pytest.raises(InvalidRequest, match="cannot be read") as caught:
        read_envelope_keys(KEYS, settings(path))
    assert "tenants.a.envelope_key_file" in caught.value.message


def test_others_may_not_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(ONE)
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_envelope_keys(KEYS, settings(path))


def test_keys_are_read_again_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    path = tmp_path / "keys"
    write_private(path, ONE)
    rings = Rings({"a": KEYS, "default": TenantKeys()}, {"a": settings(path)})
    ring = rings["a"]
    write_private(path, f"{TWO}\n{ONE}")
    rings.read_again()
    assert ring.newest == EnvelopeKey.derived(TWO.encode())
    assert ring.key_of(EnvelopeKey.derived(ONE.encode()).key_id) is not None
    write_private(path, "short")
    rings.read_again()
    assert len(ring.key_ids) == 2
    assert "stay as they were" in caplog.text
    assert "taken out" not in caplog.text
    write_private(path, TWO)
    rings.read_again()
    assert "1" in [str(each.__dict__.get("keys")) for each in caplog.records if "taken out" in each.message]
    assert not rings["default"]
    assert TWO not in caplog.text


def test_which_envelope_copies_get(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own, nobody = TierOwner("a", EnvelopeRing([EnvelopeKey.following(KEYS)])), TierOwner()
    assert trust_of("redis", "", own).kind == "mac"
    assert trust_of("redis", "aead", own).kind == "aead"
    assert "not protected" not in caplog.text
    lenient = trust_of("redis", "none", own)
    assert (lenient.kind, bool(lenient.ring)) == ("none", True), "it reads what others sealed"
    assert "not protected" in caplog.text
    caplog.clear()
    assert trust_of("s3", "", nobody).kind == "none"
    assert "not protected" in caplog.text
    for kind in ("mac", "aead"):
        with pytest.raises(InvalidRequest, match=rf"tiers\.s3\.envelope = {kind}: the tenant has no key"):
            trust_of("s3", kind, nobody)


def test_settings_that_are_none_are_named() -> None:
    for made in (lambda: RedisSettings(envelope="hmac"), lambda: S3Settings(envelope="hmac")):
        with pytest.raises(InvalidRequest, match=r"tiers\.\w+\.envelope = hmac: use"):
            made()
    with pytest.raises(InvalidRequest, match=r"tiers\.nvme\.envelope = hmac: use none, mac or aead"):
        load(None, {"HOME": "/h", "KVSTORE__TIERS__NVME__ENVELOPE": "hmac"})
