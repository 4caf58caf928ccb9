"""Lookups without a call: what a session reads of the sidecar's presence table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.presence import NEWS_MASK, RETIRED, STATE_MASK, TAILS, Words, find, pack_news, tags_of, unpack_news
from kvstore.seams import Clock, SystemClock
from kvstore.seams.mapping import SharedMap, closing_all
from kvstore.spec import ChunkState, MissReason
from kvstore.v1 import cache_pb2 as pb

TELL_INTERVAL_S = 1.0
_STATE, _BUT_TAILS = np.uint64(STATE_MASK), np.uint64(NEWS_MASK - TAILS)
_COLD = np.uint64(pack_news(ChunkState.MISS, reason=MissReason.COLD))

Exchange = Callable[[dict[str, Any]], tuple[dict[str, Any], list[int]]]


@dataclass(frozen=True, slots=True)
class Run:
    """As the wire's ChunkRun."""

    count: int
    state: int
    tier: int
    encoding: int
    reason: int


class Answer(NamedTuple):
    """As the wire's LookupResponse, of a lookup that holds nothing. ``has_tails``: partial chunks hang on the last
    hit; only a call tells which."""

    hit_count: int
    runs: Sequence[Run]
    has_tails: bool
    tails: Sequence[pb.PartialTail] = ()
    ticket: bytes = b""
    segments: Sequence[Answer] = ()


class Chain(NamedTuple):
    """What is asked for: digests of one namespace, each of a chunk of at most ``chunk_tokens`` tokens."""

    salt: int
    digests: Sequence[bytes]
    chunk_tokens: int


class Presence:
    """One session's view of the table. Safe to share between threads.

    The sidecar counts what is looked up, and is told of it by packets that it does not answer, one a second at most.
    """

    def __init__(self, exchange: Exchange, send: Callable[[dict[str, Any]], bool], clock: Clock | None = None) -> None:
        """``send``: without waiting; whether it was taken."""
        self._exchange = exchange
        self._send = send
        self._clock = clock or SystemClock()
        self._mapping, self._counting = threading.Lock(), threading.Lock()
        self._words: Words | None = None
        self._token_count_max = 0
        self._is_offered = True
        self._counts = [0, 0, 0]
        self._told_s = self._clock.monotonic() - TELL_INTERVAL_S

    def find(self, salt: int, digests: Sequence[bytes]) -> NDArray[np.uint64] | None:
        """The news of each chunk by itself, as the table has them. None when only a call can tell."""
        tags = tags_of(salt, b"".join(digests))
        while self._is_offered:
            words = self._words
            if words is None:
                words = self._map()
                if words is None:
                    break
            news = find(words, tags)
            if news is not None:
                return news
            if not int(words[0]) & RETIRED:
                break
            with self._mapping:
                if self._words is words:
                    self._words = None
        return None

    def look_up(self, chains: Sequence[Chain], is_enough: Callable[[Answer], bool]) -> list[Answer] | None:
        """What a lookup of each chain says. None when only a call can tell, or what the first chain's says is not
        enough."""
        answers = []
        for chain in chains:
            found = self.find(chain.salt, [ROOT_DIGEST, *chain.digests])
            if found is None:
                return None
            answers.append(answer_of(found))
        if not is_enough(answers[0]):
            return None
        if sum(max(1, (len(each.digests) - 1) * each.chunk_tokens) for each in chains) > self._token_count_max:
            return None  # the sidecar refuses it, and says which limit
        hits = sum(answer.hit_count for answer in answers)
        self._count(len(chains), hits, sum(len(each.digests) for each in chains) - hits)
        return answers

    def holds(self, salt: int, digests: Sequence[bytes]) -> list[bool] | None:
        """Which chunks are there, each by itself. None when only a call can tell."""
        found = self.find(salt, digests)
        if found is None:
            return None
        held: list[bool] = (found & _STATE == ChunkState.HIT).tolist()
        self._count(1, sum(held), len(held) - sum(held))
        return held

    def _map(self) -> Words | None:
        """The table that is in use. None of a sidecar that has none to offer."""
        with self._mapping:
            if self._words is None:
                try:
                    reply, descriptors = self._exchange({"op": "presence"})
                except InvalidRequest:
                    self._is_offered = False  # an earlier release
                    return None
                with closing_all(descriptors):
                    self._words = SharedMap(descriptors[0], reply["bytes"], writable=False).bytes.view("u8")
                self._token_count_max = int(reply["token_count_max"])
            return self._words

    def _count(self, calls: int, hits: int, misses: int) -> None:
        with self._counting:
            for place, count in enumerate((calls, hits, misses)):
                self._counts[place] += count
            is_due = self._clock.monotonic() - self._told_s >= TELL_INTERVAL_S
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Let the sidecar count what was looked up since it was told last."""
        with self._counting:
            calls, hits, misses = self._counts
            self._told_s = self._clock.monotonic()
            if calls and self._send({"op": "looked_up", "calls": calls, "hits": hits, "misses": misses}):
                self._counts = [0, 0, 0]

    def close(self) -> None:
        """Let go of the table."""
        self._words, self._is_offered = None, False


def answer_of(found: NDArray[np.uint64]) -> Answer:
    """``found``: the news of the root, and of each chunk. As the sidecar's catalog walks: a chunk behind one that is
    missing is no hit."""
    states = found & _STATE
    states[0] = ChunkState.HIT
    hits = int((states != ChunkState.HIT).argmax()) - 1
    if hits < 0:  # none is missing
        hits = found.size - 1
    news = found[1:] & _BUT_TAILS
    behind = news[hits:]
    behind[(states[1 + hits :] == ChunkState.HIT) | (behind == 0)] = _COLD
    starts = [0, *(np.flatnonzero(news[1:] != news[:-1]) + 1).tolist(), news.size]
    runs = [_run(stop - start, int(news[start])) for start, stop in pairwise(starts) if start < stop]
    return Answer(hits, runs, unpack_news(int(found[hits])).has_tails)


def _run(count: int, news: int) -> Run:
    said = unpack_news(news)
    return Run(count, said.state, said.tier, said.encoding, said.reason)
