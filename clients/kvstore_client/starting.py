"""How writers begin: a store is started by one process, and joined by those of its other shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.errors import Exhausted, InvalidRequest
from kvstore.seams import FaultPoints, Workers
from kvstore.spec import Durability, Exactness, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_from_message
from kvstore_client.connection import Connection
from kvstore_client.copying import Copier, commit_beside
from kvstore_client.prefix import AnySession
from kvstore_client.prompt import EXACTNESSES, Prompt, check_count
from kvstore_client.receipt import Outcome, Receipt, Settle, Settling
from kvstore_client.remote.storing import store_of
from kvstore_client.storing import Source, ask_settled, reserve_request
from kvstore_client.tails import superseded
from kvstore_client.transfer import cut
from kvstore_client.wanted import Wanted
from kvstore_client.writer import Plan, StoreWriter, unpacked


def check_durability(durability: Durability | None) -> None:
    """Raises InvalidRequest for a level that no tier of this release has."""
    if durability not in (None, Durability.MEMORY, Durability.LOCAL):
        raise InvalidRequest(f"durability {durability!r}: this release has MEMORY and LOCAL")


def _gone(why: str) -> Outcome:
    return Durability.NONE, why, True


def _asked_nobody(why: str) -> Settling:
    answered: Future[None] = Future()
    answered.set_result(None)
    return Settling(answered, partial(_gone, why))


@dataclass(frozen=True)
class Means:
    """What a client lends to its stores. ``ready`` gives the session that knows a model, and the model's name."""

    connection: Connection
    ready: Callable[[ModelSpec], tuple[AnySession, bytes]]
    copier: Copier
    committer: Workers
    timeout_s: float

    def settle(self, prompt: Prompt, hidden_layers: tuple[int, ...]) -> Settle:
        """What a receipt asks for the level below memory."""

        def ask(token_count: int, wait_s: float) -> Settling:
            session, name = self.ready(prompt.spec)
            asked = ask_settled(session, name, prompt, hidden_layers, token_count, wait_s, self.timeout_s)
            return asked._replace(outcome=partial(self.connection.or_gone, asked.outcome, _gone))

        def asked(token_count: int, wait_s: float) -> Settling:
            return self.connection.or_gone(partial(ask, token_count, wait_s), _asked_nobody)

        return asked

    def keep(
        self, prompt: Prompt, kv: Sequence[Any], hidden: Mapping[int, Any] | None, durability: Durability | None,
        faults: FaultPoints,
    ) -> Receipt:  # fmt: skip
        """See ``Client.store``."""
        check_durability(durability)
        if not prompt.digests:
            raise InvalidRequest("tokens is empty: there is nothing to store")
        source = Source.of(prompt, kv, hidden)

        def run() -> Receipt:
            session, name = self.ready(prompt.spec)
            store = store_of(session, source, self.copier, faults, self.timeout_s)
            store.stage(name, prompt)
            settle = None if durability is Durability.MEMORY else self.settle(prompt, source.hidden_layers)
            return Receipt(commit_beside(self.committer, store.commit, store.abort, waits=store.waits), settle)

        try:
            return self.connection.or_gone(run, Receipt.nothing)
        except Exhausted as error:
            self.connection.counters["stores_refused"] += 1
            return Receipt.nothing(error.message)

    def start(
        self, prompt: Prompt, hidden_layers: Sequence[int], shards: int, durability: Durability | None
    ) -> StoreWriter:
        """See ``Client.start_store``."""
        check_durability(durability)
        if not prompt.digests:
            raise InvalidRequest("tokens is empty: there is nothing to store")
        check_count(shards, "shards")
        hidden = Wanted.of(prompt.spec, (), None, hidden_layers, False).hidden_layers

        def ask(session: AnySession, name: bytes) -> pb.StoreResponse:
            reply: pb.StoreResponse = session.call(
                session.cache.Store, reserve_request(name, prompt, hidden, shards), self.timeout_s
            )
            return reply

        plan = Plan(
            prompt.spec, prompt.digests, prompt.exactness, prompt.token_count, hidden, shards,
            is_claimed=prompt.is_claimed,
        )  # fmt: skip
        try:
            return self._writer(plan, 0, prompt, durability, ask)
        except Exhausted as error:
            self.connection.counters["stores_refused"] += 1
            return self._nothing(plan, 0, error.message)

    def join(
        self, ticket: bytes, shard: int, durability: Durability | None, exactness: Exactness | None
    ) -> StoreWriter:  # fmt: skip
        """See ``Client.join_store``."""
        check_durability(durability)
        held = unpacked(ticket)
        prompt = Prompt.known(spec_from_message(held.spec), cut(held.digests), int(held.exactness))
        plan = Plan(
            prompt.spec, prompt.digests, prompt.exactness, int(held.token_count), tuple(held.hidden_layers),
            int(held.shards), is_claimed=exactness is not None,
        )  # fmt: skip
        if exactness not in (None, EXACTNESSES.get(prompt.exactness)):
            raise InvalidRequest(f"exactness {exactness}: the store was started as {EXACTNESSES[prompt.exactness]}")
        if not 0 < shard < plan.shards:
            raise InvalidRequest(f"shard {shard} must be in 1..{plan.shards - 1}: shard 0 is who started the store")

        def ask(session: AnySession, name: bytes) -> pb.StoreResponse:
            request = pb.StoreRequest(join=pb.Join(ticket=held.ticket, fingerprint=name))
            reply: pb.StoreResponse = session.call(session.cache.Store, request, self.timeout_s)
            return reply

        try:
            return self._writer(plan, shard, prompt, durability, ask)
        except Exhausted as error:
            self.connection.counters["stores_refused"] += 1
            return self._nothing(plan, shard, error.message)

    def _writer(
        self, plan: Plan, shard: int, prompt: Prompt, durability: Durability | None,
        ask: Callable[[AnySession, bytes], pb.StoreResponse],
    ) -> StoreWriter:  # fmt: skip
        def begin() -> StoreWriter:
            session, name = self.ready(prompt.spec)
            reply = ask(session, name)
            settle = None if durability is Durability.MEMORY else self.settle(prompt, plan.hidden_layers)
            known = plan.known(reply, partial(superseded, prompt, list(reply.tails)))
            return StoreWriter(session, known, shard, self.copier, self.committer, settle, self.timeout_s)

        return self.connection.or_gone(begin, partial(self._nothing, plan, shard))

    def _nothing(self, plan: Plan, shard: int, reason: str) -> StoreWriter:
        return StoreWriter(None, plan, shard, self.copier, self.committer, None, self.timeout_s, reason)
