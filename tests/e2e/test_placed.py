"""A ticket names the places of its chunks, and who maps them fetches by it without a call: the right bytes, or a call
that decides."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from kvstore_client import Client, Durability, connect
from kvstore_client.fetch.held import TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.loading.call import Asked, match_of_call
from kvstore_client.lookup import calls
from kvstore_client.planes.shared_memory import placed
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.controller.fetches.fetch import PLACES_MAX
from kvstore.errors import DataLoss, Exhausted, InvalidRequest
from kvstore.handoff.messages import Redeemed
from kvstore.spec import Exactness
from kvstore.v1 import cache_pb2 as pb
from tests.server.raw import eventually
from tests.specs import random_cache, same, small_spec, tokens_of

SPEC = small_spec()
COUNT = 56
"""Three whole chunks, and a partial one."""


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "8 MiB") as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, timeout_s=5.0) as connected:
        yield connected


def held(client: Client, seed: int, readers: int = 1, count: int = COUNT) -> tuple[bytes, list]:
    """Store a context, and return a ticket for all of it, and its cache."""
    tokens, cache = tokens_of(count, seed), random_cache(SPEC, count, seed)
    receipt = client.store(SPEC, tokens, cache)
    receipt.wait(10)
    match = client.lookup(SPEC, tokens, hold=True, readers=readers)
    assert match.ticket is not None
    assert match.prefix_token_count == count, receipt.reason
    return match.ticket, cache


def fetched(client: Client, ticket: bytes, **options: object) -> list:
    transfer = client.start_fetch(ticket, **options)
    transfer.wait(10)
    return [transfer.wait_layer(layer) for layer in transfer.layers]


def streams(client: Client) -> int:
    """The number of Fetch calls that this client's sidecar has answered."""
    return client.stats().counters["fetch_calls"]


class NoCall:
    """Fails a client's Fetch calls."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        session = client.connect_now()

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a call")

        monkeypatch.setattr(session, "open_prefix", refuse)


def test_it_needs_no_call_and_counts_as_a_fetch(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, cache = held(client, 1, readers=2)
    before = client.stats().counters
    NoCall(client, monkeypatch)
    assert same(fetched(client, ticket, verify=True), cache)
    assert same(fetched(client, ticket, heads=(1, 2)), [tuple(each[1:2] for each in pair) for pair in cache])
    eventually(lambda: not client.stats().sessions.ticket_count)
    after = client.stats().counters
    for name, count in {"fetch_calls": 2, "fetch_hit_chunks": 8, "tickets_redeemed": 2, "fetch_miss_chunks": 0}.items():
        assert after[name] - before[name] == count, name
    assert after["fetch_bytes"] > before["fetch_bytes"]


def test_a_worker_that_never_used_the_model_needs_no_call_either(sidecar: Sidecar, client: Client) -> None:
    ticket, cache = held(client, 12)
    with connect(sidecar.address, timeout_s=2.0) as worker:
        worker.connect_now()
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            assert same(fetched(worker, ticket), cache)
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)


def test_a_chunk_that_left_takes_a_call_that_says_so(sidecar: Sidecar, client: Client) -> None:
    ticket, _ = held(client, 2)
    client.release_ticket(ticket)
    with connect(sidecar.address) as other:
        for seed in range(50, 54):  # memory has room for one of them
            other.store(SPEC, tokens_of(500 * 16, seed), random_cache(SPEC, 500 * 16, seed)).wait(20)
    with pytest.raises(InvalidRequest, match="released"):
        fetched(client, ticket)


def test_a_chunk_that_leaves_under_the_copy_is_a_loss(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, _ = held(client, 3)
    monkeypatch.setattr(placed.PlacedPrefix, "_is_current", lambda self, slot, generation: not self._on_closed)
    with pytest.raises(DataLoss, match="lost while layer 0"):
        fetched(client, ticket)


def test_another_chunk_at_the_place_is_not_taken(client: Client) -> None:
    """Tickets travel through other hands: their places are believed only as far as they can be checked."""
    (one, cache), (two, _) = held(client, 4), held(client, 5)
    other = TicketFields(two)
    wrong = []
    for change in range(8):
        ticket = pb.HeldPrefix.FromString(one)
        place = ticket.places[1]
        if change == 0:
            place.CopyFrom(other.places[1])
        elif change == 1:
            place.generation += 1
        elif change == 2:
            place.generation_slot = 1 << 31
        elif change == 3:
            place.extents[0].offset += 4096
        elif change == 4:
            place.extents[0].region = 99
        elif change == 5:
            place.index = 2
        else:
            place.token_count = 7 if change == 6 else 17
        wrong.append(ticket)
    wrong.append(pb.HeldPrefix.FromString(one))
    del wrong[-1].places[2:]
    for ticket in wrong:
        assert placed.placed_prefix(*_asked(client, ticket.SerializeToString())) is None
    assert placed.placed_prefix(*_asked(client, one)) is not None
    assert same(fetched(client, wrong[0].SerializeToString()), cache), "the call decides"
    client.release_ticket(two)


def _asked(client: Client, ticket: bytes) -> tuple:
    fields = TicketFields(ticket)
    return client.connect_now(), Wanted.of(fields.spec, None, None, (), False), fields, lambda: None


def test_whatever_byte_of_a_ticket_changes_its_places_are_right_or_not_taken() -> None:
    """Two regions have room for a chunk and a half each, so that the third chunk lies in both."""
    settings = {"KVSTORE__ARENA__REGION_BYTES": "20 KiB", "KVSTORE__LIMITS__TICKET_BYTES_MAX": "40 KiB"}
    with (
        Sidecar("--capacity", "40 KiB", environment={**os.environ, **settings}) as sidecar,
        connect(sidecar.address) as client,
    ):
        sidecar.wait_prefaulted()  # both regions are there
        ticket, cache = held(client, 10, count=48)
        right = _places_of(client, ticket)
        assert [len(extents) for _, _, extents in right] == [1, 1, 2]
        for position in range(len(ticket)):
            for change in (1, 8, 16, 32, 64, 255):
                altered = bytearray(ticket)
                altered[position] ^= change
                try:
                    assert _places_of(client, bytes(altered)) in (None, right), (position, change)
                except InvalidRequest:
                    pass  # no ticket any more, and said so
        assert same(fetched(client, ticket, verify=True), cache)


def _places_of(client: Client, ticket: bytes) -> list | None:
    """Return (slot, generation, the places of its extents) of each chunk that is taken for the ticket's."""
    found = placed.placed_prefix(*_asked(client, ticket))
    if found is None:
        return None
    return [
        (each.slot, each.generation, [(part.ctypes.data, part.size) for part in each.extents]) for each in found.chunks
    ]


