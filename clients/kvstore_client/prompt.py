"""The subject of a call: tokens of a model, checked and cut into chunks. Nothing is sent before it passes the
checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.keys import (
    DIGEST_BYTES,
    Extra,
    Tokens,
    chain_digests,
    presence_salt,
    segment_digests,
    tail_digest,
    token_array,
    token_digest,
)  # fmt: skip
from kvstore.spec import Exactness, ModelSpec, Provenance
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import Tensor, check_memory, is_array, is_tensor
from kvstore_client.lookup.presence import Chain

EXACT = 1
IN_CONTEXT, STANDALONE = 1, 2
"""The wire's numbers of exactness and provenances."""
_EXACTNESS = {Exactness.EXACT: EXACT, Exactness.DERIVED: 2}
EXACTNESSES = {number: exactness for exactness, number in _EXACTNESS.items()}
_PROVENANCES = {IN_CONTEXT: Provenance.IN_CONTEXT, STANDALONE: Provenance.STANDALONE}
KEPT_MAX, KEPT_BYTES_MAX, KEPT_CHUNKS_MAX = 64, 64 << 10, 1024
"""The prompts that are kept, and how long each may be: each chunk has a digest."""
COUNT_MAX = 1024
"""The most readers of a ticket, and writers of a store."""
NO_TOKENS: Tokens = np.empty(0, np.uint32)
_SCHEME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class PageHashes:
    """A prompt given by its engine's own hashes, instead of its tokens: ``hashes[i]``, 32 bytes, names all that the
    cache of the first ``i + 1`` pages depends on. They become the chain digests: a chunk has the digest of its last
    page.

    ``scheme`` says how they were made ("vllm-sha256_cbor"). It is part of the namespace (the model's id, after a #), so
    that digests of two schemes, or an engine's and our own, never meet. ``tokens``: all of them; only a store needs
    them. The maker of the hashes vouches that they cover the tokens and whatever else the cache depends on beside the
    model. Raises: InvalidRequest.
    """

    scheme: str
    page_tokens: int
    hashes: Sequence[bytes]
    tokens: Tokens | None = None

    def __post_init__(self) -> None:
        if not _SCHEME.fullmatch(self.scheme):
            raise InvalidRequest(f"scheme {self.scheme!r:.80} must be 1..64 of a-z, 0-9 and . _ -")
        if self.page_tokens < 1 or any(len(each) != DIGEST_BYTES for each in self.hashes):
            raise InvalidRequest(f"hashes must be {DIGEST_BYTES} bytes each, of pages of 1 token or more")
        if self.tokens is not None and len(self.tokens) != self.size:
            raise InvalidRequest(f"{len(self.tokens)} tokens are not {len(self.hashes)} pages of {self.page_tokens}")

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.hashes) * self.page_tokens

    def spec_of(self, spec: ModelSpec) -> ModelSpec:
        """Return the model's spec, in the namespace of these hashes. Raises InvalidRequest."""
        if spec.chunk_tokens % self.page_tokens:
            raise InvalidRequest(f"pages of {self.page_tokens} tokens do not divide chunks of {spec.chunk_tokens}")
        return replace(spec, model_id=f"{spec.model_id}#{self.scheme}")

    def first(self, token_count: int) -> PageHashes:
        """Return the hashes of the whole pages among the first ``token_count`` tokens."""
        count = token_count // self.page_tokens
        tokens = None if self.tokens is None else self.tokens[: count * self.page_tokens]
        return replace(self, hashes=self.hashes[:count], tokens=tokens)

    def digest(self, stop: int) -> bytes:
        """Return the digest of the first ``stop`` tokens; empty when no page ends there."""
        return b"" if stop % self.page_tokens else self.hashes[stop // self.page_tokens - 1]


GivenTokens: TypeAlias = Sequence[int] | Tensor | PageHashes
"""A list, an array, a tensor on any device, or an engine's own hashes."""


@dataclass(frozen=True)
class Prompt:
    """Tokens, the digests of their chunks, and what else their cache depends on."""

    spec: ModelSpec
    tokens: Tokens | None
    digests: list[bytes]
    extras: tuple[Extra, ...]
    exactness: int
    """As the wire's number."""
    hashes: PageHashes | None = None
    provenance: int = IN_CONTEXT
    """As the wire's number."""
    is_claimed: bool = False
    """True when the caller gave an exactness."""
    behind: bytes = b""
    """The digest of the preamble that a segment was computed behind; empty: it was computed alone."""
    first_position: int = 0
    """The position of the first token when the cache was computed."""

    @staticmethod
    def segment(
        spec: ModelSpec, tokens: GivenTokens, extras: Sequence[Extra], exactness: Exactness | None,
        preamble: GivenTokens = (),
    ) -> Prompt:  # fmt: skip
        """Return the prompt of a document by itself, or behind a ``preamble``; positions of ``extras`` count from the
        document's first token. Raises InvalidRequest."""
        if isinstance(tokens, PageHashes):
            raise InvalidRequest("a segment needs its tokens: PageHashes depend on what comes before it")
        whole = Prompt.of(spec, tokens, extras, exactness)
        assert whole.tokens is not None
        before = preamble_tokens(preamble, spec)
        behind = token_digest(before) if before.size else b""
        digests = segment_digests(whole.tokens, spec.chunk_tokens, whole.extras, behind)
        return replace(
            whole, digests=digests, provenance=STANDALONE, behind=behind, first_position=int(before.size)
        )  # fmt: skip

    def chain(self, name: bytes, digests: Sequence[bytes]) -> Chain:
        """Return these chunks as a chain of the presence table."""
        salt = presence_salt(name, _PROVENANCES[self.provenance], EXACTNESSES[self.exactness])
        return Chain(salt, digests, self.spec.chunk_tokens)

    def query(self, name: bytes, digests: Sequence[bytes], hidden_layers: Sequence[int] = ()) -> pb.ChainQuery:
        """Return these chunks as a query for the wire."""
        return pb.ChainQuery(
            fingerprint=name, digests=b"".join(digests), hidden_layers=hidden_layers,
            exactness=self.exactness, provenance=self.provenance,  # type: ignore[arg-type]  # wire numbers
        )  # fmt: skip

    @staticmethod
    def of(spec: ModelSpec, tokens: GivenTokens, extras: Sequence[Extra], exactness: Exactness | None) -> Prompt:
        """Check the arguments of a call and return its prompt. ``tokens``: a list, an array, a tensor on any device, or
        PageHashes. ``exactness`` None: exact, not claimed: a store then refuses a cache known to be derived. Raises
        InvalidRequest naming what is wrong."""
        is_claimed, exactness = exactness is not None, exactness or Exactness.EXACT
        if not isinstance(spec, ModelSpec):
            raise InvalidRequest(f"spec must be a ModelSpec, not {type(spec).__name__}")
        if not spec.layers:
            raise InvalidRequest("spec has no layers: give the model's, or keep opaque values with put_bytes")
        if type(extras) is not tuple or extras:  # none, as usual, need no look
            if not isinstance(extras, Sequence) or not all(isinstance(extra, Extra) for extra in extras):
                raise InvalidRequest("extras must be a sequence of Extra(position, data)")
        if exactness not in _EXACTNESS:
            raise InvalidRequest(f"exactness must be one of {', '.join(map(str, Exactness))}, not {exactness!r:.80}")
        if isinstance(tokens, PageHashes):
            return replace(_by_hashes(spec, tokens, extras, exactness), is_claimed=is_claimed)
        if not extras and _may_be_kept(tokens, spec):
            return _kept(spec, tokens.tobytes(), tokens.dtype, exactness, is_claimed)
        return _by_tokens(spec, tokens, tuple(extras), exactness, is_claimed=is_claimed)

    @staticmethod
    def known(spec: ModelSpec, digests: list[bytes], exactness: int) -> Prompt:
        """Return the prompt of another process, of which only the digests are known here."""
        return Prompt(spec, None, digests, (), exactness)

    @property
    def token_count(self) -> int:
        return self.hashes.size if self.hashes is not None else 0 if self.tokens is None else int(self.tokens.size)

    def tail_digest(self, start: int, stop: int, parent: bytes) -> bytes:
        """Return the digest of the partial chunk ``start .. stop`` after ``parent``; empty when it has none."""
        if self.hashes is not None:
            return self.hashes.digest(stop)
        assert self.tokens is not None
        return tail_digest(self.tokens, start, stop, parent, self.extras)

    def token_digests(self) -> list[bytes]:
        """Return one digest per chunk, of its tokens. Raises InvalidRequest when the tokens are not known."""
        if self.tokens is None:
            raise InvalidRequest("a store needs the tokens beside their hashes: PageHashes(..., tokens=...)")
        step = self.spec.chunk_tokens
        return [token_digest(self.tokens[start : start + step]) for start in range(0, self.tokens.size, step)]


def check_count(count: Any, name: str) -> None:
    """Raise InvalidRequest unless ``count`` is a possible number of readers or writers."""
    try:
        known = 0 if isinstance(count, bool) else index(count)  # the wire takes no bool for a number
    except TypeError:
        known = 0
    if not 1 <= known <= COUNT_MAX:
        raise InvalidRequest(f"{name} must be a whole number in 1..{COUNT_MAX}, not {count!r:.80}")


def _may_be_kept(tokens: object, spec: ModelSpec) -> TypeGuard[NDArray[np.generic]]:
    """Return True for a short run of whole numbers that is numpy's own array."""
    if type(tokens) is not np.ndarray or tokens.ndim != 1 or tokens.size > KEPT_CHUNKS_MAX * spec.chunk_tokens:
        return False
    return tokens.dtype.kind in "iu" and tokens.nbytes <= KEPT_BYTES_MAX


def _by_tokens(
    spec: ModelSpec, tokens: GivenTokens, extras: tuple[Extra, ...], exactness: Exactness, *, is_claimed: bool
) -> Prompt:
    array = checked_tokens(tokens, spec.vocab_size)
    digests = chain_digests(array, spec.chunk_tokens, extras)
    return Prompt(spec, array, digests, extras, _EXACTNESS[exactness], is_claimed=is_claimed)


@lru_cache(maxsize=KEPT_MAX)
def _kept(spec: ModelSpec, data: bytes, dtype: np.dtype[np.generic], exactness: Exactness, is_claimed: bool) -> Prompt:
    """Return the prompt of an array's bytes. Kept, because a prompt that was looked up is fetched next, and its checks
    and digests are what a small fetch spends most on beside its bytes. It has a copy of the caller's tokens."""
    prompt = _by_tokens(spec, np.frombuffer(data, dtype), (), exactness, is_claimed=is_claimed)
    if prompt.tokens is not None:
        prompt.tokens.flags.writeable = False  # all callers share it
    return prompt


def _by_hashes(spec: ModelSpec, hashes: PageHashes, extras: Sequence[Extra], exactness: Exactness) -> Prompt:
    if extras:
        raise InvalidRequest("extras must be empty beside PageHashes: their engine's hashes cover what they stand for")
    named = hashes.spec_of(spec)
    tokens = None if hashes.tokens is None else checked_tokens(hashes.tokens, spec.vocab_size)
    stops = [*range(spec.chunk_tokens, hashes.size, spec.chunk_tokens), *([hashes.size] if hashes.size else [])]
    return Prompt(named, tokens, [hashes.digest(stop) for stop in stops], (), _EXACTNESS[exactness], hashes)


def preamble_tokens(preamble: GivenTokens, spec: ModelSpec) -> Tokens:
    """Return the tokens of the preamble that documents were computed behind; empty: none. Raises: InvalidRequest."""
    if isinstance(preamble, PageHashes):
        raise InvalidRequest("a preamble is given by its tokens: PageHashes cannot be compared with a prompt")
    try:
        return checked_tokens(preamble, spec.vocab_size)
    except InvalidRequest as error:
        raise InvalidRequest(f"preamble: {error.message}") from error


def check_preamble(tokens: Tokens, preamble: Tokens) -> None:
    """Raise InvalidRequest unless the prompt begins with the preamble: documents computed behind it are known only for
    such prompts."""
    if not np.array_equal(tokens[: preamble.size], preamble):
        raise InvalidRequest(
            f"preamble: the prompt does not begin with its {preamble.size} tokens; give the one that the documents "
            "were computed behind, and a prompt that begins with it"
        )


def checked_tokens(tokens: Any, vocab_size: int) -> Tokens:
    """Return tokens, given on any device, as an array. Raises: InvalidRequest for anything but one run of tokens."""
    if is_array(tokens):
        check_memory(tokens, "tokens")
    if is_tensor(tokens) and tokens.is_cuda:
        tokens = tokens.cpu()
    try:
        return token_array(tokens, vocab_size)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidRequest(f"tokens must be one run of whole numbers: {error}") from error
