"""The presence table: the stored chunks, in shared memory, where clients look chunks up without a call.

The table has one 8-byte word per chunk: 52 bits of its digest, mixed with its namespace (the *tag*), and 12 bits with a
lookup's answer for it (the *news*). It uses open addressing with linear probing; a tag's low bits tell where its probe
begins. A word is written by one machine store, so a reader meets the old word or the new one, and no word depends on
another. A word is never removed from a table: its news become 0, unknown, and another chunk may take its place. A table
that is too full is copied into a larger one and marked as retired; readers look at that mark after they read.

Words of another kind have the lengths of a parent's partial chunks: 12 bits in place of the news, each for one length,
under a tag that is mixed with the number of that group of 12 lengths (``lengths_tag``). A client computes the digests
that its tokens have at these lengths, and looks for them as for any chunk.

A tag is not a digest: beside a million chunks, one absent chunk in two billion is taken for a stored one. Then a fetch,
which compares whole digests, brings less than the lookup said.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.seams.fence import fence
from kvstore.seams.memory import Mapping, Memory
from kvstore.spec import ChunkState, Encoding, MissReason, Tier

Words = NDArray[np.uint64]

HEADER_WORDS = 8
"""Words before the slots. The first one holds the flags; together they are a cache line."""
RETIRED, PARTIAL = 1, 2
"""Flags. RETIRED: another table has replaced this one. PARTIAL: some stored chunks may be missing here."""
NEWS_MASK, STATE_MASK, TAILS = 0xFFF, 0x3, 0x800
"""The news within a word; and within the news the state, and the bit that the chunk has partial chunks after it."""
LENGTHS_PER_WORD = 12
TAIL_TOKENS_MAX = 1024
"""For models with larger chunks, partial chunks are found by calls only: they would take too many words."""
TAG_MASK = (1 << 64) - 1 - NEWS_MASK
_TAG_SHIFT = 12
_TOP_BIT = 1 << 63
"""Set in every tag, so that no word in use is 0."""
_SPREAD = 0x9E3779B97F4A7C15
_WEIGHTS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd numbers that mix: 2^64 over the golden ratio, and the constants of splitmix64, rrmxmx and wyhash. Mixing is
needed: digests may be an engine's own, which repeat 64 bits or pad them with zeros."""
_ALL_BITS = (1 << 64) - 1
PROBE_MAX = 256
"""Words that a probe looks at. At most six words in ten are in use, so few probes would need more."""
SLOTS_MIN = 1 << 14
_FULL, _ROOMY = 0.6, 0.5
_GROWTH_MAX = 8
"""Where some chunks find no word within PROBE_MAX, a table becomes at most so many times larger than its chunks need.
If that does not help, it is PARTIAL."""
_PATIENCE = 16
"""Where a chunk finds no word, a new table is made only after as many writes as a sixteenth of this table's slots."""
_WINDOW = np.arange(8)
_log = logging.getLogger("kvstore.presence")
_FOUR = struct.Struct("<4Q")


class News(NamedTuple):
    """A lookup's answer for one chunk. ``has_tails``: there are partial chunks after it."""

    state: ChunkState
    tier: Tier
    encoding: Encoding
    reason: MissReason
    has_tails: bool


def pack_news(
    state: int, tier: int = Tier.NONE, encoding: int = Encoding.NONE, reason: int = MissReason.NONE, tails: bool = False
) -> int:  # fmt: skip
    """Return the news as 12 bits; 0 stands for an unknown chunk."""
    return state | tier << 2 | encoding << 5 | reason << 8 | (TAILS if tails else 0)


def encoded_news(encodings: NDArray[np.uint8]) -> Words:
    """Return the encodings' bits of ``pack_news``, for many chunks."""
    return encodings.astype(np.uint64) << np.uint64(5)


@lru_cache(maxsize=1 << _TAG_SHIFT)
def unpack_news(news: int) -> News:
    """Return 12 bits as news. An unknown chunk is a miss with reason COLD."""
    state, reason = ChunkState(news & STATE_MASK or ChunkState.MISS), MissReason(news >> 8 & 7)
    if state is ChunkState.MISS:
        reason = reason or MissReason.COLD
    return News(state, Tier(news >> 2 & 7), Encoding(news >> 5 & 7), reason, bool(news & TAILS))