def test_places_of_an_earlier_start_are_not_believed() -> None:
    """The same chunks lie at the same places after a restart, under other generations."""
    with Sidecar("--capacity", "8 MiB", nvme="64 MiB") as sidecar, connect(sidecar.address) as client:
        tokens, cache = tokens_of(COUNT, 6), random_cache(SPEC, COUNT, 6)
        assert client.store(SPEC, tokens, cache).wait(10) is Durability.LOCAL
        old = client.lookup(SPEC, tokens, hold=True).ticket
        assert len(TicketFields(old).places) == 4
        sidecar.stop(kill=True)
        sidecar.start()
        assert same(client.fetch(SPEC, tokens), cache)
        new = client.lookup(SPEC, tokens, hold=True).ticket
        ours, theirs = TicketFields(new).places, TicketFields(old).places
        assert {each.generation for each in ours}.isdisjoint(each.generation for each in theirs)
        with pytest.raises(InvalidRequest):
            fetched(client, old)
        assert same(fetched(client, new), cache)


def test_a_reader_that_is_dropped_redeems(client: Client) -> None:
    ticket, _ = held(client, 7)
    transfer = client.start_fetch(ticket)
    del transfer
    eventually(lambda: not client.stats().sessions.ticket_count)


def test_a_sidecar_that_takes_no_packets_hears_later_that_a_ticket_is_redeemed(
    sidecar: Sidecar, client: Client
) -> None:
    ticket, cache = held(client, 11)
    before, session = client.stats().counters["tickets_redeemed"], client.connect_now()
    assert isinstance(session, MappedSession)
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        while session._say(Redeemed("00" * 16)):
            pass  # until the socket takes no more
        assert same(fetched(client, ticket), cache)
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    eventually(lambda: client.stats().counters["tickets_redeemed"] == before + 1)


