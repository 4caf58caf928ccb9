"""The words themselves: what is put is found, through growth, and while another process writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import Unavailable
from kvstore.presence import (
    HEADER_WORDS,
    NEWS_MASK,
    PARTIAL,
    PROBE_MAX,
    RETIRED,
    SLOTS_MIN,
    News,
    PresenceTable,
    Words,
    find_few,
    pack_news,
    slot_count_of,
    tag_of,
    tags_of,
    unpack_news,
)
from kvstore.presence import (
    find as found_in,
)
from kvstore.seams import SystemMemory
from kvstore.seams.mapping import SharedMap
from kvstore.spec import ChunkState, Encoding, MissReason, Tier
from tests.presence.shown import words_of
from tests.simulated import BytearrayMemory


def find(words: Words, tags: Words) -> NDArray[np.uint64] | None:
    """The news of each tag; None where the table cannot tell of one of them."""
    found, few = found_in(words, tags), find_few(words, tags.tolist())
    assert (found and (found.news.tolist(), found.is_whole)) == (few and tuple(few)), "one by one, and all at once"
    return found.news if found is not None and (found.is_whole or found.news.all()) else None


SALT = 0x1234_5678_9ABC_DEF0


def tags(*numbers: int) -> Words:
    return np.array(numbers, np.uint64)


def tag_at(slot: int, other: int) -> int:
    """A tag whose probe begins at a slot of the smallest table; ``other`` sets those of one slot apart."""
    return 1 << 63 | other << 32 | slot << 12


@pytest.mark.parametrize("tails", [True, False])
def test_news_are_what_was_packed(tails: bool) -> None:
    for state in ChunkState:
        for tier in Tier:
            for encoding in Encoding:
                for reason in list(MissReason)[state is ChunkState.MISS :]:
                    packed = pack_news(state, tier, encoding, reason, tails)
                    assert 0 < packed <= NEWS_MASK
                    assert unpack_news(packed) == News(state, tier, encoding, reason, tails)
    assert unpack_news(0) == News(ChunkState.MISS, Tier.NONE, Encoding.NONE, MissReason.COLD, False)


def test_one_tag_and_many_are_made_alike() -> None:
    digests = [os.urandom(32) for _ in range(100)] + [bytes(32), b"\xff" * 32]
    assert [tag_of(SALT, each) for each in digests] == tags_of(SALT, b"".join(digests)).tolist()
    assert len({tag_of(salt, digests[0]) for salt in range(100)}) == 100, "namespaces are set apart"


@pytest.mark.parametrize("digest_of", [lambda n: n * 4, lambda n: n + bytes(24), lambda n: bytes(24) + n])
def test_tags_of_engines_own_hashes_are_spread(digest_of: Callable[[bytes], bytes]) -> None:
    """64 bits, repeated or with zeros; counters, too."""
    for numbers in (range(4096), range(0, 4096 << 40, 1 << 40)):
        digests = b"".join(digest_of(number.to_bytes(8, "little")) for number in numbers)
        found = tags_of(SALT, digests)
        assert np.unique(found).size == 4096
        begins = np.bincount((found >> np.uint64(12) & np.uint64(4095)).astype(np.int64), minlength=4096)
        assert begins.max() <= 16, "many begin at one slot"


@given(
    puts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 3)), max_size=60),
    bulk=st.integers(0, 12),
)
def test_what_was_put_last_is_found(puts: list[tuple[int, int, int]], bulk: int) -> None:
    """Few slots next to each other, many tags: long runs, chunks that come, go and come again."""
    table, expected = PresenceTable(BytearrayMemory()), dict[int, int]()
    loaded = [tag_at(slot, 100 + slot) for slot in range(bulk)]
    table.put_all(tags(*loaded), 5)
    expected.update(dict.fromkeys(loaded, 5))
    for slot, other, news in puts:
        tag = tag_at(slot, other)
        table.put(tag, news)
        expected[tag] = news
    asked = [*expected, tag_at(1, 99)]
    found = find(words_of(table), tags(*asked))
    assert found is not None
    assert found.tolist() == [*expected.values(), 0]
    known = {int(word) & ~NEWS_MASK: int(word) & NEWS_MASK for word in table.known()}
    assert known == {tag: news for tag, news in expected.items() if news}


def test_a_run_that_is_longer_than_one_look() -> None:
    table = PresenceTable(BytearrayMemory())
    run = [tag_at(7, other) for other in range(100)]
    for number, tag in enumerate(run):
        table.put(tag, 1 + number)
    found = find(words_of(table), tags(*run, tag_at(7, 500)))
    assert found is not None
    assert found.tolist() == [*range(1, 101), 0]


def test_a_slot_of_a_chunk_that_went_is_used_again() -> None:
    table = PresenceTable(BytearrayMemory())
    for other in range(20 * SLOTS_MIN):
        table.put(tag_at(3, other), 1)
        table.put(tag_at(3, other), 0)
    assert slot_count_of(words_of(table)) == SLOTS_MIN
    assert int(np.count_nonzero(words_of(table))) == 1


def test_a_full_table_is_replaced_by_a_larger_one_and_says_so() -> None:
    table = PresenceTable(BytearrayMemory())
    first, digests = words_of(table), [os.urandom(32) for _ in range(3 * SLOTS_MIN)]
    for digest in digests:
        table.put(tag_of(SALT, digest), 1)
    assert int(first[0]) & RETIRED
    assert find(first, tags_of(SALT, digests[0])) is None, "whoever still reads the old one must ask for the new one"
    found = find(words_of(table), tags_of(SALT, b"".join(digests)))
    assert found is not None
    assert found.all()
    assert slot_count_of(words_of(table)) == 8 * SLOTS_MIN
    for digest in digests[1:]:
        table.put(tag_of(SALT, digest), 0)
    table.put_all(tags(), 0)
    assert slot_count_of(words_of(table)) == SLOTS_MIN, "what is known of nobody is left behind"
    assert table.known().size == 1


def test_who_has_the_old_table_is_told_to_ask_for_the_new_one() -> None:
    """As a client has it: memory that stays when the sidecar lets go of it."""
    table = PresenceTable(SystemMemory())
    theirs = SharedMap(table.mapping.descriptor, table.mapping.bytes.size, writable=False).bytes.view(np.uint64)
    tag = tag_at(5, 1)
    table.put(tag, 7)
    assert find(theirs, tags(tag)).tolist() == [7]
    for other in range(SLOTS_MIN):
        table.put(tag_at(other, 9), 1)
    table.put(tag, 3)
    assert find(words_of(table), tags(tag)).tolist() == [3]
    assert found_in(theirs, tags(tag)) is None, "what it says of the chunk is of another time"


def test_what_finds_no_room_is_not_said_to_be_missing() -> None:
    """Digests are what clients say they are: somebody may make them all begin at one slot."""
    table = PresenceTable(BytearrayMemory())
    crowd = [1 << 63 | other << 40 for other in range(3 * PROBE_MAX)]  # one slot, however large the table
    for tag in crowd:
        table.put(tag, 1)
    assert int(words_of(table)[0]) & PARTIAL
    assert slot_count_of(words_of(table)) <= 16 * SLOTS_MIN, "no table for a few chunks, however they are called"
    found = [find(words_of(table), tags(tag)) for tag in crowd]
    assert sum(each is not None and each.tolist() == [1] for each in found) == PROBE_MAX
    assert all(each is None for each in found if each is None or not each.all()), "only a call can tell"
    absent = tag_at(9, 1)
    assert find(words_of(table), tags(absent)) is None
    for tag in crowd:
        table.put(tag, 0)
    table.put_all(tags(), 0)
    news = find(words_of(table), tags(crowd[0], absent))
    assert news is not None
    assert news.tolist() == [0, 0]


def test_what_is_forgotten_together_is_unknown_wherever_it_lies() -> None:
    """In the first look, behind it, without a word, and not there at all."""
    table = PresenceTable(BytearrayMemory())
    crowd = [1 << 63 | other << 40 for other in range(PROBE_MAX + 40)]
    others = [tag_at(number, 1) for number in range(1000, 1200)]
    for tag in (*crowd, *others):
        table.put(tag, 3)
    assert table._left_out
    gone, stays = [*crowd[::2], *others[::2], tag_at(5000, 1)], [*crowd[1::2], *others[1::2]]
    table.forget(tags(*gone))
    assert not any(each in table._left_out for each in gone)
    known = {int(word) & ~NEWS_MASK for word in table.known()} | table._left_out.keys()
    assert known == set(stays)
    for tag in crowd:
        table.put(tag, 0)
    table.forget(tags(*stays))
    assert not table.known().size
    assert not int(words_of(table)[0]) & PARTIAL


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.integers(0, 2), st.booleans()), max_size=40),
    st.integers(0, 2),
)
def test_a_crowd_and_its_neighbours(changes: list[tuple[bool, int, int, bool]], rebuilt: int) -> None:
    """Who found no word is remembered; a neighbour that was pushed away is found, and is not there twice."""
    table = PresenceTable(BytearrayMemory())
    expected = dict.fromkeys((1 << 63 | other << 40 for other in range(PROBE_MAX + 40)), 3)
    expected[tag_at(PROBE_MAX - 100, 0)] = 4
    for tag, news in expected.items():
        table.put(tag, news)
    for is_crowd, other, news, is_copied in changes:
        tag = 1 << 63 | other << 40 if is_crowd else tag_at(other, 0)
        table.put(tag, news)
        expected[tag] = news
        if is_copied and rebuilt:
            table.put_all(tags(), 0)
    for number in range(rebuilt * SLOTS_MIN // 2):  # until the table is copied for want of room
        table.put(tag_at(1000 + number % 10_000, 1 + number // 10_000), 5)
    asked = tags(*expected)
    found = find(words_of(table), asked)
    left_out = [tag for tag in expected if tag in table._left_out]
    for tag, news in expected.items():
        seen = find(words_of(table), tags(tag))
        assert (seen is None and (not news or tag in left_out)) or (seen is not None and seen.tolist() == [news])
    assert (found is None) == bool(int(words_of(table)[0]) & PARTIAL) or all(expected.values())
    words = [int(word) & ~NEWS_MASK for word in table.known()]
    assert len(set(words)) == len(words), "a chunk that is there twice is there for ever"
    assert bool(int(words_of(table)[0]) & PARTIAL) == bool(table._left_out)


def test_where_no_larger_table_can_be_had_nothing_is_said_to_be_missing() -> None:
    errors = cycle((Unavailable("refused"), OSError(errno.EMFILE, "no descriptor left"), MemoryError()))

    class Poor(BytearrayMemory):
        is_poor = False

        def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Any:
            if self.is_poor:
                raise next(errors)
            return super().read_only_to_others(name, byte_count, is_moved=is_moved)

    memory = Poor()
    table = PresenceTable(memory)
    digests = [os.urandom(32) for _ in range(2 * SLOTS_MIN)]
    memory.is_poor = True
    for digest in digests[:-100]:
        table.put(tag_of(SALT, digest), 1)
    table.put_all(tags_of(SALT, b"".join(digests[-100:])), 1)
    assert slot_count_of(words_of(table)) == SLOTS_MIN
    seen = [find(words_of(table), tags_of(SALT, digest)) for digest in digests]
    assert all(each is None or each.all() for each in seen), "what is stored is seen, or asked for"
    assert sum(each is not None for each in seen) > SLOTS_MIN / 2
    memory.is_poor = False
    for digest in (os.urandom(32) for _ in range(SLOTS_MIN)):
        table.put(tag_of(SALT, digest), 1)
    found = find(words_of(table), tags_of(SALT, b"".join(digests)))
    assert found is not None
    assert found.all(), "and all of it, once there is room"


WRITER = """
import sys
from kvstore.presence import PresenceTable, tag_of
from kvstore.seams import SystemMemory
table = PresenceTable(SystemMemory())
print(table.mapping.descriptor, table.mapping.bytes.size, flush=True)
lasting = [number.to_bytes(32, "little") for number in range(1, 501)]
for digest in lasting:
    table.put(tag_of(7, digest), 9)
