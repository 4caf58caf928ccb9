"""Names a request's cache: by its tokens and what else it depends on, or by vLLM's hashes of both."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra, Tokens
from kvstore.seams import SystemRandom
from kvstore_client.engines.vllm.documents import own_salt
from kvstore_client.engines.vllm.drafts import Draft
from kvstore_client.engines.vllm.hashes import ALGORITHM, DEFAULT_SEED, block_hashes, given_hashes, seed_of_process
from kvstore_client.engines.vllm.objects import EngineConfig, EngineRequest
from kvstore_client.prompt import PageHashes

_log = logging.getLogger("kvstore.vllm")


def check_algorithm(digests: str, algorithm: str, draft: Draft | None = None) -> None:
    """Raise InvalidRequest for hashes that cannot be names: pickled ones differ between Pythons, xxhash's collide, and
    none has the token behind its block."""
    if digests == "vllm" and algorithm != ALGORITHM:
        raise InvalidRequest(
            f'"digests": "vllm" needs --prefix-caching-hash-algo {ALGORITHM}, not {algorithm}: others are not the same '
            'everywhere, or can be made to collide; set it, or leave "digests" out of kv_connector_extra_config'
        )
    if digests == "vllm" and draft is not None and draft.reads_ahead:
        raise InvalidRequest(
            'the draft reads a token ahead, which vLLM\'s hash of a block does not have: leave "digests" out of '
            "kv_connector_extra_config"
        )


def check_items(vllm_config: EngineConfig) -> None:
    """Raise InvalidRequest where vLLM calls images and sounds by a number, the same in each process, for want of a
    cache of its own that needs the hash of their content."""
    items = getattr(vllm_config.model_config, "multimodal_config", None)
    prefixes = getattr(getattr(vllm_config, "cache_config", None), "enable_prefix_caching", True)
    if items is None or prefixes or getattr(items, "language_model_only", False):
        return
    if not getattr(items, "mm_processor_cache_gb", 1):
        raise InvalidRequest(
            "without a prefix cache and a cache of processed items vLLM numbers images and sounds, so that different "
            "ones have one name: set --enable-prefix-caching, or --mm-processor-cache-gb above 0; or "
            "--language-model-only, where there are none"
        )


class Naming:
    """Names the computed caches of one scheduler's requests. ``ahead_tokens``: the size of a chunk, where a draft reads
    the next token (see ``next_tokens``); else 0."""

    def __init__(self, digests: str, block_tokens: int, ahead_tokens: int = 0) -> None:
        self._by_hashes = digests == "vllm"
        self._block_tokens = block_tokens
        self._ahead_tokens = ahead_tokens
        self._seed = seed_of_process()
        self._has_told = False
        self._era = b""
        """It tells the weights since the last reset from those before; empty: there was none."""
        if self._by_hashes and self._seed != DEFAULT_SEED:
            _log.warning(
                "kvstore: PYTHONHASHSEED=%s seeds vLLM's block hashes: engines and routers with another seed, or none, "
                "share nothing with this one",
                self._seed,
            )

    def begin_anew(self) -> None:
        """Name nothing from now on as it was named before."""
        self._era = SystemRandom().bytes(16)

    @property
    def is_common(self) -> bool:
        """False once other engines name nothing as this one does."""
        return not self._era

    def can_name(self, request: EngineRequest) -> bool:
        """Return True when the name covers all that the request's cache depends on. With vLLM's hashes, computes each
        request's first hash itself: a vLLM that hashes differently is thus noticed."""
        if getattr(request, "prompt_embeds", None) is not None:
            return False
        step = self._block_tokens
        if not self._by_hashes or request.num_tokens < step:
            return True
        lora = getattr(request, "lora_request", None)
        wanted = block_hashes(
            request.all_token_ids[:step], step, seed=self._seed, salt=getattr(request, "cache_salt", None),
            lora=(lora.lora_name, lora.lora_path) if lora else None,
            items=items_of(request),
        )  # fmt: skip
        found = request.block_hashes
        is_known = bool(len(found) == request.num_tokens // step and found[0] == wanted[0])
        if not is_known and not self._has_told:
            self._has_told = True
            _log.error(
                "kvstore: vLLM's block hashes are not those of %s with blocks of %d tokens and the seed %r: nothing is "
                'loaded or kept; leave "digests" out of kv_connector_extra_config',
                ALGORITHM, step, self._seed,
            )  # fmt: skip
        return is_known

    def prompt(self, request: EngineRequest, token_count: int) -> Tokens | PageHashes:
        """Return the request's leading tokens, as far as they are hashed, in whole blocks, in the client's form."""
        tokens = np.asarray(request.all_token_ids[:token_count], np.uint32)
        if not self._by_hashes:
            return tokens
        hashes = list(request.block_hashes[: token_count // self._block_tokens])
        if self._era:
            hashes = [hashlib.sha256(self._era + each).digest() for each in hashes]
        return given_hashes(hashes, self._block_tokens, tokens[: len(hashes) * self._block_tokens], self._seed)

    def extras(self, request: EngineRequest) -> tuple[Extra, ...]:
        """Return what the request's cache depends on beside its tokens. vLLM's hashes include it already."""
        if self._by_hashes:
            return ()
        ahead = next_tokens(request.all_token_ids, self._ahead_tokens, items_of(request)) if self._ahead_tokens else ()
        era = (Extra(0, b"reset\0" + self._era),) if self._era else ()
        return (*era, *extras_of(request), *ahead)

    def sure_tokens(self, stored: int) -> int:
        """Return how many of so many stored tokens are named by all that their cache depends on. Where a draft reads
        the next token, the last one of a partial chunk is not."""
        is_partial = self._ahead_tokens and stored % self._ahead_tokens
        return stored - 1 if is_partial else stored


def next_tokens(
    tokens: Sequence[int], chunk_tokens: int, items: Sequence[tuple[int, int, str]] = ()
) -> tuple[Extra, ...]:  # fmt: skip
    """Return, for each whole chunk that has one, the token behind it, and the image that begins there (``items``: as
    ``items_of``): a draft that reads ahead has it in its cache of the chunk's last token."""
    begins = {offset: name for offset, _, name in items}
    ends = range(chunk_tokens, len(tokens), chunk_tokens)
    return tuple(Extra(end - 1, f"next\0{tokens[end]}\0{begins.get(end, '')}".encode()) for end in ends)


def items_of(request: EngineRequest) -> list[tuple[int, int, str]]:
    """Return (first token, token count, identifier) of each of the request's images and sounds."""
    features = getattr(request, "mm_features", None) or ()
    return [(int(each.mm_position.offset), int(each.mm_position.length), str(each.identifier)) for each in features]


def extras_of(request: EngineRequest) -> tuple[Extra, ...]:
    """Return a request's salt, and its images and sounds with their positions, as extras."""
    extras = []
    salt = own_salt(request)
    if salt:
        extras.append(Extra(0, b"salt\0" + salt.encode()))
    extras += [Extra(offset, f"mm\0{name}\0{length}".encode()) for offset, length, name in items_of(request)]
    return tuple(extras)


class TokensBehind:
    """The token behind each block, as the draft read it when the block was computed. vLLM's prefix cache knows a block
    by its own tokens, and gives a request the first one of several, whose draft's cache may be of another token behind
    it. Such blocks are not kept. ``chunk_tokens``: as for ``Naming``'s ``ahead_tokens``; 0: no draft reads ahead."""

    def __init__(self, block_tokens: int, chunk_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._tokens: dict[int, tuple[int, str] | str] = {}
        """By block, with the image that begins there; of one whose token was not known when it was computed, the id of
        the request that will tell it."""

    def computed(self, request: EngineRequest, blocks: list[int], start: int, stop: int) -> None:
        """Note that a request's tokens ``start .. stop`` are computed, or loaded, in these of its blocks. Where a
        session streams its input, the token that was sampled last is dropped once the draft has read it: of its blocks
        nothing is known."""
        if not self._chunk_tokens:
            return
        size, tokens, name = self._block_tokens, request.all_token_ids, str(request.request_id)
        first = start // size
        if getattr(request, "resumable", False):
            self.forget(blocks[first : -(-stop // size)])
            return
        for place, block in enumerate(blocks[max(0, first - 1) : stop // size], max(1, first)):
            if place > first or self._tokens.get(block) == name:
                end = place * size
                self._tokens[block] = (tokens[end], _begins(request).get(end, "")) if end < len(tokens) else name

    def forget(self, blocks: Iterable[int]) -> None:
        """Note blocks of which it will not be known."""
        for each in blocks:
            self._tokens.pop(each, None)

    def are_of(self, request: EngineRequest, blocks: list[int]) -> bool:
        """Return True when the draft's cache in a request's first blocks is of its tokens, as far as their names say
        (see ``next_tokens``): not that of the last token of a partial chunk, or of all."""
        if not self._chunk_tokens:
            return True
        size, tokens = self._block_tokens, request.all_token_ids
        until = len(blocks) * size
        is_open = until % self._chunk_tokens or until >= len(tokens)
        named = blocks[:-1] if is_open else blocks
        begins = _begins(request)
        return all(
            self._tokens.get(each) == (tokens[end], begins.get(end, ""))
            for each, end in zip(named, range(size, len(tokens), size), strict=False)
        )


def _begins(request: EngineRequest) -> dict[int, str]:
    """Return a request's images by the tokens at which they begin."""
    return {offset: name for offset, _, name in items_of(request)}
