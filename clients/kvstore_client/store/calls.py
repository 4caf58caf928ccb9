"""Calls for stores: of a whole context, and of one written layer by layer, by one process or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.spec import LEVELS, Durability, Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Layer, Tensor
from kvstore_client.context import Context
from kvstore_client.copying import COPY_THREADS, commit_beside
from kvstore_client.fetch.paged import Paged
from kvstore_client.fetch.ticket import TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.tails import superseded
from kvstore_client.prompt import EXACTNESSES, Prompt, check_count
from kvstore_client.store.pages import PagesSource
from kvstore_client.store.receipt import Outcome, Receipt, Settle, Settling
from kvstore_client.store.store import Store, ask_settled, beyond, reserve_request
from kvstore_client.store.tensors import Tensors
from kvstore_client.store.writer import ReservedChunks, StoreWriter


def check_durability(durability: Durability | None) -> None:
    """Raise InvalidRequest for anything but a level. The sidecar tells later if a tier gives that level."""
    if durability is not None and durability not in LEVELS:
        raise InvalidRequest(f"durability {durability!r}: use one of {', '.join(level.name for level in LEVELS)}")


def _goes_at_once(durability: Durability | None) -> bool:
    """True when the sidecar should begin while the caller's bytes are copied: somebody waits for a level beyond memory,
    and it has processors of its own. On two it only took the caller's: 7 ms longer for him, durable 2 ms sooner, of 60.
    Where it had one for itself, the device had 256 MiB after 55 ms, not 68."""
    waits = durability is not None and durability > Durability.MEMORY
    return waits and (os.cpu_count() or 1) > COPY_THREADS


def _gone(why: str) -> Outcome:
    return Outcome(dict.fromkeys(LEVELS, why), True, is_answered=False)


def _asked_nobody(why: str) -> Settling:
    answered: Future[None] = Future()
    answered.set_result(None)
    return Settling(answered, partial(_gone, why))


def settle_of(
    context: Context, prompt: Prompt, hidden_layers: tuple[int, ...], durability: Durability | None
) -> Settle | None:
    """Return a receipt's way to ask for the levels beyond memory; None where nobody wants to know."""
    if durability is Durability.MEMORY:
        return None
    wanted, step = durability or Durability.LOCAL, prompt.spec.chunk_tokens

    def ask(token_count: int, wait_s: float) -> Settling:
        with context.or_miss() as miss:
            session, name = context.ready(prompt.spec)
            query = prompt.query(name, prompt.digests[: -(-token_count // step)], hidden_layers)
            request = pb.Settle(query=query, timeout_seconds=wait_s, durability=int(beyond(wanted)))  # type: ignore[arg-type]  # the stubs want enum values, the wire takes ints
            asked = ask_settled(session, request, token_count, step, context.timeout_s)
            return asked._replace(outcome=partial(_answered, context, asked))
        return _asked_nobody(miss.why)

    return Settle(wanted, ask)


def _answered(context: Context, asked: Settling) -> Outcome:
    with context.or_miss() as miss:
        return asked.outcome()
    return _gone(miss.why)


def keep(
    context: Context, prompt: Prompt, kv: Sequence[Layer] | Paged, hidden: Mapping[int, Tensor] | None,
    durability: Durability | None,
) -> Receipt:  # fmt: skip
    """See ``Client.store``."""
    check_durability(durability)
    if not prompt.digests:
        raise InvalidRequest("tokens is empty: there is nothing to store")
    source: Tensors | PagesSource
    source = PagesSource.of(prompt, kv, hidden) if isinstance(kv, Paged) else Tensors.of(prompt, kv, hidden)
    try:
        with context.or_miss() as miss:
            session, name = context.ready(prompt.spec)
            store = Store(session, source, context, at_once=_goes_at_once(durability))
            store.stage(reserve_request(name, prompt, source.hidden_layers, durability=durability), prompt)
            settle = settle_of(context, prompt, source.hidden_layers, durability)
            return Receipt(commit_beside(context.committer, store.commit, store.abort, waits=store.waits), settle)
    except Exhausted as error:
        context.count("stores_refused")
        return Receipt.nothing(error.message)
    return Receipt.nothing(miss.why)


def start_store(
    context: Context, prompt: Prompt, hidden_layers: Sequence[int], shards: int, durability: Durability | None
) -> StoreWriter:
    """See ``Client.start_store``."""
    check_durability(durability)
    if not prompt.digests:
        raise InvalidRequest("tokens is empty: there is nothing to store")
    check_count(shards, "shards")
    hidden = Wanted.of(prompt.spec, (), None, hidden_layers, False).hidden_layers
    reservation = ReservedChunks(
        prompt.spec, prompt.digests, prompt.exactness, prompt.token_count, hidden, shards,
        is_claimed=prompt.is_claimed,
    )  # fmt: skip
    return _writer(
        context,
        reservation,
        0,
        prompt,
        durability,
        lambda name: reserve_request(name, prompt, hidden, shards, durability),
    )


def join(
    context: Context, ticket: bytes, shard: int, durability: Durability | None, exactness: Exactness | None
) -> StoreWriter:  # fmt: skip
    """See ``Client.join_store``."""
    check_durability(durability)
    held = TicketFields(ticket)
    prompt = Prompt.known(held.spec, held.digests, held.exactness)
    reservation = ReservedChunks(
        held.spec, held.digests, held.exactness, held.token_count, held.hidden_layers, held.shards,
        is_claimed=exactness is not None,
    )  # fmt: skip
    if exactness not in (None, EXACTNESSES[prompt.exactness]):
        raise InvalidRequest(f"exactness {exactness}: the store was started as {EXACTNESSES[prompt.exactness]}")
    if not 0 < shard < reservation.shards:
        raise InvalidRequest(f"shard {shard} must be in 1..{reservation.shards - 1}: shard 0 is who started the store")

    def request(name: bytes) -> pb.StoreRequest:
        level = int(beyond(durability))
        return pb.StoreRequest(join=pb.Join(ticket=held.ticket, fingerprint=name, durability=level))  # type: ignore[arg-type]  # as above

    return _writer(context, reservation, shard, prompt, durability, request)


def _writer(
    context: Context, reservation: ReservedChunks, shard: int, prompt: Prompt, durability: Durability | None,
    request: Callable[[bytes], pb.StoreRequest],
) -> StoreWriter:  # fmt: skip
    """Return the writer of a started or joined store. ``request`` makes the call from the model's fingerprint."""
    try:
        with context.or_miss() as miss:
            session, name = context.ready(prompt.spec)
            reply = session.call(session.cache.Store, request(name), context.timeout_s)
            settle = settle_of(context, prompt, reservation.hidden_layers, durability)
            known = reservation.known(reply, partial(superseded, prompt, list(reply.tails)))
            writer = StoreWriter(session, known, shard, context, settle)
            if not session.is_usable:  # it has ended since, and its staging may have been gone just now
                raise Unavailable("the sidecar is gone")
            return writer
    except Exhausted as error:
        context.count("stores_refused")
        return StoreWriter(None, reservation, shard, context, None, error.message)
    return StoreWriter(None, reservation, shard, context, None, miss.why)