def test_many_chunks_take_a_call() -> None:
    with Sidecar("--capacity", "8 MiB") as sidecar, connect(sidecar.address) as client:
        ticket, cache = held(client, 8, count=16 * (PLACES_MAX + 1))
        assert not TicketFields(ticket).places
        assert same(fetched(client, ticket), cache)


def test_a_sidecar_that_names_no_places_is_called(client: Client) -> None:
    ticket, cache = held(client, 9)
    message = pb.HeldPrefix.FromString(ticket)
    message.ClearField("places")
    before = streams(client)
    assert same(fetched(client, message.SerializeToString()), cache)
    assert streams(client) == before + 1


class Calls:
    """Counts a client's Lookup calls. The first ends as told, if it is told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *first: pb.LookupResponse | Exhausted) -> None:
        call, self.count, said = calls._call, 0, list(first)

        def counted(*arguments: object) -> pb.LookupResponse:
            self.count += 1
            answer = said.pop() if said else call(*arguments)  # type: ignore[arg-type]  # passed on
            if isinstance(answer, Exhausted):
                raise answer
            return answer

        monkeypatch.setattr(calls, "_call", counted)


def behind_a_partial_chunk(client: Client, seed: int) -> np.ndarray:
    """Store a context, and return a longer prompt: its last whole chunk begins with the stored partial one."""
    held(client, seed)
    eventually(lambda: bool(client.peek(SPEC, tokens_of(COUNT, seed))))  # shared memory shows it
    return np.concatenate([tokens_of(COUNT, seed), tokens_of(30, seed + 1)])


def test_a_partial_chunk_is_held_by_one_call(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = behind_a_partial_chunk(client, 80)
    made = Calls(monkeypatch)
    match = client.lookup(SPEC, asked, hold=True)
    assert (match.prefix_token_count, made.count) == (COUNT, 1)
    assert match.ticket is not None
    assert same(fetched(client, match.ticket), random_cache(SPEC, COUNT, 80))


def test_what_is_not_stored_behind_a_held_partial_chunk_is_counted(client: Client) -> None:
    """The call that holds the hits names nothing else."""
    asked, presence = behind_a_partial_chunk(client, 88), client.connect_now().presence
    assert presence is not None

    def counted() -> list[int]:
        counters = client.stats().counters
        return [counters[name] for name in ("lookup_calls", "lookup_hit_chunks", "lookup_miss_chunks")]

    presence.tell()
    eventually(lambda: not presence._counts)
    before = counted()
    client.lookup(SPEC, asked, hold=True)
    presence.tell()
    eventually(lambda: [now - then for now, then in zip(counted(), before, strict=True)] == [1, 4, 3])


def test_who_peeks_to_hold_is_told_to_call(client: Client) -> None:
    """Also where a partial chunk follows that is not the prompt's."""
    behind_a_partial_chunk(client, 86)
    asked = np.concatenate([tokens_of(48, 86), tokens_of(30, 87)])
    seen = client.peek(SPEC, asked)
    assert seen is not None
    assert seen.prefix_token_count == 48
    assert client.peek(SPEC, asked, hold=True) is None


@pytest.mark.parametrize("first", [pb.LookupResponse(hit_count=3), Exhausted("no room")], ids=["left", "no room"])
def test_whole_chunks_are_held_without_the_partial_one(
    client: Client, monkeypatch: pytest.MonkeyPatch, first: pb.LookupResponse | Exhausted
) -> None:
    """It left since shared memory showed it, or there is no room to hold it, too."""
    asked = behind_a_partial_chunk(client, 82)
    made = Calls(monkeypatch, first)
    match = client.lookup(SPEC, asked, hold=True)
    assert (match.prefix_token_count, made.count) == (48, 2)
    assert match.ticket is not None
    whole = [tuple(half[:, :48] for half in layer) for layer in random_cache(SPEC, COUNT, 82)]
    assert same(fetched(client, match.ticket), whole)


def test_a_plans_ticket_names_places(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, cache = held(client, 84, count=48)
    client.release_ticket(ticket)
    asked = Prompt.of(SPEC, np.concatenate([tokens_of(48, 84), tokens_of(30, 85)]), (), Exactness.EXACT)
    call = client.planner.begin(asked, Asked(48, 0, (), "off"))
    assert call is not None
    with call:
        match = match_of_call(client._context, asked, call)
        assert match.ticket is not None
        NoCall(client, monkeypatch)
        assert same(fetched(client, match.ticket), cache)
