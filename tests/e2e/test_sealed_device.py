"""A sidecar whose copies on the device are in envelopes: killed, started again, its keys changed, its files altered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore import keys
from kvstore.spec import Durability, MissReason
from tests.e2e.test_nvme import same
from tests.security.tenancy import secret_of, write_private
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
COUNT = 2 * STEP
SPEC = small_spec(chunk_tokens=STEP)
FIRST, SECOND = "the first key " * 4, "the second key " * 4
VALUE = b"a value that is seen nowhere on the device " * 100


class SealedSidecar(Sidecar):
    """One whose settings change between a stop and the next start."""

    def __init__(self, keys_file: Path) -> None:
        super().__init__("--capacity", "16 MiB", "--metrics-port", "0", nvme="64 MiB")
        self.seal("none", keys_file)

    def seal(self, envelope: str, keys_file: Path) -> None:
        own = {
            "TENANTS__DEFAULT__SECRET_FILE": write_private(self.directory / "secret", secret_of("a")),
            "TENANTS__DEFAULT__ENVELOPE_KEY_FILE": str(keys_file), "TENANTS__DEFAULT__CAPACITY_BYTES": "16 MiB",
            "TENANTS__DEFAULT__NVME_CAPACITY_BYTES": "64 MiB", "TIERS__NVME__ENVELOPE": envelope,
            "POLICY__CANARY_INTERVAL_S": "0",
        }  # fmt: skip
        self.environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}

    def restart(self, envelope: str, keys_file: Path, *, kill: bool) -> None:
        self.stop(kill=kill)
        self.seal(envelope, keys_file)
        self.start()

    def device_files(self) -> list[Path]:
        return [path for path in self.directory.rglob("nvme/*") if path.is_file() and path.name != "lock"]

    def seen(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.device_files())


@contextmanager
def asked(sidecar: Sidecar):
    with connect(sidecar.address) as client:
        yield client


def store(client: Client, seed: int) -> None:
    receipt = client.store(SPEC, tokens_of(COUNT, seed), random_cache(SPEC, COUNT, seed))
    assert receipt.wait(20.0) is Durability.LOCAL, receipt.reason


def has(client: Client, seed: int) -> bool:
    fetched = client.fetch(SPEC, tokens_of(COUNT, seed))
    assert same(fetched, random_cache(SPEC, COUNT, seed), fetched.token_count), "wrong bytes"
    return bool(fetched.token_count == COUNT)


@pytest.mark.parametrize("kind", ["mac", "aead"])
def test_local_stays_local_whatever_is_turned_on_and_whichever_key_is_new(tmp_path: Path, kind: str) -> None:
    keys_file = tmp_path / "keys"
    write_private(keys_file, FIRST)
    with SealedSidecar(keys_file) as sidecar:
        with asked(sidecar) as client:
            store(client, 1)  # before there are envelopes
        sidecar.restart(kind, keys_file, kill=True)
        with asked(sidecar) as client:
            assert client.stats().tiers[0].envelope == kind
            assert has(client, 1)
            store(client, 2)
            assert client.put_bytes("notes", "k", VALUE).wait(20.0) is Durability.LOCAL
            write_private(keys_file, f"{SECOND}\n{FIRST}")
            os.kill(sidecar.pid, signal.SIGHUP)
            eventually(lambda: "envelope keys were read" in (sidecar.directory / "log").read_text(), 10)
            store(client, 3)
        for envelope, kill in ((kind, True), (kind, False), ("none", True), (kind, True)):
            sidecar.restart(envelope, keys_file, kill=kill)
            with asked(sidecar) as client:
                assert [has(client, seed) for seed in (1, 2, 3)] == [True] * 3
                assert client.get_bytes("notes", "k").tobytes() == VALUE


def test_with_aead_nothing_on_the_device_confirms_a_prompt(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"
    write_private(keys_file, FIRST)
    tokens = keys.token_array(tokens_of(COUNT, 1), SPEC.vocab_size)
    secrets = [*keys.chain_digests(tokens, STEP), keys.token_digest(tokens[:STEP]), VALUE[:43]]
    secrets.append(np.ascontiguousarray(random_cache(SPEC, COUNT, 1)[0][0][0, 0, :4]).tobytes()[:32])
    found: dict[str, list[bool]] = {}
    for kind in ("none", "aead"):
        with SealedSidecar(keys_file) as sidecar:
            sidecar.restart(kind, keys_file, kill=False)
            with asked(sidecar) as client:
                store(client, 1)
                client.put_bytes("notes", "k", VALUE).wait(20.0)
            sidecar.stop()
            found[kind] = [each in sidecar.seen() for each in secrets]
            sidecar.start()
    assert found == {"none": [True] * len(secrets), "aead": [False] * len(secrets)}


@pytest.mark.parametrize("kind", ["mac", "aead"])
def test_files_that_somebody_altered_give_misses_and_are_stored_again(tmp_path: Path, kind: str) -> None:
    keys_file = tmp_path / "keys"
    write_private(keys_file, FIRST)
    random = np.random.default_rng(1)

    def alter(path: Path) -> None:
        data = np.fromfile(path, np.uint8)
        for at in random.integers(4096, data.size, 40):
            data[at] ^= 1 << random.integers(8)
        data.tofile(path)

    def without_key(_: Path) -> None:
        write_private(keys_file, SECOND)

    def with_both(_: Path) -> None:
        write_private(keys_file, f"{SECOND}\n{FIRST}")

    with SealedSidecar(keys_file) as sidecar:
        sidecar.restart(kind, keys_file, kill=False)
        with asked(sidecar) as client:
            for seed in range(8):
                store(client, seed)
        changes: list[tuple[Callable[[Path], None], bool]] = [(without_key, False), (with_both, True)]
        for change, is_there in changes:
            sidecar.stop(kill=True)
            change(keys_file)
            sidecar.start()
            with asked(sidecar) as client:
                assert [has(client, seed) for seed in range(8)] == [is_there] * 8
        sidecar.stop(kill=True)
        for path in sidecar.device_files():
            if path.name.startswith("region"):
                alter(path)
        sidecar.start()
        with asked(sidecar) as client:
            fetched = [client.fetch(SPEC, tokens_of(COUNT, seed)) for seed in range(8)]
            assert any(each.reason in (MissReason.CORRUPT, MissReason.COLD) for each in fetched)
            for seed in range(8):
                store(client, seed)
                assert has(client, seed)
