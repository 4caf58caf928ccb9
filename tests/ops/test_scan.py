"""``kvstore scan`` reads a bucket back, and deletes from it no more than it was told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from kvstore_client import connect
from kvstore_ops import scan as scanning
from kvstore_ops.cli import app
from kvstore_ops.sidecar import Sidecar
from typer.testing import CliRunner

from kvstore.chunk import Making, Sealing, Trust, check_alone, encode_chunk, open_alone, sealed_header_bytes
from kvstore.errors import DataLoss, InvalidRequest, KVStoreError
from kvstore.keys import fingerprint
from kvstore.seams import EnvelopeKey, EnvelopeRing, TenantKeys
from kvstore.spec import ENVELOPES, CacheKind, Encoding
from kvstore.tiers.s3 import listing
from kvstore.tiers.s3.listing import Examined, Listed
from tests.contracts.chunks import SMALL, Chunk, chunk, layouts
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.contracts.shared.stands import write
from tests.specs import random_cache, small_spec, tokens_of
from tests.tiers.s3.objects import archive, bytes_of, newer, put_bytes

MODELS = {"one": b"\x11" * 32, "other": b"\x22" * 32}


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[S3Stand]:
    made = S3Stand(tmp_path / "home")
    yield made
    made.switches.close()


def scan(
    stand: S3Stand, *arguments: str, key_file: Path | None = None, place: Path | None = None, **more: str
) -> Any:  # fmt: skip
    """Return what the command prints; its error's message where it fails. ``place``: of a sidecar's sockets."""
    own = {"BUCKET": stand.server.bucket, "PREFIX": stand.settings.prefix, "ENDPOINT_URL": stand.server.url, **more}
    environment = {f"KVSTORE__TIERS__S3__{name}": value for name, value in own.items()}
    if key_file is not None:
        environment["KVSTORE__TENANTS__DEFAULT__ENVELOPE_KEY_FILE"] = str(key_file)
    environment["KVSTORE__SERVER__SOCKET_DIRECTORY"] = str(place or "/nowhere")
    done = CliRunner().invoke(app, ["scan", *arguments], env=environment)
    if isinstance(done.exception, KVStoreError):
        return done.exception.message
    assert done.exception is None, done.exception
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def filled(stand: S3Stand) -> list[Chunk]:
    """Ten chunks of two tenants and two models; one is altered in its body, one in its header, one is too short, one
    is of a newer release, and one object is none."""
    default = TenantKeys().digest
    chunks = [chunk(number, tenant_digest=default, fingerprint=MODELS["one"]) for number in range(6)]
    chunks += [chunk(number, tenant_digest=b"t" * 16, fingerprint=MODELS["other"]) for number in range(6, 10)]

    async def scenario() -> None:
        for each in chunks:
            await write(stand.tier, each)

    stand.run(scenario)
    stand.flip(chunks[0].header.storage_key, SMALL.header_bytes + 5)
    stand.flip(chunks[1].header.storage_key, 300)
    put_bytes(stand, chunks[2], bytes_of(chunks[2])[:-1])
    put_bytes(stand, chunks[3], newer(bytes_of(chunks[3])))
    stand.server.put(f"{stand.settings.prefix}/v1/aa/notes.txt", b"somebody's")
    return chunks


def test_it_ends_without_a_word_about_connections(stand: S3Stand) -> None:
    own = {"BUCKET": stand.server.bucket, "PREFIX": stand.settings.prefix, "ENDPOINT_URL": stand.server.url}
    environment = {**os.environ, **{f"KVSTORE__TIERS__S3__{name}": value for name, value in own.items()}}
    command = [sys.executable, "-m", "kvstore_ops.cli", "scan"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.strip() == ""


def test_it_tells_what_is_there_and_what_is_damaged(stand: S3Stand) -> None:
    filled(stand)
    found = scan(stand, "--json")
    assert {(row["tenant"], row["model"]): row["chunk_count"] for row in found["rows"]} == {
        ("default", "111111111111"): 3, ("74" * 16, "222222222222"): 4,
    }  # fmt: skip
    assert sum(found["damaged"].values()) == 2
    assert (found["newer_count"], found["foreign_count"], found["object_count"]) == (1, 1, 10)
    assert found["byte_count"] == 10 * SMALL.total_bytes - 1
    assert sum(scan(stand, "--json", "--verify")["damaged"].values()) == 3
    assert scan(stand, "--json", "--verify", "--tenant", "default")["damaged"] == {"checksum": 1}
    shown = scan(stand)
    assert all(word in shown for word in ("default", "111111111111", "10 objects", "newer release: 1"))
    assert scan(stand, "--json", "--tenant", "7474")["object_count"] == 4
    assert scan(stand, "--json", "--model", "1111")["object_count"] == 3


def test_archived_objects_are_not_called_damaged(stand: S3Stand) -> None:
    """They can be restored."""
    chunks = filled(stand)
    archive(stand, chunks[4].header.storage_key)
    found = scan(stand, "--json")
    assert found["archived_count"] == 1
    assert "archived" not in found["damaged"]
    assert "moved to an archive, and not read: 1" in scan(stand)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_sidecar_of_another_user_is_asked_nothing(tmp_path: Path) -> None:
    """Its directory may not even be entered."""
    own = tmp_path / "run"
    own.mkdir(0o700)
    (own / "kvstore.sock").touch()
    os.seteuid(65534)
    try:
        assert scanning.names_of_models(own / "kvstore.sock") == {}
    finally:
        os.seteuid(0)


def test_models_that_the_nodes_own_sidecar_knows_are_named(
    stand: S3Stand, own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are known by their fingerprints only: objects contain no names."""
    spec, place = small_spec(model_id="some/model [bold]"), own_sidecar.directory / "run"
    names = [fingerprint(spec, CacheKind.KV), fingerprint(spec, CacheKind.E, 1), MODELS["other"]]

    async def scenario() -> None:
        for number, name in enumerate(names):
            await write(stand.tier, chunk(number, tenant_digest=TenantKeys().digest, fingerprint=name))

    stand.run(scenario)
    with connect(own_sidecar.address) as client:
        client.store(spec, tokens_of(16), random_cache(spec, 16)).wait(10.0)
    found = scan(stand, "--json", place=place)
    assert {row["model"]: row["model_id"] for row in found["rows"]} == {
        names[0].hex()[:12]: spec.model_id, names[1].hex()[:12]: spec.model_id, "222222222222": "",
    }  # fmt: skip
    shown = scan(stand, place=place).replace("\n", "")
    assert shown.count("[bold]") == 2
    for name in (spec.model_id, "model [bold]"):
        assert scan(stand, "--json", "--model", name, place=place)["object_count"] == 2
    assert scan(stand, "--json", "--model", names[0].hex()[:8], place=place)["object_count"] == 1
    with monkeypatch.context() as context:
        context.setenv("KVSTORE_SOCKET", own_sidecar.address)  # as for other commands
        assert scan(stand, "--json", "--model", spec.model_id)["object_count"] == 2
    assert scan(stand, "--json", "--delete", "--model", spec.model_id, "--yes", place=place)["deleted_count"] == 2
    assert {row["model_id"] for row in scan(stand, "--json")["rows"]} == {""}, "no sidecar runs there"
    said = scan(stand, "--model", spec.model_id)
    assert all(word in said for word in ("no names of models", "at least 1 hexadecimal", "kvstore models"))


