"""What a call asks about: tokens of a model, checked and cut into chunks. Nothing is sent before this is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra, Tokens, chain_digests, token_array
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.arrays import is_tensor

_EXACTNESS = {Exactness.EXACT: 1, Exactness.DERIVED: 2}


@dataclass(frozen=True)
class Prompt:
    """Tokens, the digests of their chunks, and what else their cache depends on."""

    spec: ModelSpec
    tokens: Tokens
    digests: list[bytes]
    extras: tuple[Extra, ...]
    exactness: int
    """The wire's number."""

    @staticmethod
    def of(spec: ModelSpec, tokens: Any, extras: Sequence[Extra], exactness: Exactness) -> Prompt:
        """Tokens may be a list, an array or a tensor on any device. Raises InvalidRequest naming what is wrong."""
        if not isinstance(spec, ModelSpec):
            raise InvalidRequest(f"spec must be a ModelSpec, not {type(spec).__name__}")
        if not spec.layers:
            raise InvalidRequest("spec has no layers: give the model's, or keep opaque values with put_bytes")
        if not isinstance(extras, Sequence) or not all(isinstance(extra, Extra) for extra in extras):
            raise InvalidRequest("extras must be a sequence of Extra(position, data)")
        if exactness not in _EXACTNESS:
            raise InvalidRequest(f"exactness must be one of {', '.join(map(str, Exactness))}, not {exactness!r:.80}")
        array = _checked_tokens(tokens, spec.vocab_size)
        digests = chain_digests(array, spec.chunk_tokens, extras)
        return Prompt(spec, array, digests, tuple(extras), _EXACTNESS[exactness])

    @staticmethod
    def known(spec: ModelSpec, digests: list[bytes], exactness: int) -> Prompt:
        """One that another process made, of which only the digests are known here."""
        return Prompt(spec, np.zeros(0, np.uint32), digests, (), exactness)


def _checked_tokens(tokens: Any, vocab_size: int) -> Tokens:
    if is_tensor(tokens) and tokens.is_cuda:
        tokens = tokens.cpu()
    try:
        return token_array(tokens, vocab_size)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"tokens must be one run of whole numbers: {error}") from error
