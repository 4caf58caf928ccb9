"""A scheduler looks up and holds, workers in other processes fetch by ticket into their own memory."""

from __future__ import annotations

import gc
import sys
import weakref
from threading import Event
from typing import Any

import numpy as np
import pytest
from kvstore_client import MissReason, Paged, connect
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.lookup import calls
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal, InvalidRequest, KVStoreError, Unavailable
from tests.conftest import CLIENTS
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 90

WORKER = """
import sys
import numpy as np
from kvstore_client import Paged, connect
address, ticket, head = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
pages = [np.zeros((2, 6, 16, 1, 8), np.uint16) for _ in range(2)]
with connect(address) as client:
    transfer = client.start_fetch(ticket, into=Paged(pages, np.arange(90)), heads=(head, head + 1), verify=True)
    for layer in range(2):
        transfer.wait_layer(layer, 10.0)
    transfer.wait(10.0)
print(b"".join(page.tobytes() for page in pages).hex())
"""


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "device"])
def test_two_ranks_redeem_what_a_scheduler_holds(plane: str, cold: bool) -> None:
    tokens, cache = tokens_of(COUNT), random_cache(SPEC, COUNT)
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB", plane=plane) as sidecar:
        with connect(sidecar.address) as client:
            client.store(SPEC, tokens, cache).wait(10.0)
        if cold:
            sidecar.stop(kill=True)
            sidecar.start()
        with connect(sidecar.address) as scheduler:
            match = scheduler.lookup(SPEC, tokens, hold=True, readers=2)
            assert match.prefix_token_count == COUNT
            assert match.ticket is not None
            for head in range(2):
                command = [sys.executable, "-c", WORKER, sidecar.address, match.ticket.hex(), str(head)]
                done = CLIENTS.run(command, timeout=60)
                assert done.returncode == 0, done.stderr
                planes = np.frombuffer(bytes.fromhex(done.stdout), np.uint16).reshape(2, 2, 96, 8)[:, :, :COUNT]
                for layer in range(2):
                    for which in range(2):
                        assert (planes[layer, which] == cache[layer][which][head]).all()
            eventually(lambda: not scheduler.stats().sessions.ticket_count)
            late = scheduler.start_fetch(match.ticket)
            if plane == "local" and not cold:  # its chunks lie where the ticket says
                late.wait(10.0)
                assert (bits(late.wait_layer(1)[1]) == cache[1][1]).all()
            else:
                with pytest.raises(InvalidRequest, match="redeemed by all"):
                    late.wait(10.0)
            stats = scheduler.stats()
            assert stats.sessions.lease_count == 0
            assert stats.counters["tickets_redeemed"] == 2


def test_a_layer_that_is_named_twice_comes_to_both_places(sidecar: Sidecar) -> None:
    tokens, cache = tokens_of(COUNT, 8), random_cache(SPEC, COUNT, 8)
    with connect(sidecar.address) as client:
        client.store(SPEC, tokens, cache).wait(10.0)
        places = [tuple(np.zeros((2, COUNT, 8), np.uint16) for _ in range(2)) for _ in range(3)]
        transfer = client.start_fetch_prefix(SPEC, tokens, layers=[1, 0, 1], into=places)
        transfer.wait(10.0)
        assert transfer.poll() == len(transfer.layers) == 2
        for layer, place in zip([1, 0, 1], places, strict=True):
            assert all((ours == theirs).all() for ours, theirs in zip(place, cache[layer], strict=True))


def test_a_prefix_that_ends_in_a_tail_is_held_whole(sidecar: Sidecar) -> None:
    tokens, cache = tokens_of(COUNT, 5), random_cache(SPEC, COUNT, 5)
    with connect(sidecar.address) as client:
        client.store(SPEC, tokens, cache).wait(10.0)
        longer = np.concatenate([tokens, tokens_of(30, 6)])
        match = client.lookup(SPEC, longer, hold=True)
        assert match.prefix_token_count == COUNT
        into = [tuple(np.zeros((2, COUNT, 8), np.uint16) for _ in range(2)) for _ in range(2)]
        transfer = client.start_fetch(match.ticket, into=into, layers=[1, 0])
        transfer.wait(10.0)
        assert (transfer.poll(), transfer.good_token_count, transfer.error) == (2, COUNT, None)
        assert (bits(into[0][0]) == cache[1][0]).all()
        assert (bits(into[1][1]) == cache[0][1]).all()
        held = client.lookup(SPEC, tokens, hold=True, readers=3)
        client.release_ticket(held.ticket)
        late = client.start_fetch(held.ticket)
        if sidecar.plane == "local":  # its chunks lie where the ticket says
            late.wait(10.0)
            assert (bits(late.wait_layer(0)[0]) == cache[0][0]).all()
        else:
            with pytest.raises(InvalidRequest, match="released"):
                late.wait(10.0)


