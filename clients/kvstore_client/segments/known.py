"""Finds the documents this client has met in a text that nobody cut.

It keeps a table of hashes of documents' first tokens. The same hash of every window of the text, computed at once by
doubling, gives candidates, and the digest of all of a candidate's tokens decides. So two texts are never mixed up, even
if their hashes are equal. An adversary with equal hashes can only cause work, and a budget per text bounds that.

The hash is a polynomial modulo a prime, at a point drawn by each process: modulo a power of two, Thue-Morse sequences
collide at every point. Its 31 bits are enough, because two more windows of a candidate are compared before its digest
is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from itertools import count
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.keys import Tokens, fingerprint, token_digest
from kvstore.seams import Random, SystemRandom
from kvstore_client.forks import in_children
from kvstore_client.prompt import Prompt, check_preamble


class _HasCount(Protocol):
    """The result of a fetch, which has a token count."""

    @property
    def token_count(self) -> int: ...


Counted = TypeVar("Counted", bound=_HasCount)
ANCHOR_TOKENS = 32
"""Number of first tokens that are hashed: a power of two. Shorter documents are not found."""
COUNT_MAX = 8192
ALIKE_MAX = 64
"""The most documents with one beginning; the newest are kept."""
BUDGET_PER_TOKEN = 4
"""The most tokens of candidates to digest, per token of the text."""
BUDGET_TOKENS_MIN = 4096
"""Every text has the budget of this many tokens beside its own."""
PRIME = 2**31 - 1
SIEVE, SIEVES_MAX = 1 << 16, 16
BLOCK_TOKENS = 8192
"""Windows hashed at a time, so that the steps stay in the processor's cache."""

Hashes = NDArray[np.uint64]


class _Entry(NamedTuple):
    anchor: int
    probes: tuple[int, int]
    """The hashes of the windows in its middle and at its end. They rule out most candidates with the same beginning,
    without a digest."""
    token_count: int
    digest: bytes
    serial: int
    """A higher number is newer."""

    @property
    def probed(self) -> tuple[int, int]:
        """The offsets of the two probes."""
        last = self.token_count - ANCHOR_TOKENS
        return last // 2, last


