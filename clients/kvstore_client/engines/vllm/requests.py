"""Requests as the scheduler's side knows them: the lookups of those that wait, and the blocks of all."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.spec import ModelSpec
from kvstore_client.engines.vllm.documents import NamedDocuments
from kvstore_client.engines.vllm.objects import EngineRequest
from kvstore_client.engines.vllm.planning import Decision
from kvstore_client.lookup.match import Match


@dataclass(frozen=True)
class PrefixAnswer:
    """The answer to a lookup. ``match``: the chunks that are held, which may be fewer than the ``stored`` tokens where
    a decision says so. ``refusal``: why the service holds nothing more now."""

    match: Match
    stored: int
    decision: Decision | None = None
    refusal: str = ""


NOTHING = PrefixAnswer(Match(0, (), is_answered=False), 0)
"""The answer to a lookup that failed: nobody says what is stored."""


@dataclass
class PrefixLookup:
    """A lookup in flight. ``is_alone``: no other request of ours held anything when it was asked, nor since then.
    ``begun_s``: when a thread of ours began it. ``took_s``: the seconds that the engine's loop took to ask, and waited
    for the answer."""

    useful: int
    since_s: float
    is_alone: bool
    answer: Future[PrefixAnswer] = field(default_factory=Future)
    begun_s: float | None = None
    took_s: float = 0.0


@dataclass
class FoundPrefix:
    """The answer for a waiting request. ``stop``: the end of the tokens to load, at most the ``useful`` tokens."""

    match: Match
    useful: int
    stop: int
    at_s: float
    decision: Decision | None = None
    computed: int = 0
    is_mended: bool = False
    """True where the prompt is computed over its documents, not loaded."""


@dataclass
class TrackedRequest:
    """A request with blocks worth keeping, now or later. ``block_ids``: by group of layers, as they were given, also
    those that have left a window since. ``kept``: leading tokens that are stored, or of which nothing more is kept;
    ``promised``: those of them that are stored, or are being saved.
    ``held``: the chunks that it was given to load. ``was_cut``: a worker could not load some of its blocks.
    ``documents``: those over whose caches it may be computed. ``preamble``: the tokens before the document that its
    prompt is, which is kept by itself; None: it is none.
    ``refused_s``: when it could first hold nothing, for want of room; it is not looked up again before
    ``look_again_s``. ``prefilled``: leading tokens that another engine keeps, or is about to, which are waited for
    until ``prefilled_until_s``; None before the first look."""

    request: EngineRequest
    spec: ModelSpec
    block_ids: list[list[int]]
    kept: int = 0
    promised: int = 0
    held: Match = NOTHING.match
    has_failed: bool = False
    is_doubtful: bool = False
    was_cut: bool = False
    refused_s: float | None = None
    look_again_s: float = float("-inf")
    prefilled: int = 0
    prefilled_until_s: float | None = None
    documents: NamedDocuments | None = None
    preamble: int | None = None
