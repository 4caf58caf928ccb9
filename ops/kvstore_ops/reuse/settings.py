"""The rows of the benchmark reuse: where a cache comes from, and what is computed again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from kvstore.planning import Recompute

PEAK = "suffix_peak"
ATTENTION = "suffix_attention"


class Asking(StrEnum):
    """The subject of a run: a model asked over its own caches; a sibling over that model's; or the model again, with
    other prompts and a few rows, of which the first was chosen before any of these prompts was asked."""

    OWN = "reuse"
    SIBLING = "reuse-sibling"
    ANEW = "reuse-anew"


@dataclass(frozen=True)
class Asked:
    """One row. ``origin``: documents that were computed "alone" or behind the "preamble", or a "sibling" model's cache
    of the prompt."""

    origin: str
    setting: Recompute

    @property
    def name(self) -> str:
        return f"{self.origin} {asdict(self.setting)}"


def _asked(origin: str, *settings: Recompute) -> list[Asked]:
    return [Asked(origin, each) for each in settings]


def _by(selector: str, *ratios: float) -> list[Recompute]:
    return [Recompute(0, -1, ratio, selector) for ratio in ratios]


def rounds_of(asking: Asking, scale: str, layer_count: int) -> list[list[Asked]]:
    """Return the rows in rounds: all prompts are asked with the rows of a round before the next round begins, so that a
    run that is cut short has whole rows."""
    reuse = Recompute.reuse()
    if asking is Asking.ANEW:
        return [_asked("alone", *_by(ATTENTION, 0.25, 0.2)) + _asked("preamble", *_by(PEAK, 0.3))]
    if asking is Asking.SIBLING:
        begin = layer_count // 4
        groups = [Recompute.droidspeak(begin, 2 * begin - 1), Recompute.droidspeak(begin, layer_count - 1)]
        return [_asked("sibling", reuse, *_by(PEAK, 0.1, 0.3), *groups)]
    if scale == "tiny":
        return [_asked("alone", reuse, *_by(ATTENTION, 0.2))]
    if scale == "quick":
        return [_asked("alone", reuse) + _asked("preamble", reuse, *_by(PEAK, 0.2))]
    first = _asked("preamble", reuse, *_by(PEAK, 0.1, 0.2, 0.3)) + _asked("alone", reuse)
    second = _asked("alone", *_by(ATTENTION, 0.2), Recompute.cacheblend(1, 0.15))
    second += _asked("preamble", *_by(ATTENTION, 0.1, 0.2), *_by(PEAK, 0.05, 0.5))
    return [first, second]
