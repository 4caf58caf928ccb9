"""Speculative decoding, where the model that drafts tokens keeps a cache beside the target's: its layers are kept with
the target's, under a name that has its weights, too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore_client.engines.vllm.objects import DraftConfig, EngineConfig

WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa")
"""Kinds of speculative decoding whose drafts keep no cache of their own."""
OF_HIDDEN_STATES = ("eagle", "eagle3", "mtp")
"""Kinds whose drafts read the target's hidden states. Their cache of a token depends on the token behind it."""
OF_TOKENS = ("draft_model",)
REFUSED = {
    "parallel_drafting": "which of the draft's caches it writes is not known",
    "num_speculative_tokens_per_batch_size": "which of the draft's caches it writes is not known",
    "disable_eagle_block_drop": "the draft's cache of a block's last token may then be another prompt's",
    "use_heterogeneous_vocab": "the draft's cache then depends on two tokenizers, which no key names",
}
"""Fields of vLLM's settings of it, and why they may not be set."""


@dataclass(frozen=True)
class Draft:
    """A draft with a cache. ``reads_ahead``: its cache of a token depends on the next token, so that of a prefix's last
    token may be of another prompt. ``token_count_max``: a step that has a longer sequence is without drafts, and no
    cache of the draft is written in it."""

    reads_ahead: bool
    token_count_max: int


def draft_of(vllm_config: EngineConfig) -> Draft | None:
    """Return the draft of an engine; None where there is none, or it keeps no cache. Raises InvalidRequest naming the
    vLLM setting that kvstore cannot serve."""
    found = getattr(vllm_config, "speculative_config", None)
    if found is None or found.method in WITHOUT_CACHE:
        return None
    if found.method not in (*OF_HIDDEN_STATES, *OF_TOKENS):
        known = ", ".join((*WITHOUT_CACHE, *OF_HIDDEN_STATES, *OF_TOKENS))
        raise InvalidRequest(
            f"speculative decoding by {found.method!r} keeps a cache that kvstore cannot name: use one of {known}, or "
            "none"
        )
    _check(found, vllm_config.cache_config.cache_dtype)
    reads_ahead, is_second = found.method in OF_HIDDEN_STATES, getattr(vllm_config, "use_v2_model_runner", False)
    # Of a prompt in pieces, vLLM's first model runner gives the draft the prompt's last token in the place of the one
    # behind the piece (prepare_next_token_ids_padded), unless it takes the tokens from the CPU.
    if reads_ahead and not is_second and not getattr(found, "disable_padded_drafter_batch", False):
        raise InvalidRequest(
            "where vLLM computes a prompt in pieces, the draft's cache of a piece's last token is of a token that does "
            'not follow: set "disable_padded_drafter_batch": true in --speculative-config (vLLM\'s second model runner '
            "does without)"
        )
    if reads_ahead and is_second:  # it drafts in every step
        return Draft(reads_ahead, int(vllm_config.model_config.max_model_len))
    longest = int(found.draft_model_config.max_model_len)
    # vLLM adds what it drafts to the longest sequence; what it was ahead of the tokens that are sure is added, too.
    return Draft(reads_ahead, longest - 2 * int(found.num_speculative_tokens))


def _check(draft: DraftConfig, cache_dtype: str) -> None:
    own = getattr(draft, "kv_cache_dtype", None)
    if own not in (None, cache_dtype):
        raise InvalidRequest(
            f"the draft's cache is {own}, the target's {cache_dtype}: do without kv_cache_dtype in --speculative-config"
        )
    for name, reason in REFUSED.items():
        if getattr(draft, name, None):
            raise InvalidRequest(f"{name} in --speculative-config: {reason}; do without it")
    layer_count = getattr(draft.draft_model_config.hf_config, "n_predict", None) or 1
    if draft.method == "mtp" and layer_count != 1:
        raise InvalidRequest(
            f"a draft of {layer_count} layers, one for each token ahead: a chunk's name has one token behind it; run "
            "this model without --speculative-config, or without the connector"
        )


class Undrafted:
    """The blocks that have tokens without the draft's cache. Such blocks are not kept: what they hold of it is from
    before."""

    def __init__(self, draft: Draft | None, block_tokens: int) -> None:
        self._draft = draft
        self._block_tokens = block_tokens
        self._blocks: set[int] = set()

    def step(self, longest: int, written: Iterable[tuple[list[int], int, int]]) -> None:
        """Note a step whose longest sequence has so many tokens. ``written``: per request its blocks, and the numbers
        of the first token that the step computes, and of the one behind the last."""
        is_without = self._draft is not None and longest > self._draft.token_count_max
        if not is_without and not self._blocks:
            return
        size = self._block_tokens
        for blocks, start, stop in written:
            if is_without:
                self._blocks.update(blocks[start // size : -(-stop // size)])
            else:  # a block is whole again once all of it was computed anew
                self._blocks.difference_update(blocks[-(-start // size) : -(-stop // size)])

    def loaded(self, blocks: Iterable[int]) -> None:
        """Note blocks that are loaded whole."""
        self._blocks.difference_update(blocks)

    def has(self, blocks: Iterable[int]) -> bool:
        """Return True when one of these blocks is without it."""
        return not self._blocks.isdisjoint(blocks)
