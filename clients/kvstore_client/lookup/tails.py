"""Partial chunks: finds the longest that a prompt begins with, and names those that a new chunk begins with.

The sidecar says which lengths there are. The client computes the digests of its own tokens at these lengths, and asks
which of them is stored. A digest covers all tokens up to its length, so a hit is the prompt's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from kvstore.keys import ROOT_DIGEST, SUPERSEDES_MAX
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.lookup.presence import LookupAnswer, Presence
from kvstore_client.planes.session import ClientSession
from kvstore_client.prompt import Prompt

NAMES_MAX = 1024
"""The most digests asked for at a time; chunks of up to so many tokens need one call."""
HASHED_TOKENS_MAX = 16 << 20
"""The most tokens hashed for one prompt. Only chunks of more than 4,096 tokens with a partial chunk of nearly every
length reach it; their shorter partial chunks are not found then, and not named as superseded."""
FirstHeld = Callable[[Sequence[bytes]], int]
"""Returns the number of the first of these digests that is stored, from 1 on; 0: none."""


class Said(Protocol):
    """The partial chunks after the last hit, as a lookup or a fetch tells them. ``tail_lengths`` is empty while
    ``tails`` lists all of them."""

    @property
    def tails(self) -> Sequence[pb.PartialTail]: ...

    @property
    def tail_lengths(self) -> bytes: ...


def longest_tail(prompt: Prompt, prefix: int, hits: int, said: Said, held: FirstHeld) -> tuple[int, bytes] | None:
    """Return the longest stored partial chunk after the prefix that holds exactly our tokens: (token count, digest)."""
    parent = prompt.digests[hits - 1] if hits else ROOT_DIGEST
    if not said.tail_lengths:
        if not said.tails:
            return None
        named = {(tail.token_count, tail.digest) for tail in said.tails}
        lengths = sorted({count for count, _ in named}, reverse=True)
        return next((name for name in _names(prompt, prefix, parent, lengths) if name in named), None)
    names = _names(prompt, prefix, parent, reversed(lengths_of(said.tail_lengths)))
    while some := list(islice(names, NAMES_MAX)):
        found = held([digest for _, digest in some])
        if 0 < found <= len(some):
            return some[found - 1]
    return None


def first_held(
    session: ClientSession, name: bytes, prompt: Prompt, hidden_layers: Sequence[int], timeout_s: float,
    digests: Sequence[bytes],
) -> int:  # fmt: skip
    """Answer as a ``FirstHeld``, with the hidden layers: from shared memory, or by a call. Raises the typed error of a
    failed call."""
    if session.presence is not None and not hidden_layers:
        seen = session.presence.first_held(prompt.chain(name, ()).salt, digests)
        if seen is not None:
            return seen
    request = pb.LookupRequest(query=prompt.query(name, (), hidden_layers), tail_digests=b"".join(digests))
    reply: pb.LookupResponse = session.call(session.cache.Lookup, request, timeout_s)
    return reply.tail_found


def peeked_tail(
    presence: Presence, name: bytes, prompt: Prompt, prefix: int, seen: LookupAnswer
) -> tuple[int, bytes] | None:  # fmt: skip
    """Return the longest partial chunk after the prefix, (token count, digest), from shared memory; 0 tokens: there is
    none. None when only a call can tell."""
    needs_call = False

    def held(digests: Sequence[bytes]) -> int:
        nonlocal needs_call
        found = presence.first_held(prompt.chain(name, ()).salt, digests)
        needs_call |= found is None
        return found or 0

    tail = longest_tail(prompt, prefix, seen.hit_count, seen, held)
    return None if needs_call else tail or (0, b"")


def superseded(prompt: Prompt, beside: Iterable[pb.TailsBeside]) -> bytes:
    """Return digests of the stored partial chunks that the prompt's own chunks begin with, up to a limit. ``beside``:
    the lengths that are stored beside each chunk."""
    step, found = prompt.spec.chunk_tokens, bytearray()
    for each in beside:
        if each.chunk >= len(prompt.digests):
            continue  # no correct sidecar sends this
        start = each.chunk * step
        count = min(step, prompt.token_count - start)
        parent = prompt.digests[each.chunk - 1] if each.chunk else ROOT_DIGEST
        shorter = [length for length in reversed(lengths_of(each.lengths)) if length < count]
        room = SUPERSEDES_MAX - len(found) // len(ROOT_DIGEST)
        for _, digest in islice(_names(prompt, start, parent, shorter), room):
            found += digest
    return bytes(found)


def lengths_of(bits: bytes) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    return [8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def _names(prompt: Prompt, start: int, parent: bytes, lengths: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Yield (token count, digest) of the prompt's partial chunks from ``start`` on, in the order of ``lengths``."""
    hashed = 0
    for count in lengths:
        if not 0 < count <= min(prompt.token_count - start, prompt.spec.chunk_tokens):
            continue
        hashed += count
        if hashed > HASHED_TOKENS_MAX:
            return
        digest = prompt.tail_digest(start, start + count, parent)
        if digest:
            yield count, digest
