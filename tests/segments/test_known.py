"""Documents found inside text that nobody cut; nothing is ever taken for a document that differs from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstore_client.segments import known
from kvstore_client.segments.known import ALIKE_MAX, ANCHOR_TOKENS, BUDGET_PER_TOKEN, BUDGET_TOKENS_MIN, KnownSegments

from kvstore import keys
from tests.simulated import SeededRandom
from tests.specs import tokens_of

NAME = b"model"


def table(count_max: int = 100, documents: Iterable[Any] = ()) -> KnownSegments:
    found = KnownSegments(SeededRandom(1), count_max)
    for each in documents:
        found.add(NAME, each)
    return found


def joined(*parts: Any) -> Any:
    return np.concatenate([np.asarray(part, np.uint32) for part in parts])


def test_documents_are_found_wherever_they_begin() -> None:
    one, two, three = tokens_of(40, 1), tokens_of(333, 2), tokens_of(ANCHOR_TOKENS, 3)
    found = table(documents=[one, two, three])
    text = joined(tokens_of(13, 9), two, one, tokens_of(1, 8), three, two[:300])
    places = [range(13, 346), range(346, 386), range(387, 387 + ANCHOR_TOKENS)]
    assert found.find(NAME, text) == places
    assert found.find(NAME, two) == [range(333)]
    assert found.find(b"another model", text) == []
    assert found.find(NAME, text[:10]) == []


def test_of_two_that_begin_alike_the_longer_is_found_where_it_is() -> None:
    long = tokens_of(200, 1)
    found = table(documents=[long[:50], long, long[:100]])
    assert found.find(NAME, joined([7], long, [7], long[:150])) == [range(1, 201), range(202, 302)]


def test_a_single_changed_token_is_another_document() -> None:
    document = tokens_of(100, 1)
    found = table(documents=[document])
    for place in (0, 31, 32, 99):
        changed = document.copy()
        changed[place] += 1
        assert found.find(NAME, joined([1, 2], changed, [3])) == []


def thue_morse(power: int) -> tuple[Any, Any]:
    """The sequence of length 2 ** power, and its complement."""
    bits = np.array([bin(number).count("1") & 1 for number in range(1 << power)], np.uint32)
    return bits, 1 - bits


def test_thue_morse_sequences_are_told_apart() -> None:
    """They and their complements collide at every point of a polynomial modulo 2 ** 64: 1,024 tokens are enough."""
    left, right = thue_morse(11)
    for point in (3, 31, 131, 0x9E3779B97F4A7C15):
        values = []
        for tokens in (left, right):
            value = 0
            for token in tokens.tolist():
                value = (value * point + token) % 2**64
            values.append(value)
        assert values[0] == values[1]
    found = table(documents=[left])
    assert found.hashes(left, 2048)[0] != found.hashes(right, 2048)[0]
    assert found.find(NAME, right) == []
    assert found.find(NAME, joined(right, left, right)) == [range(2048, 4096)]


def test_candidates_that_all_collide_are_decided_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownSegments, "hashes", lambda _, tokens, length=ANCHOR_TOKENS: np.zeros(
        len(tokens) - length + 1, np.uint64
    ))  # fmt: skip
    documents = [tokens_of(100, seed) for seed in range(ALIKE_MAX)]
    found = table(documents=documents)
    assert found.find(NAME, documents[3]) == [range(100)]
    assert found.find(NAME, tokens_of(5000, 77)) == []


def test_work_on_hostile_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window is a candidate for every document, and none of them is one."""
    digested = 0

    def counted(tokens: Any) -> bytes:
        nonlocal digested
        digested += len(tokens)
        return keys.token_digest(tokens)

    monkeypatch.setattr(known, "token_digest", counted)
    documents = [joined(np.zeros(40), [1], np.zeros(300 + 100 * number)) for number in range(ALIKE_MAX)]
    found = table(documents=documents)
    digested = 0
    assert found.find(NAME, np.zeros(20_000, np.uint32)) == []
    assert 20_000 < digested <= BUDGET_PER_TOKEN * (20_000 + BUDGET_TOKENS_MIN)


def test_memory_is_bounded_and_the_least_recently_met_go() -> None:
    documents = [tokens_of(64, seed) for seed in range(20)]
    found = table(count_max=8, documents=documents[:8])
    found.add(NAME, documents[0])  # met again
    for each in documents[8:15]:
        found.add(NAME, each)
    assert len(found) == 8
    assert [bool(found.find(NAME, each)) for each in documents[:15]] == [True] + [False] * 7 + [True] * 7
    alike = [joined(np.zeros(ANCHOR_TOKENS), [number]) for number in range(2 * ALIKE_MAX)]
    crowded = table(documents=alike)
    assert len(crowded) == ALIKE_MAX
    assert [bool(crowded.find(NAME, each)) for each in alike] == [False] * ALIKE_MAX + [True] * ALIKE_MAX


def test_models_are_kept_apart_however_many_there_are() -> None:
    found = table()
    documents = {bytes([number]): tokens_of(64, number) for number in range(40)}
    for name, document in documents.items():
        found.add(name, document)
    for name, document in documents.items():
        assert found.find(name, document) == [range(64)]
        assert found.find(name, documents[b"\0"]) == ([range(64)] if name == b"\0" else [])


FORKED = """
import os, faulthandler
from kvstore_client.segments import KnownSegments
from tests.segments.test_known import NAME, table
from tests.specs import tokens_of
document = tokens_of(64)
found = table(documents=[document])
found._lock.acquire()  # as by a thread that adds just now
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)  # a child that hangs is not waited for
    assert found._lock.acquire(blocking=False), "whichever thread of the child comes first finds it free"
    found._lock.release()
    assert found.find(NAME, document) == []
    found.add(NAME, document)
    assert found.find(NAME, document) == [range(64)]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
found._lock.release()
assert found.find(NAME, document) == [range(64)]
"""


def test_a_forked_child_begins_anew() -> None:
    """Its parent may have been changing the table just then, and would never let go of its lock."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_short_documents_are_not_kept() -> None:
    found = table(documents=[tokens_of(ANCHOR_TOKENS - 1)])
    assert len(found) == 0
    assert found.find(NAME, tokens_of(100)) == []


def test_hashes_are_those_of_the_polynomial() -> None:
    found, tokens = table(), joined([2**32 - 1, 0], tokens_of(40))
    for length in (1, 2, 32):
        for start in (0, 1, len(tokens) - length):
            value = 0
            for token in tokens[start : start + length].tolist():
                value = (value * found._point + token) % known.PRIME
            assert int(found.hashes(tokens, length)[start]) == value


@given(st.data())
def test_what_is_found_is_what_was_added(data: st.DataObject) -> None:
    """Few different tokens, so that everything resembles everything."""
    run = st.lists(st.integers(0, 1), min_size=ANCHOR_TOKENS, max_size=90)
    documents = [np.array(each, np.uint32) for each in data.draw(st.lists(run, min_size=1, max_size=5))]
    pieces = data.draw(st.lists(st.sampled_from(documents) | run, max_size=6))
    text = joined(np.empty(0), *pieces)
    known_texts = {each.tobytes() for each in documents}
    found = table(documents=documents).find(NAME, text)
    assert all(text[each.start : each.stop].tobytes() in known_texts for each in found)
    assert all(before.stop <= after.start for before, after in zip(found, found[1:], strict=False))
