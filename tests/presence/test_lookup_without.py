"""Lookups beside a sidecar that went, stands still, is of another release, or shows less than it has."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Durability, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.handoff import passing
from kvstore.handoff.messages import Answer, PresenceAnswer
from kvstore.handoff.packets import decode_answer
from kvstore.keys import chain_digests, fingerprint, presence_salt
from kvstore.presence import HEADER_WORDS, PARTIAL, pack_news, slot_count_of, tag_of
from kvstore.spec import ChunkState, Encoding, Exactness, MissReason, Provenance, Tier
from tests.presence.looking import STEP, agreed, by_call, looking, no_calls
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of


def test_a_restarted_sidecar_shows_what_its_device_has(tmp_path: Any) -> None:
    spec, tokens = small_spec(model_id="again"), tokens_of(4 * STEP + 3)
    other = small_spec(model_id="again", chunk_tokens=32)
    document = tokens[:STEP]
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with looking(sidecar) as client:
            assert client.store(spec, tokens, random_cache(spec, len(tokens))).wait() is Durability.LOCAL
            assert client.store_segment(spec, document, random_cache(spec, len(document))).wait() is Durability.LOCAL
            client.put_bytes("again", "key", b"value").wait()
            seen = agreed(client, spec, tokens)
        for kill in (False, True):
            sidecar.stop(kill=kill)
            sidecar.start()
            with looking(sidecar) as client:
                assert not client.lookup(other, tokens), "registers another model, and only that"
                match = agreed(client, spec, tokens, segments=[(0, STEP)])
                assert match.prefix_token_count == seen.prefix_token_count == tokens.size
                assert {chunk.tier for chunk in match.chunks} == {Tier.NVME}
                assert match.segments[0].is_whole
                longer = np.concatenate([tokens, tokens_of(40, seed=5)])
                assert agreed(client, spec, longer).prefix_token_count == tokens.size, "tails, too"
                assert client.exists("again", ["key", "none"]) == [True, False]
                assert client.fetch(spec, tokens).token_count == tokens.size


def test_a_killed_sidecar_has_nothing(own_sidecar: Sidecar) -> None:
    """What the table said last is not believed any more."""
    spec, tokens = small_spec(model_id="killed"), tokens_of(2 * STEP)
    with looking(own_sidecar) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.lookup(spec, tokens)
        session = client.connect_now()
        os.kill(own_sidecar.pid, signal.SIGKILL)
        eventually(lambda: not session.is_usable)
        match = client.lookup(spec, tokens)
        assert (match.prefix_token_count, match.chunks[0].reason) == (0, MissReason.UNAVAILABLE)
        with pytest.raises(Unavailable):
            client.connect_now()


def test_a_killed_sidecar_has_nothing_before_anybody_noticed(own_sidecar: Sidecar) -> None:
    """The session's watcher may be slow to wake: what a dead sidecar's table says is not believed meanwhile."""
    spec, tokens = small_spec(model_id="just killed"), tokens_of(2 * STEP)
    with looking(own_sidecar) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        client.store_segment(spec, tokens, random_cache(spec, len(tokens))).wait()
        client.put_bytes("killed", "key", b"value").wait()
        session = client.connect_now()
        end, session.close = session.close, lambda: None
        try:
            own_sidecar.stop(kill=True)
            assert session.is_usable, "the watcher's news would make this test of nothing"
            match = client.lookup(spec, tokens, segments=[(0, STEP)])
            assert (match.prefix_token_count, match.chunks[0].reason) == (0, MissReason.UNAVAILABLE)
            assert not match.segments[0].is_whole
            assert client.peek(spec, tokens) is None
            assert client.exists("killed", "key") is False
            assert client.fetch(spec, tokens_of(STEP, seed=9)).reason is MissReason.UNAVAILABLE
        finally:
            del session.close
            end()


def test_an_earlier_sidecar_is_called(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that offers no table is not asked for it."""
    spec, tokens = small_spec(model_id="earlier"), tokens_of(2 * STEP)

    def earlier(packet: bytes) -> Answer:
        said = json.loads(packet)
        assert said.pop("offers") == ["presence", "uses"]
        return decode_answer(json.dumps(said).encode())

    monkeypatch.setattr(passing, "decode_answer", earlier)
    with connect(sidecar.address) as client:
        monkeypatch.undo()
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.connect_now().presence is None
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP


def test_a_table_that_cannot_be_had_leaves_calls(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tokens = small_spec(model_id="unmapped"), tokens_of(2 * STEP)

    def refuse(*args: Any, **how: Any) -> Any:
        raise Unavailable("cannot map: ulimit -v")

    with connect(sidecar.address) as client:
        session = client.connect_now()
        eventually(lambda: session.presence.is_there)
        monkeypatch.setattr("kvstore_client.lookup.presence.SharedMap", refuse)
        session.presence._words = None
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
        session.presence.take(PresenceAnswer(4096, 1, 0), [])
        assert client.fetch(spec, tokens).token_count == 2 * STEP
        monkeypatch.undo()
        session.presence._asked_s = 0.0
        client.lookup(spec, tokens)
        eventually(lambda: session.presence.is_there)


def test_a_sidecar_that_stands_still_is_not_waited_for(own_sidecar: Sidecar) -> None:
    """What its table says stands; and without the table a lookup ends with its time."""
    spec, tokens = small_spec(model_id="still"), tokens_of(2 * STEP)
    with connect(own_sidecar.address, timeout_s=1.0) as client:
        client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
        session = client.connect_now()
        eventually(lambda: session.presence.is_there)
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
            session.presence._words = None
            assert client.lookup(spec, tokens).chunks[0].reason is MissReason.UNAVAILABLE
            assert session.is_usable, "the session goes on when the sidecar does"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
        eventually(lambda: session.presence.is_there)


def test_a_sidecar_that_looks_up_one_chain_at_a_time(client: Client) -> None:
    """As the first ones of this contract did: of keys in one call it says the first's."""
    for name in "ac":
        client.put_bytes("one-by-one", name, b"value").wait()
    session = client.connect_now()
    real = session.cache.Lookup

    def first_alone(request: Any, **how: Any) -> Any:
        reply = real(request, **how)
        del reply.segments[:]
        return reply

    with by_call(client), pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.cache, "Lookup", first_alone)
        assert client.exists("one-by-one", ["a", "b", "c"]) == [True, False, True]
        assert client.count_leading("one-by-one", ["a", "c", "b"]) == 2


def test_a_table_that_does_not_hold_all_still_says_what_is_there(client: Client) -> None:
    spec, tokens = small_spec(model_id="partial"), tokens_of(3 * STEP)
    client.store(spec, tokens, random_cache(spec, len(tokens))).wait()
    client.put_bytes("partial", "key", b"value").wait()
    presence = client.connect_now().presence
    words = presence._words.copy()
    words[0] = PARTIAL
    presence._words = words
    with no_calls(client):
        assert client.lookup(spec, tokens).prefix_token_count == 3 * STEP
        assert client.exists("partial", "key")
    longer = np.concatenate([tokens, tokens_of(STEP, seed=2)])
    for asked in (longer, tokens_of(STEP, seed=2)):
        assert client.peek(spec, asked) is None
        assert agreed(client, spec, asked).prefix_token_count == (3 * STEP if asked is longer else 0)
    assert client.exists("partial", ["key", "none"]) == [True, False]


def test_a_peek_waits_for_nobody(sidecar: Sidecar, client: Client) -> None:
    """Where a lookup would connect, name the model, or hold, it says that it cannot tell."""
    spec, tokens = small_spec(model_id="peek"), tokens_of(3 * STEP)
    assert client.peek(spec, tokens) is None, "the sidecar does not know the model yet"
    client.store(spec, tokens[: 2 * STEP], random_cache(spec, 2 * STEP)).wait()
    with no_calls(client):
        assert client.peek(spec, tokens) == client.lookup(spec, tokens)
        assert client.peek(spec, tokens, hold=True) is None
        assert client.peek(spec, tokens_of(STEP, seed=4), hold=True) == client.lookup(spec, tokens_of(STEP, seed=4))
        assert client.peek(spec, []) == client.lookup(spec, [])
    with connect(sidecar.address) as other:
        other.connect_now().close()
        assert other.peek(spec, tokens) is None, "it is not connected"


def test_a_chunk_the_table_has_and_the_catalog_has_not_is_a_miss(client: Client) -> None:
    """A tag is not a name: the fetch that follows brings less, and nothing wrong."""
    spec, tokens = small_spec(model_id="false"), tokens_of(2 * STEP)
    client.store(spec, tokens[:STEP], random_cache(spec, len(tokens[:STEP]))).wait()
    assert client.lookup(spec, tokens).prefix_token_count == STEP
    presence = client.connect_now().presence
    words = presence._words.copy()
    salt = presence_salt(fingerprint(spec, spec.kind), Provenance.IN_CONTEXT, Exactness.EXACT)
    tag = tag_of(salt, chain_digests(tokens, STEP)[1])
    place = HEADER_WORDS + (tag >> 12 & slot_count_of(words) - 1)
    words[place] = tag | pack_news(ChunkState.HIT, Tier.DRAM, Encoding.RAW)
    presence._words = words
    assert client.lookup(spec, tokens).prefix_token_count == 2 * STEP
    assert client.fetch(spec, tokens).token_count == STEP
    held = client.lookup(spec, tokens, hold=True)
    assert held.prefix_token_count == STEP, "what is held was asked for"
    client.release_ticket(held.ticket)
