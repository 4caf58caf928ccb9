"""Groups of layers that share a block table. Most models have one; vLLM's hybrid allocator gives windowed layers tables
of their own, in which blocks that have left the window are free for others, and the null block stands in their place.

A chunk is kept whole, so it is kept by the step that completes it: then all its blocks are still there. What is loaded
goes into the blocks that are there, which are those of each group's last window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore_client.engines.vllm.settings import ConnectorSettings

CHUNK_TOKENS = 256
"""The size of a chunk where no setting says another one, and every window is at least as long."""
NULL_BLOCK = 0
"""The block that stands in a windowed group's table where there is none."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers with one block table. ``index``: its place among vLLM's groups; ``layers``: their numbers, ascending.
    ``window``: the number of tokens of which vLLM keeps blocks; 0: all."""

    index: int
    layers: tuple[int, ...]
    block_tokens: int
    window: int = 0

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        """Return [stop]: the slot of each of the first ``stop`` tokens; -1 before ``start``, and where no block is."""
        blocks = np.asarray(block_ids, np.int64)
        tokens = np.arange(stop, dtype=np.int64)
        of_tokens = blocks[tokens // self.block_tokens]
        slots = of_tokens * self.block_tokens + tokens % self.block_tokens
        slots[:start] = -1
        if self.window:
            slots[of_tokens == NULL_BLOCK] = -1
        return slots

    def held_from(self, block_ids: Sequence[int]) -> int:
        """Return the first token from which on all blocks of a request are there."""
        if not self.window:
            return 0
        nulls = (place for place in range(len(block_ids) - 1, -1, -1) if block_ids[place] == NULL_BLOCK)
        return (next(nulls, -1) + 1) * self.block_tokens

    @property
    def chunk_tokens_max(self) -> int:
        """The most tokens of a chunk of which no block has left the window before the step that completes it. That step
        begins within the chunk's last block at the latest, and vLLM frees whole blocks."""
        return -(-self.window // self.block_tokens) * self.block_tokens


def chunk_tokens_of(groups: Sequence[LayerGroup], block_tokens: int, settings: ConnectorSettings) -> int:
    """Return the size of a chunk. Raises InvalidRequest where it is no multiple of ``block_tokens``, vLLM's block, or a
    window is shorter."""
    longest = min((each.chunk_tokens_max for each in groups if each.window), default=None)
    given = settings.chunk_tokens
    if longest is None or (given is not None and given <= longest):
        count = CHUNK_TOKENS if given is None else given
        if count % block_tokens:
            raise InvalidRequest(
                f"{settings.WHERE}: chunk_tokens {count} must be a multiple of vLLM's block of {block_tokens} tokens"
            )
        return count
    count = min(CHUNK_TOKENS, longest) // block_tokens * block_tokens
    if given is not None or not count:
        raise InvalidRequest(
            f"{settings.WHERE}: chunk_tokens {given or block_tokens}: vLLM frees blocks that have left a window, and "
            f"keeps {longest} tokens in whole blocks, so that not all of such a chunk is there once it is computed: "
            f"set chunk_tokens to at most {longest}, in blocks of {block_tokens}, {_one_table(groups)}"
        )
    return count


def _one_table(groups: Sequence[LayerGroup]) -> str:
    """Return how to have one table that keeps all blocks. vLLM makes one only where some layer has no window."""
    flag = (
        "--disable-sliding-window (the longest context is the window then)"
        if all(each.window for each in groups)
        else "--disable-hybrid-kv-cache-manager"
    )
    return f"or set {flag}"


def check_groups(groups: Sequence[LayerGroup], settings: ConnectorSettings, *, has_draft: bool) -> None:
    """Raise InvalidRequest for settings that need one block table that keeps all blocks, where that is not so."""
    wrong = []
    if settings.load == "layerwise":
        wrong.append('"load": "layerwise" (vLLM takes back no such load that fails): set "load": "async"')
    if settings.planning != "off":
        wrong.append('"planning" (a load brings less than what is stored): set "planning": "off"')
    if settings.digests == "vllm" and len({each.block_tokens for each in groups}) > 1:
        wrong.append('"digests": "vllm" (the groups\' blocks differ in size): set "digests": "kvstore"')
    if has_draft:
        wrong.append("a draft with a cache of its own (whose table it is in is not known): do without it")
    if wrong:
        raise InvalidRequest(
            f"the layers of this model have {len(groups)} block tables, or windows, which cannot be combined with "
            f"{'; '.join(wrong)}; {_one_table(groups)}"
        )
