"""Opaque values: what was put is got, whole or not at all, whoever overwrites it, and whatever crashes."""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from kvstore_client import Client, Durability, connect
from kvstore_client.opaque.calls import PUTS_AT_ONCE
from kvstore_client.opaque.value import CHUNK_BYTES, HEAD, flat
from kvstore_client.planes.stream import prefix as fetching
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.keys import chain_digests
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.data import split_message
from tests.e2e.test_watch import store
from tests.specs import small_spec, tokens_of

MOST = CHUNK_BYTES - HEAD.size
"""The largest value in one chunk."""
REPLACED = {"grows": [10, 100_000, MOST + 100], "shrinks": [MOST + 100, 50_000, 10], "stays": [7000, 7000]}
SIZES = [0, 1, 959, 960, 961, 65536, MOST - 1, MOST, MOST + 1, MOST + CHUNK_BYTES, MOST + CHUNK_BYTES + 1, 10_000_001]


def noise(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_got_to_the_byte(client: Client, size: int) -> None:
    data = noise(size, size)
    assert client.get_bytes("sizes", f"{size}") is None
    assert client.exists("sizes", f"{size}") is False
    receipt = client.put_bytes("sizes", f"{size}", data)
    assert receipt.wait(20) is Durability.MEMORY, receipt.reason
    found = client.get_bytes("sizes", f"{size}", verify=True)
    assert found is not None
    assert (found == data).all()
    assert found.size == size
    place = bytearray(size)
    assert client.get_bytes("sizes", f"{size}", into=place) is not None
    assert bytes(place) == data.tobytes()
    assert client.exists("sizes", f"{size}") is True
    assert client.exists("other", f"{size}") is False


@limits(max_examples=25)
@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 5, 70_000, MOST + 9])), max_size=8))
def test_overwriting_leaves_the_last_value_only(client: Client, steps: list[tuple[str, int]]) -> None:
    namespace = "model"
    known: dict[str, Any] = {}
    for number, (key, size) in enumerate(steps):
        known[key] = noise(size, number)
        assert client.put_bytes(namespace, key, known[key]).wait(20) is Durability.MEMORY
        for name, data in known.items():
            found = client.get_bytes(namespace, name)
            assert found is not None
            assert found.tobytes() == data.tobytes()
        assert client.exists(namespace, sorted(known)) == [True] * len(known)


@pytest.mark.parametrize("sizes", [(10, 10), (10, MOST + 9), (MOST + 9, 10), (MOST + 9, MOST + 9)])
def test_of_puts_in_a_row_the_last_one_stays(client: Client, sizes: tuple[int, int]) -> None:
    """Nobody waits for the first one's receipt."""
    for number in range(5):
        first = client.put_bytes("row", "key", noise(sizes[0], number))
        assert client.put_bytes("row", "key", noise(sizes[1], 100 + number)).wait(20) is Durability.MEMORY
        assert first.wait(20) or "replaced" in first.reason
        found = client.get_bytes("row", "key")
        assert found is not None
        assert found.tobytes() == noise(sizes[1], 100 + number).tobytes()


def test_a_key_of_one_value_for_ever_keeps_its_first(client: Client) -> None:
    client.put_pieces("for-ever", "key", [b"first"], replace=False).wait(10)
    assert client.put_pieces("for-ever", "key", [b"sec", b"ond"], replace=False).wait(10) is Durability.MEMORY
    found = client.get_bytes("for-ever", "key")
    assert found is not None
    assert found.tobytes() == b"first"
    assert client.count_leading("for-ever", ["key", "none", "key"]) == 1
    for number in range(2):  # a value in parts: each put names its own, so none of them could be kept
        with pytest.raises(InvalidRequest, match=f"{MOST} bytes"):
            client.put_pieces("for-ever", "large", [noise(MOST + 1, number)], replace=False)
    assert not client.exists("for-ever", "large")