def tag_of(salt: int, digest: bytes) -> int:
    """Return the tag of one chunk, in the tag's bits of a word. ``salt``: its namespace's
    (``kvstore.keys.presence_salt``)."""
    first, second, third, fourth = _FOUR.unpack(digest)
    one, two, three, four = _WEIGHTS
    mixed = (first * one + second * two + third * three + fourth * four ^ salt) & _ALL_BITS
    return int((mixed ^ mixed >> 32) * _SPREAD & TAG_MASK | _TOP_BIT)


def tags_of(salt: int, digests: bytes) -> Words:
    """Return the tags of a run of digests (32 bytes each)."""
    mixed: Words = np.frombuffer(digests, "<u8").reshape(-1, 4) @ np.array(_WEIGHTS, np.uint64)
    mixed ^= np.uint64(salt)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_SPREAD)
    mixed &= np.uint64(TAG_MASK)
    mixed |= np.uint64(_TOP_BIT)
    return mixed


def lengths_tag(salt: int, parent: bytes, group: int) -> int:
    """Return the tag of the word for one group of LENGTHS_PER_WORD lengths of the partial chunks after ``parent``."""
    return tag_of(salt ^ (group + 1) * _SPREAD & _ALL_BITS, parent)


@lru_cache(maxsize=256)
def lengths_tags(salt: int, parent: bytes, chunk_tokens: int) -> Words:
    """Return the tags of all length words of one parent. Results are cached, above all for the root."""
    groups = range(-(-chunk_tokens // LENGTHS_PER_WORD))
    return np.array([lengths_tag(salt, parent, group) for group in groups], np.uint64)


def lengths_news(bits: int, group: int) -> int:
    """Return the news of a group's length word: the group's part of ``bits``, where bit n stands for n tokens."""
    return bits >> group * LENGTHS_PER_WORD & NEWS_MASK


def lengths_words(salt: int, parent: bytes, bits: int) -> Iterator[int]:
    """Give the length words of a parent that are not empty. ``bits``: as in ``lengths_news``."""
    while bits:
        group = ((bits & -bits).bit_length() - 1) // LENGTHS_PER_WORD
        news = lengths_news(bits, group)
        yield lengths_tag(salt, parent, group) | news
        bits ^= news << group * LENGTHS_PER_WORD


def lengths_bits(news: NDArray[np.uint64]) -> int:
    """Return the bitmap of lengths from the news of all length words of one parent."""
    return sum(int(each) << group * LENGTHS_PER_WORD for group, each in enumerate(news.tolist()) if each)


def slot_count_of(words: Words) -> int:
    """Return the number of places at which a probe can begin; a power of two."""
    return words.size - HEADER_WORDS - PROBE_MAX


class Found(NamedTuple):
    """The news of each tag; 0: the tag is unknown. ``is_whole``: an unknown chunk is certainly not stored."""

    news: NDArray[np.uint64]
    is_whole: bool


class FoundFew(NamedTuple):
    """The same as ``Found``, as a list."""

    news: list[int]
    is_whole: bool


def find(words: Words, tags: Words) -> Found | None:
    """Look tags up in a table's words. Return None for a table that is retired. Cost: about 30 us for 128 tags."""
    mask = slot_count_of(words) - 1
    begins = (tags >> np.uint64(_TAG_SHIFT) & np.uint64(mask)).astype(np.intp) + HEADER_WORDS
    seen = words[begins[:, None] + _WINDOW]
    same = (seen & np.uint64(TAG_MASK)) == tags[:, None]
    at = same.argmax(axis=1)
    rows = np.arange(tags.size)
    is_found = same[rows, at]
    news = np.where(is_found, seen[rows, at] & np.uint64(NEWS_MASK), np.uint64(0))
    for row in np.flatnonzero(~is_found & seen.all(axis=1)).tolist():
        news[row] = _probe(words.data, int(tags[row]), int(begins[row]))
    is_whole = _is_whole(words.data)
    return None if is_whole is None else Found(news, is_whole)


def find_few(words: Words, tags: Iterable[int]) -> FoundFew | None:
    """Look up as ``find`` does, tag by tag. Cost: about 1 us per tag, which for a few is less than numpy's steps."""
    view, mask = words.data, slot_count_of(words) - 1
    news: list[int] = []
    for tag in tags:
        begin = (tag >> _TAG_SHIFT & mask) + HEADER_WORDS
        word = view[begin]
        news.append(word & NEWS_MASK if word & TAG_MASK == tag else _probe(view, tag, begin))
    is_whole = _is_whole(view)
    return None if is_whole is None else FoundFew(news, is_whole)


def _is_whole(words: memoryview) -> bool | None:
    """Return True when a chunk that the words read before did not show is certainly not stored; None when the table is
    retired: it may have been when they were read."""
    fence()
    flags: int = words[0]
    return None if flags & RETIRED else not flags & PARTIAL


def _probe(words: memoryview, tag: int, begin: int) -> int:
    for place in range(begin, begin + PROBE_MAX):
        word: int = words[place]
        if word & TAG_MASK == tag:
            return word & NEWS_MASK
        if not word:
            break
    return 0


class PresenceTable:
    """The table of one tenant. This is its only writer; callers must not overlap. It raises nothing: a chunk that finds
    no word, because tags crowd at one place or no larger table can be made, is kept here, and the table is PARTIAL.

    Cost: ``put`` about 2 us. A table of a million chunks takes 16 MiB. It is copied, in 0.1 s, when more than six words
    in ten are in use: by chunks, or by words left by chunks that went.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._used = self._put_count = 0
        self._left_out: dict[int, int] = {}
        self.is_partial = False
        """True when chunks may be stored beyond the node, where this table does not reach. See ``become_partial``."""
        self._use(*self._made(SLOTS_MIN))

    def _made(self, slots: int) -> tuple[Mapping, Words]:
        """Make an empty table. Raises Unavailable, or OSError where no descriptor is left."""
        size = (HEADER_WORDS + slots + PROBE_MAX) * 8
        mapping = self._memory.read_only_to_others("kvstore-presence", size, is_moved=False)
        words: Words = mapping.bytes.view(np.uint64)
        words[:] = 0
        return mapping, words

    def _use(self, mapping: Mapping, words: Words) -> None:
        self.mapping = mapping
        self._array = words
        self._words = memoryview(words.data)
        self._mask = slot_count_of(words) - 1
        self._full_at = int(_FULL * slot_count_of(words))

    def known(self) -> Words:
        """Return the words whose news are not 0, in no order."""
        words = self._array[HEADER_WORDS:]
        known: Words = words[words & np.uint64(NEWS_MASK) != 0]
        return known

    def put(self, tag: int, news: int) -> None:
        """Set a chunk's news; 0: it is unknown from now on."""
        self._put_count += 1
        place = self._place(tag)
        if place:
            word = self._words[place]
            if news or word:
                self._words[place] = tag | news
                self._used += not word
            if self._left_out:
                self._left_out.pop(tag, None)
                self._mark()
        elif news:
            self._left_out[tag] = news
            self._mark()
        elif self._left_out.pop(tag, 0):
            self._mark()
        is_due = self._put_count > slot_count_of(self._array) // _PATIENCE
        if self._used > self._full_at or (self._left_out and is_due):
            self._copy(np.empty(0, np.uint64))

    def _place(self, tag: int) -> int:
        """Return the place of the tag's word, or else a place where it may be put; 0 where there is none. A new tag may
        take an empty word, or the word of an unknown chunk."""
        words, free = self._words, 0
        begin = (tag >> _TAG_SHIFT & self._mask) + HEADER_WORDS
        for place in range(begin, begin + PROBE_MAX):
            word = words[place]
            if word & TAG_MASK == tag:
                return place
            if not word:
                return free or place
            if not (free or word & NEWS_MASK):
                free = place
        return free

    def _mark(self) -> None:
        """Set or clear the PARTIAL flag. It is cleared only after the words are written: a reader that misses a word
        before that asks by call."""
        fence()
        self._words[0] = PARTIAL if self._left_out or self.is_partial else 0

    def become_partial(self) -> None:
        """Mark the table as PARTIAL for good: from now on chunks that are not in it may be stored beyond the node, so
        clients ask by call. The caller does not put the reasons of departed chunks any more."""
        self.is_partial = True
        self._mark()

    def forget(self, tags: Words) -> None:
        """Set the news of many chunks to unknown, each by one store. Cost: 0.1 us per chunk."""
        words, mask = self._array, slot_count_of(self._array) - 1
        begins = (tags >> np.uint64(_TAG_SHIFT) & np.uint64(mask)).astype(np.intp) + HEADER_WORDS
        same = (words[begins[:, None] + _WINDOW] & np.uint64(TAG_MASK)) == tags[:, None]
        is_near = same.any(axis=1)
        words[(begins + same.argmax(axis=1))[is_near]] = tags[is_near]
        for tag in tags[~is_near].tolist():
            self.put(tag, 0)
        if self._left_out:
            for tag in tags.tolist():
                self._left_out.pop(tag, None)
            self._mark()

    def put_all(self, tags: Words, news: NDArray[np.uint64] | int) -> None:
        """Set the news of many chunks that are not in the table yet. Makes a new table with room for them."""
        self._copy(tags | np.asarray(news, np.uint64))

    def _copy(self, more: Words) -> None:
        """Replace this table by a new one that also has the words ``more``. Where no table can be made, for want of
        memory or of a descriptor, they are left out: a change of the catalog does not fail for this."""
        self._put_count = 0
        try:
            self._replace(more)
        except (KVStoreError, OSError, MemoryError) as error:
            _log.warning("no larger presence table, so some lookups are calls", extra={"reason": str(error)})
            self._full_at += slot_count_of(self._array) // 64
            self._leave_out(more)
            self._mark()

    def _replace(self, more: Words) -> None:
        """Replace this table; see ``_copy``. Raises KVStoreError, OSError or MemoryError, and then changes nothing."""
        left = np.array([tag | news for tag, news in self._left_out.items()], np.uint64)
        words = np.concatenate([self.known(), left, more])
        least = slots = max(SLOTS_MIN, 1 << int(words.size / _ROOMY - 1).bit_length() if words.size else 0)
        order, begins, places = _laid_out(words, slots)
        while (places - begins >= PROBE_MAX).any() and slots < least * _GROWTH_MAX:
            slots *= 2
            order, begins, places = _laid_out(words, slots)
        in_reach = places - begins < PROBE_MAX
        kept, begins = words[order][in_reach], begins[in_reach]
        crowded, places = words[order][~in_reach], HEADER_WORDS + _places(begins)
        mapping, array = self._made(slots)
        array[places] = kept  # laid out anew without the crowded words: their places leave no holes in other probes
        self._left_out.clear()
        self._leave_out(crowded)
        old, retired = self.mapping, self._words
        self._used = kept.size
        self._use(mapping, array)
        self._mark()
        fence()
        retired[0] = RETIRED
        old.close()

    def _leave_out(self, words: Words) -> None:
        self._left_out.update((word & TAG_MASK, word & NEWS_MASK) for word in words.tolist())


def _laid_out(words: Words, slots: int) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
    """Lay words out in a table of ``slots`` slots. Return their order by the beginning of their probes, these
    beginnings in that order, and their places in that order."""
    begins = (words >> np.uint64(_TAG_SHIFT) & np.uint64(slots - 1)).astype(np.int64)
    order = np.argsort(begins, kind="stable")
    return order, begins[order], _places(begins[order])


def _places(begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a place for each word: the beginning of its probe, or behind the previous word."""
    numbers = np.arange(begins.size)
    places: NDArray[np.int64] = np.maximum.accumulate(begins - numbers) + numbers
    return places