print("ready", flush=True)
mapping = table.mapping
for round in range(200):
    for number in range(1000, 1800):
        table.put(tag_of(7, number.to_bytes(32, "little")), 1 + round % 8)
    for number in range(1000, 1800):
        table.put(tag_of(7, number.to_bytes(32, "little")), 0)
assert table.mapping is mapping
print("done", flush=True)
sys.stdin.read()
"""


def test_a_reader_beside_the_writer_never_misses_what_stays() -> None:
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        descriptor, size = map(int, writer.stdout.readline().split())
        path = f"/proc/{writer.pid}/fd/{descriptor}"
        words = np.memmap(path, np.uint64, "r", shape=(size // 8,))
        assert writer.stdout.readline() == "ready\n"
        lasting = tags_of(7, b"".join(number.to_bytes(32, "little") for number in range(1, 501)))
        passing = tags_of(7, b"".join(number.to_bytes(32, "little") for number in range(1000, 1800)))
        os.set_blocking(writer.stdout.fileno(), False)
        looks, changes = 0, 0
        while not writer.stdout.readline():
            assert writer.poll() is None, "the writer failed"
            found, others = found_in(words, lasting), found_in(words, passing)
            few = find_few(words, lasting.tolist())
            assert found is not None
            assert others is not None
            assert few is not None
            assert (found.news == 9).all(), "a chunk that is there was not seen"
            assert few.news == [9] * 500
            assert others.news.max() <= 8, "news of another chunk"
            looks, changes = looks + 1, changes + bool(others.news.any())
        assert looks > 10
        assert changes, "the reader ran while nothing was written"
        assert words.size - HEADER_WORDS - PROBE_MAX == SLOTS_MIN
