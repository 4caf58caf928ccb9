"""Lookups without a call: a session reads the sidecar's presence table in shared memory."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, repeat, takewhile
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Unavailable
from kvstore.handoff.messages import (
    COUNTED_MAX,
    FETCHED_BYTES_MAX,
    TOKENS_MAX,
    USED_MAX,
    LookedUp,
    PresenceAnswer,
    PresenceQuestion,
    Question,
)
from kvstore.handoff.passing import check_descriptors
from kvstore.keys import ROOT_DIGEST
from kvstore.presence import (
    NEWS_MASK,
    STATE_MASK,
    TAILS,
    Found,
    FoundFew,
    Words,
    find,
    find_few,
    lengths_bits,
    lengths_tags,
    pack_news,
    tag_of,
    tags_of,
    unpack_news,
)
from kvstore.seams import Clock, SystemClock
from kvstore.seams.mapping import SharedMap, closing_all
from kvstore.spec import ChunkState, MissReason
from kvstore.v1 import cache_pb2 as pb

INTERVAL_S = 1.0
FEW = 12
"""The most chunks that are looked up one by one: for more, numpy's steps cost less."""
_BUT_TAILS_NUMBER, _COLD_NUMBER = NEWS_MASK - TAILS, pack_news(ChunkState.MISS, reason=MissReason.COLD)
_STATE, _BUT_TAILS, _COLD = np.uint64(STATE_MASK), np.uint64(_BUT_TAILS_NUMBER), np.uint64(_COLD_NUMBER)
Seen = TypeVar("Seen", Found, FoundFew)
_log = logging.getLogger("kvstore.client")
_kept_tag = lru_cache(maxsize=4096)(tag_of)
"""Kept, because a prompt that was looked up is fetched next, and prompts share their first chunks."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Same fields as the wire's ChunkRun."""

    count: int
    state: int
    tier: int
    encoding: int
    reason: int


class LookupAnswer(NamedTuple):
    """Same fields as the wire's LookupResponse, for a lookup that holds nothing. ``has_tails``: partial chunks follow
    the last hit; only a call tells which."""

    hit_count: int
    runs: Sequence[StateRun]
    has_tails: bool
    tails: Sequence[pb.PartialTail] = ()
    tail_lengths: bytes = b""
    ticket: bytes = b""
    segments: Sequence[LookupAnswer] = ()
    places: Sequence[pb.ResidentChunk] = ()


class Chain(NamedTuple):
    """The subject of a lookup: digests of one namespace, each of a chunk of at most ``chunk_tokens`` tokens."""

    salt: int
    digests: Sequence[bytes]
    chunk_tokens: int


class ChainName(NamedTuple):
    """The namespace of a chain: its model's fingerprint, and the wire's numbers of its exactness and provenance."""

    fingerprint: bytes
    exactness: int
    provenance: int


