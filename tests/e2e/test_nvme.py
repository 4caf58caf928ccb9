"""The device tier, whole: stored, killed, started again, fetched to the bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss, Unavailable
from kvstore.spec import Durability, MissReason, Tier
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()


def same(fetched, cache, count: int) -> bool:  # type: ignore[no-untyped-def]
    return all(
        (bits(k) == bits(ck[:, :count])).all() and (bits(v) == bits(cv[:, :count])).all()
        for (k, v), (ck, cv) in zip(fetched, cache, strict=True)
    )


@pytest.mark.parametrize(("encoding", "write"), [("raw", "back"), ("lz4", "through")])
def test_local_survives_kill_and_a_clean_stop(plane: str, encoding: str, write: str) -> None:
    settings = {"KVSTORE__TIERS__NVME__ENCODING": encoding, "KVSTORE__TIERS__NVME__WRITE": write}
    tokens, cache = tokens_of(100), random_cache(SPEC, 100)
    hidden = {1: np.arange(3200, dtype=np.uint16).reshape(100, 32)}
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment={**os.environ, **settings}, plane=plane) as sidecar:
        with connect(sidecar.address) as client:
            receipt = client.store(SPEC, tokens, cache, hidden=hidden)
            assert receipt.wait(10.0) is Durability.LOCAL
            assert receipt.stored_token_count == 100
        for kill in (True, False, True):
            sidecar.stop(kill=kill)
            sidecar.start()
            with connect(sidecar.address) as client:
                match = client.lookup(SPEC, tokens)
                assert match.prefix_token_count == 100
                assert {chunk.tier for chunk in match.chunks[:-1]} == {Tier.NVME}
                assert {chunk.encoding.name.lower() for chunk in match.chunks[:-1]} == {encoding}
                fetched = client.fetch(SPEC, tokens, hidden_layers=(1,), verify=True)
                assert (fetched.token_count, fetched.tier, fetched.reason) == (100, Tier.NVME, MissReason.NONE)
                assert same(fetched, cache, 100)
                assert (bits(fetched.hidden[1]) == hidden[1]).all()
                again = client.fetch(SPEC, tokens)
                assert (again.token_count, again.tier) == (100, Tier.DRAM)
                assert same(again, cache, 100)


def test_a_receipt_that_is_waited_for_without_a_sidecar_asks_again_when_there_is_one() -> None:
    tokens, cache = tokens_of(100), random_cache(SPEC, 100)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar, connect(sidecar.address) as client:
        early, late = (client.store(SPEC, tokens, cache) for _ in range(2))
        assert early.wait(10.0) is Durability.LOCAL
        assert late.stored_token_count == 100
        sidecar.stop()
        assert late.wait(10.0) is Durability.NONE
        assert "no sidecar answers" in late.reason or "gone" in late.reason
        sidecar.start()
        eventually(lambda: late.wait(10.0) is Durability.LOCAL, 10.0)
        assert late.missing.keys() == {Durability.SHARED, Durability.OBJECT}


def test_layers_stream_from_the_device(plane: str) -> None:
    tokens, cache = tokens_of(64), random_cache(SPEC, 64)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", plane=plane) as sidecar:
        with connect(sidecar.address) as client:
            assert client.store(SPEC, tokens, cache).wait(10.0) is Durability.LOCAL
        sidecar.stop(kill=True)
        sidecar.start()
        with connect(sidecar.address) as client:
            stream = client.fetch_layers(SPEC, tokens)
            assert (stream.token_count, stream.tier) == (64, Tier.NVME)
            layers = dict(stream)
            assert same([layers[0], layers[1]], cache, 64)
        sidecar.stop(kill=True)
        sidecar.start()
        with connect(sidecar.address) as client:
            fetched = client.fetch(SPEC, tokens, layers=[1], heads=(1, 2))
            assert (fetched.token_count, fetched.tier) == (64, Tier.NVME)
            assert (bits(fetched[0][0]) == bits(cache[1][0][1:2])).all()
            assert (bits(fetched[0][1]) == bits(cache[1][1][1:2])).all()


def test_layers_whose_memory_goes_with_the_session_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar ends after it told what arrives, and before the client has mapped where."""

    def gone(*_: object) -> None:
        raise Unavailable("the sidecar is gone")

    tokens, cache = tokens_of(64), random_cache(SPEC, 64)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            assert client.store(SPEC, tokens, cache).wait(10.0) is Durability.LOCAL
        sidecar.stop()
        sidecar.start()
        with connect(sidecar.address) as client:
            stream = client.fetch_layers(SPEC, tokens)
            assert (stream.token_count, stream.tier) == (64, Tier.NVME)
            monkeypatch.setattr(MappedSession, "region", gone)
            with pytest.raises(DataLoss):
                list(stream)