def test_a_lookup_whose_second_call_fails_releases_its_ticket_once(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that does not answer makes each release wait for the timeout of a call."""
    tokens, call, release, released = tokens_of(COUNT, 4), calls._call, calls.release, list[Any]()

    def fails(context: Any, prompt: Any, digests: Any, readers: int, segments: Any = None) -> Any:
        if segments is None:
            raise Unavailable("the sidecar is gone")
        return call(context, prompt, digests, readers, segments)

    with connect(sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT, 4)).wait(10.0)
        client.connect_now().presence = None  # else one call is enough
        monkeypatch.setattr(calls, "_call", fails)
        monkeypatch.setattr(calls, "release", lambda *given: (released.append(given[1]), release(*given)))
        longer = np.concatenate([tokens, tokens_of(20, 5)])
        assert not client.lookup(SPEC, longer, hold=True)
        assert len(released) == 1
        assert not client.stats().sessions.ticket_count


def test_nothing_hit_nothing_held(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        assert client.lookup(SPEC, tokens_of(40, 77), hold=True).ticket is None


@pytest.mark.parametrize("ticket", [b"", b"x" * 40, b"\x0a\x01a"])
def test_what_is_no_ticket_is_said(sidecar: Sidecar, ticket: bytes) -> None:
    with connect(sidecar.address) as client, pytest.raises(InvalidRequest, match="ticket"):
        client.start_fetch(ticket)


def test_arguments_are_checked_before_anything_moves(sidecar: Sidecar) -> None:
    tokens = tokens_of(COUNT, 8)
    with connect(sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT, 8)).wait(10.0)
        ticket = client.lookup(SPEC, tokens, hold=True).ticket
        assert ticket is not None
        wrong: list[dict[str, Any]] = [
            {"heads": (0, 3)},
            {"layers": [2]},
            {"into": Paged([], np.arange(COUNT))},
            {"into": Paged([np.zeros((2, 6, 16, 2, 8), np.uint16)] * 2, np.arange(COUNT - 1))},
        ]
        for options in wrong:
            with pytest.raises(InvalidRequest):
                client.start_fetch(ticket, **options)
        transfer = client.start_fetch(ticket)
        with pytest.raises(InvalidRequest, match="not part"):
            transfer.wait_layer(7)
        transfer.wait(10.0)


def test_cancel_ends_with_nothing_writing(sidecar: Sidecar) -> None:
    tokens = tokens_of(COUNT, 9)
    with connect(sidecar.address) as client:
        client.store(SPEC, tokens, random_cache(SPEC, COUNT, 9)).wait(10.0)
        transfer = client.start_fetch(client.lookup(SPEC, tokens, hold=True).ticket)
        assert transfer.cancel(10.0)
        assert transfer.is_done


def test_the_sidecar_dies_under_a_transfer(own_sidecar: Sidecar) -> None:
    """Until the client notices, the ticket's places may serve: they are mapped here, and right to the bit."""
    tokens, cache = tokens_of(COUNT), random_cache(SPEC, COUNT)
    with connect(own_sidecar.address) as client:
        client.store(SPEC, tokens, cache).wait(10.0)
        ticket = client.lookup(SPEC, tokens, hold=True).ticket
        assert ticket is not None
        own_sidecar.stop(kill=True)
        transfer = client.start_fetch(ticket)

        def has_failed() -> bool:
            nonlocal transfer
            transfer = client.start_fetch(ticket)
            try:
                transfer.wait(20.0)
            except KVStoreError:
                return True
            for layer, planes in enumerate(cache):
                assert all(map(np.array_equal, map(bits, transfer.wait_layer(layer)), planes))
            return False

        eventually(has_failed)
        assert transfer.failed
        with pytest.raises(KVStoreError):
            transfer.wait_layer(0)


@pytest.mark.parametrize("is_segment", [False, True], ids=["prefix", "segment"])
def test_what_is_asked_for_by_its_tokens_comes_beside_the_caller(sidecar: Sidecar, is_segment: bool) -> None:
    tokens, cache = tokens_of(COUNT, 20 + is_segment), random_cache(SPEC, COUNT, 20)
    hidden = {1: np.random.default_rng(1).integers(0, 1 << 16, (COUNT, SPEC.hidden_size), dtype=np.uint16)}
    with connect(sidecar.address) as client:
        start = client.start_fetch_segment if is_segment else client.start_fetch_prefix
        missed = start(SPEC, tokens, layers=[1], hidden_layers=[1])
        missed.wait(10.0)
        assert (missed.token_count, missed.reason, missed.poll()) == (0, MissReason.COLD, 1)
        assert (missed.wait_layer(1, 10.0), missed.wait_hidden(1, 10.0)) == (None, None)
        keep = client.store_segment if is_segment else client.store
        keep(SPEC, tokens, cache, hidden=hidden).wait(10.0)
        assert (client.start_fetch_prefix(SPEC, tokens).token_count == 0) is is_segment
        pages = np.zeros((2, 6, 16, 2, 8), np.uint16)
        paged = start(SPEC, tokens, into=Paged([pages], np.arange(COUNT)), layers=[1], verify=True)
        own = start(SPEC, tokens, layers=[1, 0], heads=(1, 2), hidden_layers=[1], verify=True)
        assert (own.token_count, own.reason) == (COUNT, MissReason.NONE)
        for layer in (0, 1):
            for plane, said in zip(own.wait_layer(layer, 10.0), cache[layer], strict=True):
                assert np.array_equal(bits(plane), said[1:2])
        assert np.array_equal(bits(own.wait_hidden(1, 10.0)), hidden[1])
        paged.wait(10.0)
        assert np.array_equal(pages[1].reshape(96, 2, 8)[:COUNT], cache[1][1].swapaxes(0, 1))
        for wrong in (lambda: own.wait_layer(2), lambda: own.wait_hidden(0)):
            with pytest.raises(InvalidRequest, match="not part of this transfer"):
                wrong()
        longer = np.concatenate([tokens[:80], tokens_of(9, 3)])
        assert start(SPEC, longer, hidden_layers=[1]).token_count == 80
        with pytest.raises(InvalidRequest, match="hidden_layers"):
            start(SPEC, tokens, hidden_layers=[2])


def test_without_a_sidecar_a_transfer_by_tokens_is_a_miss(own_sidecar: Sidecar) -> None:
    with connect(own_sidecar.address) as client:
        own_sidecar.stop(kill=True)
        transfer = client.start_fetch_prefix(SPEC, tokens_of(COUNT))
        transfer.wait(10.0)
        assert (transfer.token_count, transfer.reason) == (0, MissReason.UNAVAILABLE)


def test_what_nobody_foresaw_is_told_by_its_name() -> None:
    def open_stream() -> Any:
        raise KeyError(3)

    transfer = Transfer(1, [0])
    transfer.start(open_stream)
    for ended in (transfer.wait, lambda timeout: transfer.wait_layer(0, timeout)):
        with pytest.raises(Internal, match=r"the transfer failed: KeyError\(3\)"):
            ended(10.0)


def test_a_transfer_that_failed_goes_with_the_last_who_waited() -> None:
    """And what it brought: not some time later, when garbage is collected."""

    def open_stream() -> Any:
        raise Unavailable("gone", tier="NVME")

    def waited() -> weakref.ref[Any]:
        transfer = Transfer(1, [0])
        transfer.start(open_stream)
        for ended in (transfer.wait, lambda timeout: transfer.wait_layer(0, timeout), transfer.wait):
            with pytest.raises(Unavailable, match="gone") as raised:
                ended(10.0)
            assert raised.value.fields == {"tier": "NVME"}
            del raised
        assert transfer.cancel(10.0)
        return weakref.ref(transfer)

    gc.collect()
    gc.disable()
    try:
        assert waited()() is None
    finally:
        gc.enable()


def test_a_transfer_whose_making_is_interrupted_goes_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr("kvstore_client.fetch.transfer.Bringing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Transfer(1, [0])
    gc.collect()
    assert not told


def test_a_transfer_that_is_stopped_before_it_is_opened_fails_at_once_and_writes_nothing_later() -> None:
    """The sidecar may stand still, and answer when its caller has long computed the prompt."""
    opens, tried = Event(), list[str]()

    class Stream:
        token_count = 1

        def __iter__(self) -> Any:
            tried.append("a layer")
            yield 0, None

        def close(self) -> None:
            tried.append("the end")

        def abandon(self) -> None:
            """It has ended."""

    def open_stream() -> Any:
        assert opens.wait(10.0)
        return Stream()

    transfer = Transfer(1, [0], [1])
    transfer.start(open_stream)
    assert not transfer.is_quiet
    transfer.stop()
    for part in (transfer.landing(0), transfer.landing_hidden(1)):
        with pytest.raises(Unavailable, match="cancelled"):
            part.result(10.0)
    assert transfer.is_quiet
    assert not transfer.is_done
    opens.set()
    assert transfer.cancel(10.0)
    assert tried == ["the end"]