class Presence:
    """One session's view of the table. Safe to share between threads. It waits for nothing: while there is no table, or
    a new one is on its way, lookups are calls.

    The sidecar counts lookups too. The client reports them in packets without an answer, at most one a second.
    """

    def __init__(
        self, send: Callable[[Question], bool], is_open: Callable[[], bool], clock: Clock | None = None
    ) -> None:
        """``send``: sends a packet by the hand-off, without waiting; returns True if it was taken. ``is_open``: returns
        True until the sidecar closes the hand-off, as it does when it ends, however it ends."""
        self._send = send
        self._is_open = is_open
        self._clock = clock or SystemClock()
        self._counting = threading.RLock()  # a signal handler may close a client in the midst of a call
        self._words: Words | None = None
        self._token_count_max = self._tail_tokens_max = 0
        self._counts: Counter[str] = Counter()
        self._used: dict[tuple[ChainName, bytes], tuple[int, int]] = {}
        """Per chain up to a digest, the number of its fetches, and the tokens that they brought."""
        self._told_s = self._asked_s = -math.inf
        self._is_closed = False

    def ask(self) -> None:
        """Ask for the table, at most once a second. ``take`` gets it when it comes."""
        now = self._clock.monotonic()
        if not self._is_closed and now - self._asked_s >= INTERVAL_S:
            self._asked_s = now
            self._send(PresenceQuestion())

    def take(self, answer: PresenceAnswer, descriptors: Sequence[int]) -> None:
        """Map the sidecar's table. A table that cannot be mapped is asked for again later."""
        with closing_all(descriptors):
            try:
                check_descriptors(answer, descriptors)
                mapping = SharedMap(descriptors[0], answer.byte_count, writable=False)
            except Unavailable as error:
                _log.warning("kvstore: lookups are calls: %s", error.message)
                return
        self._token_count_max = answer.token_count_max
        self._tail_tokens_max = answer.tail_tokens_max
        self._words = mapping.bytes.view(np.uint64)
        self._asked_s = -math.inf
        if self._is_closed:
            self._words = None

    @property
    def is_there(self) -> bool:
        """True when there is a table to look into."""
        return self._words is not None

    def find(self, salt: int, digests: Sequence[bytes]) -> Found | None:
        """Return the table's news of each chunk by itself. None while there is no table."""
        return self._read(lambda words: find(words, tags_of(salt, b"".join(digests))))

    def _found_each(self, salt: int, digests: Iterable[bytes]) -> FoundFew | None:
        """Return as ``find`` does, for a few chunks."""
        return self._read(lambda words: find_few(words, map(_kept_tag, repeat(salt), digests)))

    def _read(self, look: Callable[[Words], Seen | None]) -> Seen | None:
        """Return what ``look`` finds in the table. None while there is no table of a living sidecar; then ask for
        one."""
        words = self._words
        found = None if words is None else look(words)
        if found is not None and self._is_open():  # a table outlives its writer
            return found
        if self._words is words:  # else a new table has come meanwhile
            self._words = None
        self.ask()
        return None

    def _look_up(self, chain: Chain) -> LookupAnswer | None:
        if len(chain.digests) <= FEW:
            few = self._found_each(chain.salt, (ROOT_DIGEST, *chain.digests))
            if few is None or not (few.is_whole or all(few.news[1:])):
                return None
            answer, is_whole = answer_of_few(tuple(few.news)), few.is_whole
        else:
            last = self._found_each(chain.salt, chain.digests[-1:])
            if last is None or not (last.is_whole or last.news[0]):
                return None  # as below, without a look at all the others
            found = self.find(chain.salt, [ROOT_DIGEST, *chain.digests])
            if found is None or not (found.is_whole or found.news[1:].all()):
                return None
            answer, is_whole = answer_of(found.news), found.is_whole
        # Else only a call tells if partial chunks follow the root.
        return answer if is_whole or answer.hit_count else None

    def look_up(self, chains: Sequence[Chain]) -> list[LookupAnswer] | None:
        """Return the answer for each chain. None when only a call can tell. A caller that then needs no call ``count``s
        it."""
        token_count = 0
        for chain in chains:
            token_count += max(1, (len(chain.digests) - 1) * chain.chunk_tokens)
        if self._words is not None and token_count > self._token_count_max:
            return None  # the call's error names the limit
        answers = []
        for chain in chains:
            answer = self._look_up(chain)
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def answer(self, chains: Sequence[Chain], readers: int) -> LookupAnswer | None:
        """Return the answer for the first chain, with the segments behind it and the lengths of the partial chunks that
        may follow the first; count the lookup. None where only a call can tell. With ``readers`` a call must hold the
        hits, and counts them: the answer is None then, but where partial chunks follow that it may hold, too."""
        seen = self.look_up(chains)
        if seen is None:
            return None
        first = self.with_tails(chains[0], seen[0])
        if first is None:
            return None
        if readers and first.hit_count:
            return first._replace(segments=seen[1:]) if first.tail_lengths else None
        hits = sum(each.hit_count for each in seen)
        misses = sum(len(each.digests) for each in chains) - hits
        self.count(lookup_calls=1, lookup_hit_chunks=hits, lookup_miss_chunks=misses)
        return first._replace(segments=seen[1:])

    def with_tails(self, chain: Chain, seen: LookupAnswer) -> LookupAnswer | None:
        """Return the answer for a chain with the lengths of the partial chunks that may follow its last hit. None when
        only a call can tell."""
        if not seen.has_tails or seen.hit_count == len(chain.digests):
            return seen
        lengths = self._tail_lengths(chain, seen.hit_count)
        return None if lengths is None else seen._replace(tail_lengths=lengths)

    def _tail_lengths(self, chain: Chain, hit_count: int) -> bytes | None:
        """Return the lengths of the partial chunks after the last hit, as bits. None when only a call can tell."""
        words = self._words
        if words is None or chain.chunk_tokens > self._tail_tokens_max:
            return None
        parent = chain.digests[hit_count - 1] if hit_count else ROOT_DIGEST
        found = find(words, lengths_tags(chain.salt, parent, chain.chunk_tokens))
        if found is None or not found.is_whole:
            return None
        bits = lengths_bits(found.news)
        return bits.to_bytes(-(-bits.bit_length() // 8), "little")

    def holds(self, salt: int, digests: Sequence[bytes]) -> list[bool] | None:
        """Return, per chunk, True when it is stored; count the lookup. None when only a call can tell."""
        held = self._held(salt, digests)
        if held is not None:
            self.count(lookup_calls=1, lookup_hit_chunks=sum(held), lookup_miss_chunks=len(held) - sum(held))
        return held

    def _held(self, salt: int, digests: Sequence[bytes]) -> list[bool] | None:
        found = self.find(salt, digests)
        if found is None or not (found.is_whole or found.news.all()):
            return None
        held: list[bool] = (found.news & _STATE == ChunkState.HIT).tolist()
        return held

    def first_held(self, salt: int, digests: Sequence[bytes]) -> int | None:
        """Return the number of the first of these chunks that is stored, from 1 on; 0: none. None when only a call can
        tell."""
        held = self._held(salt, digests)
        return None if held is None else held.index(True) + 1 if True in held else 0

    def use(self, name: ChainName, last: bytes, token_count: int) -> None:
        """Note that the chain up to this digest, of so many tokens, was fetched. The next report tells the sidecar."""
        with self._counting:
            fetch_count, before = self._used.pop((name, last), (0, 0))
            self._used[name, last] = min(fetch_count + 1, COUNTED_MAX), min(before + token_count, TOKENS_MAX)
            if len(self._used) > USED_MAX:  # the sidecar took no packets for a while
                del self._used[next(iter(self._used))]

    def count(self, **counts: int) -> None:
        """Add to the sidecar's counters of these names, with the next report."""
        with self._counting:
            for name, count in counts.items():
                self._counts[name] += count
            is_due = self._clock.monotonic() - self._told_s >= INTERVAL_S or len(self._used) >= USED_MAX
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Report the counts since the last report to the sidecar."""
        with self._counting:
            self._told_s = self._clock.monotonic()
            most = {"fetch_bytes": FETCHED_BYTES_MAX}
            counts, uses = dict(self._counts), dict(self._used)  # a signal handler may tell, too, meanwhile
            told = {name: min(count, most.get(name, COUNTED_MAX)) for name, count in counts.items()}
            used = tuple((name.fingerprint.hex(), *name[1:], last.hex()) for name, last in uses)
            if told and self._send(LookedUp(**told, used=used, used_amounts=tuple(uses.values()))):
                self._counts -= Counter(told)
                self._used.clear()

    def close(self) -> None:
        """Drop the table."""
        self._is_closed, self._words = True, None


def answer_of(found: NDArray[np.uint64]) -> LookupAnswer:
    """Return the answer for ``found``, the news of the root, and of each chunk. It follows the sidecar's catalog: a
    chunk behind a missing one is no hit."""
    states = found & _STATE
    states[0] = ChunkState.HIT
    hits = int((states != ChunkState.HIT).argmax()) - 1
    if hits < 0:  # no chunk is missing
        hits = found.size - 1
    news = found[1:] & _BUT_TAILS
    behind = news[hits:]
    behind[(states[1 + hits :] == ChunkState.HIT) | (behind == 0)] = _COLD
    starts = [0, *(np.flatnonzero(news[1:] != news[:-1]) + 1).tolist(), news.size]
    runs = tuple(_run(stop - start, int(news[start])) for start, stop in pairwise(starts) if start < stop)
    return LookupAnswer(hits, runs, unpack_news(int(found[hits])).has_tails)


@lru_cache(maxsize=1024)
def answer_of_few(found: tuple[int, ...]) -> LookupAnswer:
    """Return as ``answer_of`` does. Kept: most prompts of a length have the same news."""
    news = [each & _BUT_TAILS_NUMBER for each in found[1:]]
    hits = len(list(takewhile(lambda each: each & STATE_MASK == ChunkState.HIT, news)))
    for at in range(hits, len(news)):
        if not news[at] or news[at] & STATE_MASK == ChunkState.HIT:
            news[at] = _COLD_NUMBER
    runs = tuple(_run(len(list(alike)), each) for each, alike in groupby(news))
    return LookupAnswer(hits, runs, unpack_news(found[hits]).has_tails)


def _run(count: int, news: int) -> StateRun:
    said = unpack_news(news)
    return StateRun(count, said.state, said.tier, said.encoding, said.reason)