@pytest.mark.parametrize(
    ("namespace", "key", "data", "words"),
    [
        ("", "k", b"x", "namespace"), ("a b", "k", b"x", "letters"), (3, "k", b"x", "namespace"),
        ("n", "", b"x", "key"), ("n", "k" * 1025, b"x", "hash"), ("n", 7, b"x", "key"),
        ("n", "k", "text", "data"), ("n", "k", np.zeros((4, 4))[:, 1], "contiguous"), ("n", "k", None, "data"),
    ],
)  # fmt: skip
def test_wrong_names_and_values_are_refused_with_what_to_do(
    client: Client, namespace: Any, key: Any, data: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client.put_bytes(namespace, key, data)


def test_wrong_targets_are_refused(client: Client) -> None:
    client.put_bytes("n", "k", b"12345").wait(10)
    with pytest.raises(InvalidRequest, match="5"):
        client.get_bytes("n", "k", into=bytearray(4))
    with pytest.raises(InvalidRequest, match="writable"):
        client.get_bytes("n", "k", into=b"12345")
    with pytest.raises(InvalidRequest, match="one target"):
        client.get_each("n", ["k"], [])


def test_targets_that_share_memory_are_refused(client: Client) -> None:
    room = np.zeros(30, np.uint8)
    for targets in ([room[:10], room[9:19]], [[room[:10], room[20:]], [room[10:20], room[25:]]]):
        with pytest.raises(InvalidRequest, match="targets"):
            client.get_each("n", ["k", "l"], targets)
    assert client.get_each("n", ["none", "of them"], [room[::2][:0], room[10:20]]) == [False, False]


def test_more_values_at_once_than_a_session_may_reserve(plane: str) -> None:
    """Who puts many waits for the first of them, and is refused none."""
    environment = {**os.environ, "KVSTORE__LIMITS__RESERVATION_COUNT_MAX": str(PUTS_AT_ONCE + 6)}
    with Sidecar("--capacity", "32 MiB", plane=plane, environment=environment) as sidecar:
        with connect(sidecar.address) as client:
            keys, go = [f"{number}" for number in range(2 * PUTS_AT_ONCE)], threading.Event()
            client.put_bytes("many", "first", b"x").wait(20)
            client._context.committer.submit(go.wait, 30.0)  # a device that is slow just now
            waking = threading.Timer(1.0, go.set)
            waking.start()
            assert client.put_each("many", keys, [key.encode() for key in keys]) == [True] * len(keys)
            waking.join()
            assert all(client.exists("many", keys))


def test_many_at_once_and_each_by_itself(client: Client) -> None:
    keys = [f"page-{number}" for number in range(12)]
    for number, key in enumerate(keys):
        if number not in (3, 7):
            client.put_bytes("pages", key, noise(30_000, number)).wait(10)
    client.put_bytes("pages", keys[9], noise(29_999, 9)).wait(10)  # of another size than its reader thinks
    targets = [np.zeros(30_000, np.uint8) for _ in keys]
    done = client.get_each("pages", keys, targets)
    assert done == [number not in (3, 7, 9) for number in range(12)]
    for number, is_done in enumerate(done):
        if is_done:
            assert (targets[number] == noise(30_000, number)).all()
    assert client.exists("pages", keys) == [number not in (3, 7) for number in range(12)]
    assert client.get_each("pages", [], []) == []
    assert client.exists("pages", []) == []


def test_a_value_that_finds_no_room_is_not_there_at_all() -> None:
    with Sidecar("--capacity", "16 MiB") as sidecar, connect(sidecar.address) as client:
        receipt = client.put_bytes("n", "big", noise(40 << 20))
        assert receipt.wait(20) is Durability.NONE
        assert "arena.capacity_bytes" in receipt.reason
        assert client.get_bytes("n", "big") is None
        assert client.exists("n", "big") is False
        assert client.put_bytes("n", "small", b"x").wait(10) is Durability.MEMORY
        assert client.put_each("n", ["large", "little"], [noise(40 << 20), b"y"]) == [False, True]


def test_leases_on_their_way_back_keep_no_value_away() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__LEASED_BYTES_MAX": "6 MiB"}  # one chunk, and not two
    with Sidecar("--capacity", "32 MiB", environment=environment) as sidecar, connect(sidecar.address) as client:
        for number in range(2):
            client.put_bytes("n", str(number), noise(3 << 20, number)).wait(10)
        is_late = threading.Event()
        client.connect_now().returns.soon(lambda: is_late.wait(1.0))  # ahead of them
        for number in range(2):
            assert bytes(client.get_bytes("n", str(number))) == noise(3 << 20, number).tobytes()


def test_a_value_whose_place_is_anothers_under_its_copy_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is revoked for its age, and the arena filled anew, when the copy is about to begin."""
    environment = {**os.environ, "KVSTORE__LIMITS__LEASE_AGE_S_MAX": "0"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as sidecar:
        with connect(sidecar.address) as client, connect(sidecar.address) as other:
            halves = client._context.copier.halves

            def late(copy: Any, work: Any) -> Any:
                assert other.put_bytes("n", "large", noise(14_000_000, 1)).wait(20) is Durability.MEMORY
                return halves(copy, work)

            for get in (
                lambda: client.get_bytes("n", "key") is not None,
                lambda: client.get_each("n", ["key"], [np.zeros(3_000_000, np.uint8)])[0],
            ):
                assert client.put_bytes("n", "key", noise(3_000_000, 100)).wait(20) is Durability.MEMORY
                assert get()
                with monkeypatch.context() as patch:
                    patch.setattr(client._context.copier, "halves", late)
                    assert not get()
            assert client.stats().counters["leases_revoked"] >= 2


def test_writers_of_one_key_and_its_readers_meet_whole_values_only(sidecar: Sidecar) -> None:
    """Values of one byte repeated, of several chunks: a mixture would show."""
    sizes = {1: 100_000, 2: MOST + 50_000, 3: MOST + CHUNK_BYTES + 3}
    stop = threading.Event()
    wrong: list[str] = []
    seen = set()

    def write(number: int) -> None:
        with connect(sidecar.address) as client:
            for _ in range(6):
                client.put_bytes("race", "key", np.full(sizes[number], number, np.uint8)).wait(20)

    def read() -> None:
        with connect(sidecar.address) as client:
            while not stop.is_set():
                found = client.get_bytes("race", "key")
                if found is not None:
                    number = int(found[0])
                    seen.add(number)
                    if found.size != sizes.get(number) or not (found == number).all():
                        wrong.append(f"{number}: {found.size}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(number,)) for number in sizes]
    for each in [*readers, *writers]:
        each.start()
    for each in writers:
        each.join(100)
    stop.set()
    for each in readers:
        each.join(30)
    assert not any(each.is_alive() for each in [*readers, *writers])
    assert wrong == []
    assert seen
    with connect(sidecar.address) as client:
        last = client.get_bytes("race", "key")
        assert last is not None
        assert last.size == sizes[int(last[0])]


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("encoding", ["raw", "lz4"])
def test_values_outlive_the_sidecar_and_what_was_overwritten_does_not(kill: bool, encoding: str) -> None:
    environment = {**os.environ, "KVSTORE__TIERS__NVME__ENCODING": encoding}
    with Sidecar("--capacity", "32 MiB", nvme="256 MiB", environment=environment) as sidecar:
        with connect(sidecar.address) as client:
            for key, sizes in REPLACED.items():
                for seed, size in enumerate(sizes):  # each has a slot of another size: the one before stays free
                    receipt = client.put_bytes("kept", key, noise(size, seed))
                    assert receipt.wait(30) is Durability.LOCAL, receipt.reason
        sidecar.stop(kill=kill)
        sidecar.start()
        with connect(sidecar.address) as client:
            for key, sizes in REPLACED.items():
                found = client.get_bytes("kept", key, verify=True)
                assert found is not None
                assert found.tobytes() == noise(sizes[-1], len(sizes) - 1).tobytes()


def test_an_old_value_that_the_device_evicted_does_not_come_back_after_a_crash() -> None:
    """v1 is evicted from everywhere, v2 takes its place and is evicted, too; then the sidecar is killed."""
    with Sidecar("--capacity", "16 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            filler = iter(range(1000))

            def press_out() -> None:
                while client.exists("n", "key"):
                    client.put_bytes("n", f"filler-{next(filler)}", noise(3_000_000, 1)).wait(30)

            assert client.put_bytes("n", "key", noise(3_000_000, 100)).wait(30) is Durability.LOCAL
            press_out()
            assert client.put_bytes("n", "key", noise(3_000_000, 200)).wait(30) is Durability.LOCAL
            press_out()
        sidecar.stop(kill=True)
        sidecar.start()
        with connect(sidecar.address) as client:
            found = client.get_bytes("n", "key")
            assert found is None or (found == noise(3_000_000, 200)).all()


def test_without_a_sidecar_nothing_is_there_and_nothing_fails(own_sidecar: Sidecar) -> None:
    with connect(own_sidecar.address) as client:
        client.put_bytes("n", "k", b"x").wait(10)
        own_sidecar.stop()
        assert client.get_bytes("n", "k") is None
        assert client.exists("n", ["k", "l"]) == [False, False]
        assert client.put_bytes("n", "k", b"x").wait(10) is Durability.NONE


def test_values_of_one_meaning_are_sent_once(client: Client) -> None:
    small, large = np.full(1000, 1, np.uint8), np.full(5 << 20, 2, np.uint8)
    assert client.put_each("once", ["small", "large"], [[small[:10], small[10:]], large]) == [True, True]
    sent = client.stats().counters["store_committed_bytes"]
    other = np.zeros(1000, np.uint8)
    assert client.put_each("once", ["small", "large"], [other, large]) == [True, True]
    assert client.stats().counters["store_committed_bytes"] == sent
    found = client.get_bytes("once", "small")
    assert found is not None
    assert np.array_equal(found, small)
    assert client.put_each("once", ["late"], [small], timeout_s=-1.0) == [False]
    assert client.exists("once", ["large", "late"]) == [True, False]
    with pytest.raises(InvalidRequest, match="1 keys and 2 values"):
        client.put_each("once", ["small"], [small, small])


def test_tensors_are_bytes_too() -> None:
    import torch

    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert flat(tensor).tobytes() == tensor.view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_encoder_caches_come_back_as_they_were(client: Client, dtype: str) -> None:
    import torch

    spec = small_spec(model_id=f"vision-{dtype}")
    embeddings = torch.randn(577, 64).to(getattr(torch, dtype))
    assert client.get_encoder(spec, "hash") is None
    assert client.put_encoder(spec, "hash", embeddings).wait(10) is Durability.MEMORY
    found = client.get_encoder(spec, "hash")
    assert found.dtype == embeddings.dtype
    assert torch.equal(found, embeddings)
    assert client.has_encoder(spec, ["hash", "other"]) == [True, False]
    assert client.get_encoder(small_spec(model_id=f"vision-{dtype}", weights_digest="cd" * 32), "hash") is None


@pytest.mark.parametrize("wrong", [np.zeros((2, 3, 4), np.float16), np.zeros((2, 3)), [[1.0]], b"x"])
def test_what_are_no_embeddings_is_refused(client: Client, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="embeddings"):
        client.put_encoder(small_spec(), "hash", wrong)


def test_routers_and_attention_caches_do_not_meet_opaque_values(client: Client) -> None:
    """Only an opaque namespace's digests may be replaced."""
    session = client.connect_now()
    spec = small_spec(model_id="no bytes")
    store(client, 16, 77, spec)
    _, name = client._context.ready(spec)
    digest = chain_digests(tokens_of(16, 77), 16)[0]
    reserve = pb.Reserve(
        query=pb.ChainQuery(fingerprint=name, digests=bytes(32)[:31] + b"x"), token_digests=bytes(32), replaces=digest
    )
    with pytest.raises(InvalidRequest, match="opaque"):
        session.call(session.cache.Store, pb.StoreRequest(reserve=reserve), 10.0)
    assert client.lookup(spec, tokens_of(16, 77)).prefix_token_count == 16


def test_bytes_that_changed_on_their_way_are_a_miss_of_their_page_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [noise(2 << 20, number) for number in range(3)]
    with Sidecar("--capacity", "32 MiB", plane="remote") as sidecar, connect(sidecar.address) as client:
        assert client.put_each("n", ["a", "b", "c"], pages) == [True] * 3

        def split(kind: Any, message: bytes) -> Any:
            fields, found = split_message(kind, message)
            place = found.tobytes().find(pages[2][5000:5016].tobytes())
            if place >= 0:
                found = found.copy()
                found[place] ^= 1
            return fields, found

        monkeypatch.setattr(fetching, "split_message", split)
        targets = [np.zeros(2 << 20, np.uint8) for _ in pages]
        assert client.get_each("n", ["a", "b", "c"], targets) == [True, True, False]
        assert all((targets[number] == pages[number]).all() for number in range(2))


def test_bytes_that_changed_on_their_way_are_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a later message only: never a wrong byte."""
    data = noise(MOST + 100_000)
    with Sidecar("--capacity", "32 MiB", plane="remote") as sidecar, connect(sidecar.address) as client:
        client.put_bytes("n", "large", data).wait(20)
        client.put_bytes("n", "small", data[:5000]).wait(20)

        def changed(after: int) -> Any:
            seen = count()

            def split(kind: Any, message: bytes) -> Any:
                fields, found = split_message(kind, message)
                if found.size > 1000 and next(seen) >= after:
                    found = found.copy()
                    found[-1] ^= 1
                return fields, found

            return split

        for key, after in (("small", 0), ("large", 0), ("large", 1), ("large", 3)):
            with monkeypatch.context() as patch:
                patch.setattr(fetching, "split_message", changed(after))
                assert client.get_bytes("n", key) is None
        for key, size in (("small", 5000), ("large", data.size)):
            assert (client.get_bytes("n", key) == data[:size]).all()