class KnownSegments:
    """A table of documents. The least recently met ones are dropped. About 500 bytes each, at most 4 MiB. Safe to share
    between threads."""

    def __init__(self, random: Random | None = None, count_max: int = COUNT_MAX) -> None:
        self._point = int.from_bytes((random or SystemRandom()).bytes(8), "little") % (PRIME - 2) + 2
        self._count_max = count_max
        self._begin()
        in_children(self._begin)

    def _begin(self) -> None:
        """Begin with an empty table. Also in a forked child, whose parent may have been changing its own."""
        self._entries: OrderedDict[tuple[bytes, bytes], _Entry] = OrderedDict()
        self._alike: dict[bytes, dict[int, tuple[_Entry, ...]]] = {}
        """Model -> anchor -> the documents with that beginning, the longest first."""
        self._anchors: dict[bytes, tuple[Hashes, NDArray[np.bool_]]] = {}
        """For a few models, the sorted anchors, and a sieve of their remainders; made when next needed."""
        self._serials = count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: bytes, tokens: Tokens) -> None:
        """Remember a document of a model. ``name``: the model's fingerprint and the preamble's digest."""
        if len(tokens) < ANCHOR_TOKENS:
            return
        last = len(tokens) - ANCHOR_TOKENS
        windows = [tokens[place : place + ANCHOR_TOKENS] for place in (0, last // 2, last)]
        anchor, middle, end = self.hashes(np.concatenate(windows))[::ANCHOR_TOKENS].tolist()
        entry = _Entry(anchor, (middle, end), len(tokens), token_digest(tokens), next(self._serials))
        key = name, entry.digest
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return
            alike = self._alike.get(name, {}).get(anchor, ())
            if len(alike) == ALIKE_MAX:
                self._forget(name, min(alike, key=lambda each: each.serial))
            elif len(self._entries) == self._count_max:
                (other, _), oldest = next(iter(self._entries.items()))
                self._forget(other, oldest)
            self._entries[key] = entry
            anchors = self._alike.setdefault(name, {})
            anchors[anchor] = tuple(sorted((*anchors.get(anchor, ()), entry), key=lambda each: -each.token_count))
            self._anchors.pop(name, None)

    def learn(self, prompt: Prompt) -> None:
        """Remember a prompt that is a document, if it can be found again by its tokens."""
        if not prompt.extras and prompt.tokens is not None:
            self.add(_name_of(prompt), prompt.tokens)

    def seen(self, prompt: Prompt, found: Counted) -> Counted:
        """Remember a document if all of it was found, and return what was found."""
        if prompt.digests and found.token_count == prompt.token_count:
            self.learn(prompt)
        return found

    def _forget(self, name: bytes, entry: _Entry) -> None:
        del self._entries[name, entry.digest]
        anchors = self._alike[name]
        anchors[entry.anchor] = tuple(each for each in anchors[entry.anchor] if each is not entry)
        if not anchors[entry.anchor]:
            del anchors[entry.anchor]
        if not anchors:
            del self._alike[name]
        self._anchors.pop(name, None)

    def find(self, name: bytes, tokens: Tokens) -> list[range]:
        """Return the places of known documents in a text: ascending, not overlapping; of two that begin at one token
        the longer.

        Cost: some 0.1 us per token, and digests of at most BUDGET_PER_TOKEN times the text and BUDGET_TOKENS_MIN.
        Documents after the budget is used up are not found.
        """
        alike = self._alike.get(name)
        if len(tokens) < ANCHOR_TOKENS or alike is None:
            return []
        hashes = self.hashes(tokens)
        found: list[range] = []
        budget, free = BUDGET_PER_TOKEN * (len(tokens) + BUDGET_TOKENS_MIN), 0
        for start in self._candidates(name, hashes):
            if start < free:
                continue
            for entry in alike.get(int(hashes[start]), ()):
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

    def find_in(self, prompt: Prompt, preamble: Tokens) -> list[range]:
        """Call ``find`` on a prompt, for documents that were computed behind this preamble. Raises InvalidRequest for a
        prompt given by its hashes, and for one that does not begin with the preamble."""
        if prompt.hashes is not None or prompt.tokens is None:
            raise InvalidRequest("find_segments needs the tokens, not their hashes")
        check_preamble(prompt.tokens, preamble)
        behind = token_digest(preamble) if preamble.size else b""
        found = self.find(_name_of(replace(prompt, behind=behind)), prompt.tokens[preamble.size :])
        return [range(run.start + preamble.size, run.stop + preamble.size) for run in found]

    def _candidates(self, name: bytes, hashes: Hashes) -> list[int]:
        """Return the places where a document may begin, in order."""
        with self._lock:
            known = self._anchors.get(name)
            if known is None:
                anchors = np.array(sorted(self._alike.get(name, ())) or [PRIME], np.uint64)
                sieve = np.zeros(SIEVE, np.bool_)
                sieve[anchors % np.uint64(SIEVE)] = True
                if len(self._anchors) == SIEVES_MAX:
                    self._anchors.clear()
                known = self._anchors[name] = anchors, sieve
        anchors, sieve = known
        rest = np.flatnonzero(sieve[hashes % np.uint64(SIEVE)])
        places = np.minimum(np.searchsorted(anchors, hashes[rest]), len(anchors) - 1)
        kept: list[int] = rest[anchors[places] == hashes[rest]].tolist()
        return kept

    def hashes(self, tokens: Tokens, length: int = ANCHOR_TOKENS) -> Hashes:
        """Return the hash of each window of ``length`` tokens, a power of two: u64 [tokens - length + 1].

        The hash of two adjacent windows is h(left) x^length + h(right), so that windows double in each step. Two folds
        of 31 bits replace the modulus of 2^31 - 1, and are faster.
        """
        windows = max(0, len(tokens) - length + 1)
        hashes = np.empty(windows, np.uint64)
        for start in range(0, windows, BLOCK_TOKENS):
            values = tokens[start : start + BLOCK_TOKENS + length - 1].astype(np.uint64)
            power, width = self._point, 1
            while width < length:
                values = _folded(_folded(values[:-width] * np.uint64(power) + values[width:]))
                power, width = power * power % PRIME, 2 * width
            hashes[start : start + BLOCK_TOKENS] = values % np.uint64(PRIME)
        return hashes


def _name_of(prompt: Prompt) -> bytes:
    """Return a name of the model and the preamble: a document behind another preamble has another cache."""
    return fingerprint(prompt.spec, prompt.spec.kind) + prompt.behind


def _folded(values: Hashes) -> Hashes:
    """Return a congruent, smaller number: below 2^33 for a product of a u32 and a u31, at most 2^31 + 2 for such a
    result."""
    return (values & np.uint64(PRIME)) + (values >> np.uint64(31))
