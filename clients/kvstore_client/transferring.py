"""The client's calls for fetches that run beside the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvstore.keys import Extra
from kvstore.spec import Exactness, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.connection import Connection
from kvstore_client.fetching import AnyPrefix, LayerStream
from kvstore_client.paged import Paged
from kvstore_client.prefix import AnySession
from kvstore_client.prompt import EXACTNESSES, Prompt
from kvstore_client.target import Places, given_places, target_of
from kvstore_client.transfer import Held, Transfer, open_held
from kvstore_client.wanted import Wanted

TICKET_BYTES = 16


class TransferCalls(ABC):
    """What ``Client`` can fetch beside its caller: by ticket, or by tokens."""

    _timeout_s: float
    _connection: Connection

    @abstractmethod
    def _ready(self, spec: ModelSpec) -> tuple[AnySession, bytes]:
        """The client's."""

    @abstractmethod
    def _stream(self, prompt: Prompt, wanted: Wanted, into: Any) -> LayerStream:
        """The client's."""

    @abstractmethod
    def _layers_of(self, prefix: AnyPrefix, wanted: Wanted, given: Places) -> LayerStream:
        """The client's."""

    def start_fetch(
        self,
        ticket: bytes,
        *,
        into: Sequence[Any] | Paged | None = None,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        verify: bool = False,
    ) -> Transfer:
        """Fetch what a ticket holds, beside the caller. Returns at once; failures show in the transfer. The ticket of a
        writer joins its store: layers come as they are put, and count once ``wait`` returns, after its commit.

        Raises: InvalidRequest for a wrong argument."""
        held = Held(ticket)
        wanted = Wanted.of(held.spec, layers, heads, (), verify)
        given = given_places(wanted, into)
        target_of(wanted, held.token_count, given)  # what does not fit is said now
        transfer = Transfer(held.token_count, wanted.layers, exactness=EXACTNESSES[held.exactness])
        transfer.start(lambda: self._redeem(held, wanted, given))
        return transfer

    def start_fetch_prefix(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        into: Sequence[Any] | Paged | None = None,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        hidden_layers: Sequence[int] = (),
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> Transfer:
        """Fetch the longest stored prefix beside the caller, as ``fetch`` does. Returns when the sidecar has said what
        is there: the transfer's ``token_count``, 0 for a miss, and ``reason``. ``hidden_layers``: their E comes behind
        the layers, and only tokens count that have it. Raises: InvalidRequest, Exhausted."""
        prompt = Prompt.of(spec, tokens, extras, exactness)
        return self._started(prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def start_fetch_segment(
        self,
        spec: ModelSpec,
        tokens: Any,
        *,
        into: Sequence[Any] | Paged | None = None,
        layers: Sequence[int] | None = None,
        heads: range | tuple[int, int] | None = None,
        hidden_layers: Sequence[int] = (),
        extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
        verify: bool = False,
    ) -> Transfer:
        """Like ``start_fetch_prefix``, of a document that was computed alone, as ``fetch_segment`` does."""
        prompt = Prompt.segment(spec, tokens, extras, exactness)
        return self._started(prompt, Wanted.of(prompt.spec, layers, heads, hidden_layers, verify), into)

    def _started(self, prompt: Prompt, wanted: Wanted, into: Any) -> Transfer:
        stream = self._stream(prompt, wanted, into)
        how = (wanted.layers, wanted.hidden_layers, stream.reason, stream.exactness)
        transfer = Transfer(stream.token_count, *how)
        try:
            transfer.start(lambda: stream)
        except BaseException:
            stream.close()
            raise
        return transfer

    def _redeem(self, held: Held, wanted: Wanted, given: Places) -> LayerStream:
        session, name = self._ready(held.spec)
        prefix = open_held(session, wanted, name, held, self._timeout_s)
        return self._layers_of(prefix, wanted, given)

    def release_ticket(self, ticket: bytes | None) -> None:
        """Let go of what a ticket holds, when nobody will redeem it. Takes the match's ticket; unknown ones are
        fine."""
        if not ticket:
            return
        identity = ticket if len(ticket) == TICKET_BYTES else Held(ticket).ticket

        def release() -> None:
            session = self._connection.session()
            request = pb.ReleaseRequest(tickets=[identity])
            session.give_back(partial(session.call, session.cache.Release, request, self._timeout_s))

        self._connection.or_gone(release, lambda _: None)
