"""Learns what mends cost, and says how much one may compute to be faster than vLLM."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.seams import Clock
from kvstore_client.engines.vllm.documents import WORTH_MAX
from kvstore_client.engines.vllm.planning import RequestPlanner
from kvstore_client.engines.vllm.step import Mended

SEEN_MIN, SEEN_MAX = 2, 8
"""Number of mends of which the usual cost is the median, the lower one of two: the first mend of a process pays for
what the others find ready, as a session."""
SEEN_S_MAX = 60.0
"""Seconds for which a mend is remembered: where none is worth it, some are made again once that is over, because
nothing else shows that mends have become faster."""
SHORTER_MAX = 4
"""A mend shows nothing of prompts more than so many times shorter: what they cost is measured with their own."""


class _Seen(NamedTuple):
    """A mend, and the clock's time of it."""

    mended: Mended
    at_s: float


class MendWorth:
    """Learns the cost of one engine's mends beside the tokens that they compute: calls, and many small steps, which
    weigh on short prompts. vLLM's own speed is the ``planner``'s."""

    def __init__(self, planner: RequestPlanner, clock: Clock, block_tokens: int) -> None:
        self._planner = planner
        self._clock = clock
        self._block_tokens = block_tokens
        self._seen = deque[_Seen](maxlen=SEEN_MAX)

    def mended(self, some: Iterable[Mended]) -> None:
        """Learn from prompts that a worker computed."""
        now_s = self._clock.monotonic()
        self._seen.extend(_Seen(each, now_s) for each in some)

    def computed_max(self, token_count: int, by_vllm: int) -> float:
        """Return how many tokens of a prompt a mend may compute; 0: none is worth it. ``by_vllm``: how many vLLM would,
        the last ones. Behind a mend vLLM computes the last block, too. Any thread may ask."""
        vllm_s = self._planner.computing_s(token_count - by_vllm, token_count)
        costs = self._costs(token_count)
        if not vllm_s or len(costs) < SEEN_MIN:
            return WORTH_MAX * by_vllm
        last_s = self._planner.computing_s((token_count - 1) // self._block_tokens * self._block_tokens, token_count)
        spent_s = max(0.0, statistics.median_low(costs)) + last_s
        return WORTH_MAX * by_vllm * max(0.0, 1.0 - spent_s / vllm_s)

    def _costs(self, token_count: int) -> list[float]:
        """Return the seconds that each mend took beside those of its tokens, by what is known of vLLM's speed now: of
        those that show what a mend of a prompt of ``token_count`` costs."""
        since_s, most = self._clock.monotonic() - SEEN_S_MAX, SHORTER_MAX * token_count
        seen = [each.mended for each in tuple(self._seen) if each.at_s >= since_s]
        return [self._cost(each) for each in seen if each.token_count <= most]

    def _cost(self, mended: Mended) -> float:
        token_s = self._planner.computing_s(0, mended.token_count) / mended.token_count
        return mended.seconds - mended.computed * token_s / WORTH_MAX
