"""Documents this client has met, and where they begin in a text that nobody cut.

A table of hashes of documents' first tokens; the same hash of every window of the text, computed at once by doubling,
gives candidates, and the digest of all of a candidate's tokens decides. So two texts are never taken for the same,
whatever their hashes; what an adversary gains by equal hashes is work, and that is bounded by a budget per text.

The hash is a pair of polynomials modulo primes, at points drawn by each process: modulo a power of two, Thue-Morse
sequences collide at every point.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.keys import Tokens, token_digest
from kvstore.seams import Random, SystemRandom

ANCHOR_TOKENS = 32
"""How many first tokens are hashed: a power of two. Shorter documents are not found by themselves."""
COUNT_MAX = 8192
ALIKE_MAX = 8
"""How many documents with one beginning are kept, the newest."""
BUDGET_PER_TOKEN = 4
"""Tokens of candidates that are digested, per token of the text."""
BUDGET_TOKENS_MIN = 4096
"""Every text has the budget of this many tokens beside its own."""
PRIMES = (2**31 - 1, 2**31 - 19)

Hashes = NDArray[np.uint64]


class _Entry(NamedTuple):
    anchor: int
    probes: tuple[int, int]
    """The hashes of the windows in its middle and at its end: most of what begins alike ends here, undigested."""
    token_count: int
    digest: bytes

    @property
    def probed(self) -> tuple[int, int]:
        """Where the probes lie."""
        last = self.token_count - ANCHOR_TOKENS
        return last // 2, last


class KnownSegments:
    """The least recently met give way. About 500 bytes each, at most 4 MiB. Safe to share between threads."""

    def __init__(self, random: Random | None = None, count_max: int = COUNT_MAX) -> None:
        draw = random or SystemRandom()
        self._points = [int.from_bytes(draw.bytes(8), "little") % (prime - 2) + 2 for prime in PRIMES]
        self._count_max = count_max
        self._entries: OrderedDict[tuple[bytes, bytes], _Entry] = OrderedDict()
        self._alike: dict[bytes, dict[int, list[_Entry]]] = {}
        self._anchors: dict[bytes, Hashes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: bytes, tokens: Tokens) -> None:
        """Remember a document of the model that ``name``, its fingerprint, stands for."""
        if len(tokens) < ANCHOR_TOKENS:
            return
        last = len(tokens) - ANCHOR_TOKENS
        anchor, middle, end = (
            int(self.hashes(tokens[place : place + ANCHOR_TOKENS])[0]) for place in (0, last // 2, last)
        )
        entry = _Entry(anchor, (middle, end), len(tokens), token_digest(tokens))
        key = name, entry.digest
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return
            alike = self._alike.setdefault(name, {}).setdefault(anchor, [])
            if len(alike) == ALIKE_MAX:
                self._forget(name, alike[0])
            self._entries[key] = entry
            self._alike.setdefault(name, {}).setdefault(anchor, []).append(entry)
            self._anchors.pop(name, None)
            if len(self._entries) > self._count_max:
                (other, _), oldest = next(iter(self._entries.items()))
                self._forget(other, oldest)

    def _forget(self, name: bytes, entry: _Entry) -> None:
        del self._entries[name, entry.digest]
        anchors = self._alike[name]
        anchors[entry.anchor].remove(entry)
        if not anchors[entry.anchor]:
            del anchors[entry.anchor]
        if not anchors:
            del self._alike[name]
        self._anchors.pop(name, None)

    def find(self, name: bytes, tokens: Tokens) -> list[range]:
        """Where known documents stand in a text: ascending, not overlapping; of two that begin at one token the longer.

        Cost: some 20 ns per token, and digests of at most BUDGET_PER_TOKEN times the text and BUDGET_TOKENS_MIN. When
        that is used up, what comes after is not found.
        """
        alike, anchors = self._of_model(name)
        if anchors is None or len(tokens) < ANCHOR_TOKENS:
            return []
        hashes = self.hashes(tokens)
        places = np.searchsorted(anchors, hashes)
        candidates = np.flatnonzero(anchors[np.minimum(places, len(anchors) - 1)] == hashes).tolist()
        found: list[range] = []
        budget, free = BUDGET_PER_TOKEN * (len(tokens) + BUDGET_TOKENS_MIN), 0
        for start in candidates:
            if start < free:
                continue
            for entry in sorted(alike[int(hashes[start])], key=lambda each: -each.token_count):
                stop = start + entry.token_count
                fits = stop <= len(tokens) and tuple(int(hashes[start + each]) for each in entry.probed) == entry.probes
                budget -= entry.token_count if fits else ANCHOR_TOKENS
                if budget < 0:
                    return found
                if fits and token_digest(tokens[start:stop]) == entry.digest:
                    found.append(range(start, stop))
                    free = stop
                    break
        return found

    def _of_model(self, name: bytes) -> tuple[dict[int, list[_Entry]], Hashes | None]:
        """What is known of a model: by anchor, and the anchors in order; None when nothing is."""
        with self._lock:
            alike = {anchor: list(entries) for anchor, entries in self._alike.get(name, {}).items()}
            anchors = self._anchors.get(name)
            if anchors is None and alike:
                anchors = self._anchors[name] = np.array(sorted(alike), np.uint64)
        return alike, anchors

    def hashes(self, tokens: Tokens, length: int = ANCHOR_TOKENS) -> Hashes:
        """The hash of each window of ``length`` tokens, a power of two: u64 [tokens - length + 1].

        Of two windows side by side the hash is h(left) x^length + h(right), so that windows double in each step.
        """
        halves = []
        for prime, point in zip(PRIMES, self._points, strict=True):
            modulus = np.uint64(prime)
            values = tokens.astype(np.uint64) % modulus
            power, width = point, 1
            while width < length:
                values = (values[:-width] * np.uint64(power) + values[width:]) % modulus
                power, width = power * power % prime, 2 * width
            halves.append(values)
        return halves[0] << np.uint64(31) | halves[1]
