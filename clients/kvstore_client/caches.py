"""The part of a client that plans and recompute use. They do not import ``Client``, which calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.keys import Extra
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.target import Into
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.fetch.wanted import Heads
from kvstore_client.gate import Gate
from kvstore_client.loading.planner import Planner
from kvstore_client.lookup.match import Match
from kvstore_client.prompt import GivenTokens
from kvstore_client.segments.runs import GivenRun


class Caches(Protocol):
    """Lookups and fetches, as ``Client`` documents them, with the planner and the gate that decide over them."""

    @property
    def plane(self) -> str:
        """The path of the bytes: "local" (shared memory) or "remote" (sent with the calls)."""

    @property
    def planner(self) -> Planner:
        """The planner that decides what is loaded and what is computed."""

    @property
    def gate(self) -> Gate:
        """The gate that allows lossy reuse."""

    def lookup(
        self, spec: ModelSpec, tokens: GivenTokens, *, segments: Sequence[GivenRun] | None = None,
        preamble: GivenTokens = (), hold: bool = False, readers: int = 1, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match:  # fmt: skip
        """See ``Client.lookup``."""

    def peek(
        self, spec: ModelSpec, tokens: GivenTokens, *, hold: bool = False, extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT,
    ) -> Match | None:  # fmt: skip
        """See ``Client.peek``."""

    def release_ticket(self, ticket: bytes | None) -> None:
        """See ``Client.release_ticket``."""

    def fetch_layers(
        self, spec: ModelSpec, tokens: GivenTokens, *, layers: Sequence[int] | None = None, heads: Heads | None = None,
        into: Into = None, extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> LayerStream:  # fmt: skip
        """See ``Client.fetch_layers``."""

    def start_fetch(
        self, ticket: bytes, *, into: Into = None, layers: Sequence[int] | None = None, heads: Heads | None = None,
        verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """See ``Client.start_fetch``."""

    def start_fetch_prefix(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), extras: Sequence[Extra] = (),
        exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """See ``Client.start_fetch_prefix``."""

    def start_fetch_segment(
        self, spec: ModelSpec, tokens: GivenTokens, *, into: Into = None, layers: Sequence[int] | None = None,
        heads: Heads | None = None, hidden_layers: Sequence[int] = (), preamble: GivenTokens = (),
        extras: Sequence[Extra] = (), exactness: Exactness = Exactness.EXACT, verify: bool = False,
    ) -> Transfer:  # fmt: skip
        """See ``Client.start_fetch_segment``."""