def test_a_name_of_several_models_selects_none_of_them() -> None:
    """Two of one id, as with another cache dtype; and two of one last part. Each has a cache of E, too."""
    one, two, other = (
        scanning.KnownModel(name, digit * 64) for name, digit in (("a/m", "1"), ("a/m", "2"), ("b/m", "3"))
    )
    models = {each.fingerprint: each for each in (one, two, other)} | {"e" * 64: other}
    assert scanning.caches_of(models, "b/m") == ("3" * 64, "e" * 64)
    assert scanning.caches_of(models, "nothing") == ()
    for name, digits in (("a/m", "1" * 16), ("m", "3" * 16)):
        with pytest.raises(InvalidRequest, match=digits):
            scanning.caches_of(models, name)


def test_it_deletes_what_it_was_told_to_and_nothing_else(stand: S3Stand) -> None:
    chunks = filled(stand)
    before = stand.server.keys(f"{stand.settings.prefix}/")
    assert "give --tenant" in scan(stand, "--delete", "--yes")
    assert "would delete 4" in scan(stand, "--delete", "--tenant", "74747474")
    for short in ("7474", "7", "teapot"):
        assert "at least 8" in scan(stand, "--delete", "--tenant", short, "--yes")
        assert "at least 8" in scan(stand, "--delete", "--model", short, "--yes")
    assert scan(stand, "--json", "--delete", "--older-than", "1 h", "--yes")["deleted_count"] == 0
    assert stand.server.keys(f"{stand.settings.prefix}/") == before
    assert (
        scan(stand, "--json", "--delete", "--tenant", "74747474", "--model", "22222222", "--yes")["deleted_count"] == 4
    )
    left = stand.server.keys(f"{stand.settings.prefix}/")
    assert len(left) == len(before) - 4
    assert all(each.header.storage_key.hex() not in " ".join(left) for each in chunks[6:])
    assert scan(stand, "--json", "--delete", "--older-than", "0 s", "--yes")["deleted_count"] == 5
    assert len(stand.server.keys(f"{stand.settings.prefix}/")) == 2, "what is newer, and what is no chunk, stays"