def test_the_device_holds_more_than_memory() -> None:
    """Five times the arena goes through it; every chunk comes back from the device."""
    spec = small_spec(chunk_tokens=512)
    contexts = [(tokens_of(2048, seed), random_cache(spec, 2048, seed)) for seed in range(40)]
    with Sidecar("--capacity", "1 MiB", nvme="64 MiB") as sidecar, connect(sidecar.address) as client:
        for tokens, cache in contexts:
            assert client.store(spec, tokens, cache).wait(10.0) is Durability.LOCAL
        for tokens, cache in contexts:
            fetched = client.fetch(spec, tokens)
            assert fetched.token_count == 2048
            assert same(fetched, cache, 2048)
        stats = client.stats()
        assert stats.counters["demoted_chunks"] > 0
        assert stats.counters["evicted_chunks"] == 0


def assert_on_the_device(sidecar: Sidecar, tokens: Any, cache: Any) -> None:
    """All 64 tokens, and right."""
    with connect(sidecar.address) as client:
        fetched = client.fetch(SPEC, tokens)
        assert (fetched.token_count, fetched.tier) == (64, Tier.NVME)
        assert same(fetched, cache, 64)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_byte_mover_that_ends_ends_the_service_and_nothing_is_lost(number: signal.Signals) -> None:
    """Nobody knows what it had in hand: the next start looks."""
    tokens, cache = tokens_of(64), random_cache(SPEC, 64)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            assert client.store(SPEC, tokens, cache).wait(10.0) is Durability.LOCAL
        process = sidecar.process
        assert process is not None
        os.kill(sidecar.mover_pids()[1], number)
        assert process.wait(15.0) == 1
        assert "a byte mover ended" in (sidecar.directory / "log").read_text()
        assert not list((sidecar.directory / "run").iterdir())
        sidecar.stop()
        sidecar.start()
        assert_on_the_device(sidecar, tokens, cache)


def test_a_stop_ends_although_byte_movers_stand_still() -> None:
    """What was acknowledged is there afterwards; what they had in hand is not."""
    tokens, cache = tokens_of(64), random_cache(SPEC, 64)
    settings = {"KVSTORE__SERVER__SHUTDOWN_GRACE_S": "0.5", "KVSTORE__CONTROLLER__DEADLINE_S": "1"}
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment={**os.environ, **settings}) as sidecar:
        with connect(sidecar.address, timeout_s=2.0) as client:
            assert client.store(SPEC, tokens, cache).wait(10.0) is Durability.LOCAL
            movers, process = sidecar.mover_pids(), sidecar.process
            assert process is not None
            for pid in movers:
                os.kill(pid, signal.SIGSTOP)
            late = client.store(SPEC, tokens_of(64, 1), cache)
            assert client.fetch(SPEC, tokens).token_count == 64  # from memory: it waits for nobody
            process.terminate()
            assert process.wait(30.0) == 0
            assert late.wait(10.0) is Durability.NONE
        sidecar.stop()
        sidecar.start()
        assert_on_the_device(sidecar, tokens, cache)
        with connect(sidecar.address) as client:
            assert client.lookup(SPEC, tokens_of(64, 1)).prefix_token_count == 0