def test_what_is_stored_anew_meanwhile_is_left_alone(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = filled(stand)

    def late(*arguments: Any, **more: Any) -> Any:
        found = listing.examine(*arguments, **more)
        put_bytes(stand, chunks[0], bytes_of(chunks[0]) + b"mended")
        return found

    monkeypatch.setattr(scanning, "examine", late)
    assert scan(stand, "--json", "--delete", "--older-than", "0 s", "--yes")["renewed_count"] == 1
    stand.flip(chunks[0].header.storage_key, 300)
    assert "stored anew meanwhile: 1, left alone" in scan(stand, "--delete", "--older-than", "0 s", "--yes")


def test_a_tenants_name_means_no_digest_that_begins_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may be called "deadbeef", and another one's digest may begin so."""
    own = "ab" * 16
    monkeypatch.setattr(scanning, "names_of_tenants", lambda _: {own: "deadbeef"})
    settings: Any = None
    wanted = scanning.wanted_of(settings, "deadbeef", "", 0.0, is_for_deletion=True)
    for digest, is_own in ((bytes.fromhex(own), True), (bytes.fromhex("deadbeef" + "00" * 12), False)):
        what = chunk(1, tenant_digest=digest)
        listed = Listed(what.header.storage_key, "", SMALL.total_bytes, 0.0)
        assert wanted.has(Examined(listed, what.header), 1.0) is is_own
    with pytest.raises(InvalidRequest, match="no tenant"):
        scanning.wanted_of(settings, "deadbee", "", 0.0, is_for_deletion=True)


def test_what_is_large_is_read_alone_and_what_is_too_large_by_its_header(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has few objects at a time: each is judged before another one is read in its place."""
    filled(stand)
    held, most = 0, []
    whole, judged = listing._whole, listing._judged_whole

    async def reading(*arguments: Any) -> Any:
        nonlocal held
        found = await whole(*arguments)
        held += 1
        most.append(held)
        return found

    def judging(*arguments: Any) -> Any:
        nonlocal held
        held -= 1
        return judged(*arguments)

    monkeypatch.setattr(listing, "_whole", reading)
    monkeypatch.setattr(listing, "_judged_whole", judging)
    monkeypatch.setattr(listing, "HEADERS_AT_ONCE", 2)
    assert sum(scan(stand, "--json", "--verify")["damaged"].values()) == 3
    assert max(most) <= listing.WHOLE_AT_ONCE
    monkeypatch.setattr(listing, "SEVERAL_BYTES_MAX", 1)
    most.clear()
    held = 0
    assert sum(scan(stand, "--json", "--verify")["damaged"].values()) == 3
    monkeypatch.setattr(listing, "WHOLE_BYTES_MAX", 1)
    most.clear()
    found = scan(stand, "--json", "--verify")
    assert not most
    assert (found["unread_count"], sum(found["damaged"].values())) == (10, 2)


OWN, OTHERS = b"o" * 40, b"t" * 40
SEALS = ENVELOPES[1:]
FIRST_STRIP = sealed_header_bytes(SMALL.strip_count)


def file_of(home: Path, *keys: bytes) -> Path:
    """An envelope key file."""
    path = home / "keys"
    path.write_bytes(b"\n".join(keys) + b"\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("kind", SEALS)
def test_what_is_sealed_with_a_key_of_the_configuration_is_opened(stand: S3Stand, kind: str, tmp_path: Path) -> None:
    chunks = sealed_chunks(stand, kind, OWN)
    key_file = file_of(tmp_path, OTHERS, OWN)
    found = scan(stand, "--json", "--verify", key_file=key_file)
    assert (found["damaged"], found["unopened_count"], found["object_count"]) == ({}, 0, 3)
    assert "damaged: none (by all bytes)" in scan(stand, "--verify", key_file=key_file)
    for each, offset in zip(chunks, (FIRST_STRIP, FIRST_STRIP + 100, 340), strict=True):  # the last is in the header
        stand.flip(each.header.storage_key, offset)
    found = scan(stand, "--json", "--verify", key_file=key_file)
    assert found["damaged"] == {"tag": 2, "header": 1}
    assert "damaged: 1 header, 2 tag (by all bytes)" in scan(stand, "--verify", key_file=key_file)
    whose = chunks[0].header.tenant_digest.hex()
    assert scan(stand, "--json", "--verify", "--tenant", whose, key_file=key_file)["damaged"] == {"tag": 2}


@pytest.mark.parametrize("kind", SEALS)
def test_what_is_sealed_with_another_key_is_never_called_undamaged(stand: S3Stand, kind: str, tmp_path: Path) -> None:
    chunks = sealed_chunks(stand, kind, OTHERS)
    for each in chunks:
        stand.flip(each.header.storage_key, FIRST_STRIP)
    for key_file in (None, file_of(tmp_path, OWN)):
        found = scan(stand, "--json", "--verify", key_file=key_file)
        assert (found["damaged"], found["unopened_count"], found["object_count"]) == ({}, 3, 3)
        shown = scan(stand, "--verify", key_file=key_file)
        assert "damaged: none of what was checked (by all bytes)" in shown
        assert "not checked (sealed with a key that this configuration does not have): 3" in shown
    found = scan(stand, "--json", key_file=file_of(tmp_path, OWN))
    assert found["unopened_count"] == 0, "headers alone were asked for"
    assert "tenants.default.envelope_key_file" in scan(stand, "--verify", key_file=tmp_path / "none")


@pytest.mark.parametrize("own", [True, False])
def test_without_the_package_that_opens_a_copy_it_says_what_to_install(
    stand: S3Stand, own: bool, tmp_path: Path
) -> None:
    """Copies that could not be opened with it either are counted, as ever."""
    sealed_chunks(stand, "aead", OWN if own else OTHERS)
    blocked = tmp_path / "blocked" / "cryptography"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('not here', name='cryptography')\n")
    settings = {"BUCKET": stand.server.bucket, "PREFIX": stand.settings.prefix, "ENDPOINT_URL": stand.server.url}
    environment = {
        **os.environ, **{f"KVSTORE__TIERS__S3__{name}": value for name, value in settings.items()},
        "KVSTORE__TENANTS__DEFAULT__ENVELOPE_KEY_FILE": str(file_of(tmp_path, OWN)),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "kvstore_ops.cli", "scan", "--verify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert (done.returncode != 0) == ("pip install 'kvstore[aead]'" in done.stderr) == own, done.stderr
    assert ("that this configuration does not have): 3" in done.stdout) != own


def sealed_chunks(stand: S3Stand, kind: str, key: bytes) -> list[Chunk]:
    """Three chunks in envelopes, and nothing else."""
    tier = tier_of(stand.settings, Trust(kind, EnvelopeRing([EnvelopeKey.derived(key)])))
    chunks = [chunk(number) for number in range(3)]

    async def scenario() -> None:
        for each in chunks:
            await write(tier, each)
        await tier.close()

    stand.run(scenario)
    return chunks


def test_mistakes_name_the_setting(stand: S3Stand) -> None:
    assert "tiers.s3.bucket" in scan(stand, BUCKET="")
    assert "tiers.s3.bucket" in scan(stand, BUCKET="there-is-none")
    assert "tiers.s3.endpoint_url" in scan(stand, ENDPOINT_URL="http://127.0.0.1:1")
    assert "tiers.s3.profile" in scan(stand, PROFILE="nobody")


@pytest.mark.parametrize("kind", layouts())
def test_a_chunk_is_checked_without_its_spec(kind: str) -> None:
    what = chunk(1, layouts()[kind])
    whole = np.concatenate(what.pieces)
    encoded = encode_chunk(what.header, what.layout, what.pieces).data
    for data in (whole, encoded):
        assert check_alone(data.copy()).write_id == what.header.write_id
        with pytest.raises(DataLoss):
            check_alone(data[:-1])
        for at in (9, 300, what.layout.header_bytes + 1):
            altered = data.copy()
            altered[at] ^= 1
            with pytest.raises(DataLoss):
                check_alone(altered)


@pytest.mark.parametrize("seal", SEALS)
@pytest.mark.parametrize("kind", layouts())
def test_a_sealed_chunk_is_checked_without_its_spec(kind: str, seal: str) -> None:
    what, key = chunk(1, layouts()[kind]), EnvelopeKey.derived(OWN)
    for encoding in (Encoding.RAW, Encoding.LZ4):
        making = Making(header=what.header, layout=what.layout, encoding=encoding, sealing=Sealing(seal, key))
        data = np.concatenate(making.made(what.pieces)[1])
        data.flags.writeable = False
        opened = open_alone(data, EnvelopeRing([key]))
        assert opened is not None
        assert opened.write_id == what.header.write_id
        assert open_alone(data, EnvelopeRing()) is None
        assert open_alone(data, EnvelopeRing([EnvelopeKey.derived(OTHERS)])) is None
        with pytest.raises(DataLoss):
            open_alone(data[:-1], EnvelopeRing([key]))
        assert opened.envelope is not None
        for at in (9, 300, 500, opened.envelope.header_bytes, opened.envelope.header_bytes + 1):
            altered = data.copy()
            altered[at] ^= 1
            with pytest.raises(DataLoss):
                open_alone(altered, EnvelopeRing([key]))


def test_a_strip_in_another_ones_place_is_wrong() -> None:
    """The table, which nobody signs, names both of them; their checksums know their places."""
    what = chunk(1)
    data = np.concatenate(what.pieces)
    length = int(what.layout.strip_lengths[0])
    body = data[what.layout.header_bytes :]
    first, second = body[:length].copy(), body[length : 2 * length].copy()
    body[:length], body[length : 2 * length] = second, first
    rows = data[384 : 384 + 64].reshape(2, 32)
    rows[:, 16:] = rows[::-1, 16:].copy()
    page = data[: what.layout.header_bytes]
    page[368:384] = 0
    page[368:384] = np.frombuffer(xxhash.xxh3_128_digest(page.data), np.uint8)
    with pytest.raises(DataLoss, match="strip"):
        check_alone(data)
