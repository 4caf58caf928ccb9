"""The encoding of the copies that a shared tier gets, chosen per model by what was measured (``encoding = auto``).

Saved: the bytes that lz4 leaves out, at the seconds that the tier takes for a byte, once written and once read, and at
what the setting says that a stored byte is worth. Spent: encoding once and decoding once. A model of which nothing was
measured yet is raw. A chosen encoding stays until the other one wins clearly, so that noise does not change it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.chunk import SAVES_MIN, EncodingCost
from kvstore.spec import Encoding, encoding_of

FIRST_COUNT = 3
"""The first chunks of a model, which are measured. They are written raw."""
AGAIN_COUNT = 1024
"""Then every so manieth chunk is measured and written raw: what a line and a processor give changes."""
KEEP = 0.25
"""The share by which the other encoding must win."""
NEWEST = 0.25
"""The weight of the newest measurement in what is known. The first ones count alike: the first of all is slow."""
LINE_BYTES_MIN = 64 << 10
"""A smaller write, as a canary is, tells of its request and not of the line."""
ASKED_COUNT = 16
MODEL_COUNT_MAX = 1024
"""Models that are kept apart; beyond that the least recently written is forgotten, and measured anew."""


@dataclass(frozen=True, slots=True)
class EncodingFigures:
    """One model's choice and its reasons. ``ratio``: stored bytes per raw byte. ``line_bytes_per_s``: how fast the tier
    took bytes. Rates are in raw bytes; all are 0 until they were measured."""

    fingerprint: bytes
    encoding: str = "raw"
    sample_count: int = 0
    ratio: float = 0.0
    encode_bytes_per_s: float = 0.0
    decode_bytes_per_s: float = 0.0
    line_bytes_per_s: float = 0.0


class CopyWay(NamedTuple):
    """The encoding in which one chunk goes to the tier. ``is_measured``: lz4 is tried on it first."""

    encoding: Encoding
    is_measured: bool


def pays(cost: EncodingCost, line_s: float, paid_s: float, *, is_chosen: bool) -> bool:
    """Return True when lz4 saves more seconds than it takes. ``line_s``: the tier's seconds for a byte, 0: not known.
    ``paid_s``: the seconds that a byte which is not stored is worth. ``is_chosen``: lz4 is the present choice."""
    saved = 1 - cost.ratio
    if saved < SAVES_MIN:
        return False
    saved_s = saved * (2 * line_s + paid_s)
    return saved_s > (cost.encode_s + cost.decode_s) * (1 - KEEP if is_chosen else 1 + KEEP)


@dataclass(slots=True)
class _Model:
    chunk_count: int = 0
    sample_count: int = 0
    cost: EncodingCost | None = None
    is_encoded: bool = False


@dataclass(slots=True)
class EncodingChoice:
    """A tier's choices. ``setting``: one of SHARED_ENCODING_SETTINGS. ``paid_s``: see ``pays``."""

    setting: str
    paid_s: float = 0.0
    _line_s: float = 0.0
    _asked_s: deque[float] = field(default_factory=lambda: deque(maxlen=ASKED_COUNT))
    _models: OrderedDict[bytes, _Model] = field(default_factory=OrderedDict)

    def way_of(self, fingerprint: bytes) -> CopyWay:
        """Return how the model's next chunk goes to the tier."""
        if self.setting != "auto":
            return CopyWay(encoding_of(self.setting), is_measured=False)
        model = self._models.setdefault(fingerprint, _Model())
        self._models.move_to_end(fingerprint)
        if len(self._models) > MODEL_COUNT_MAX:
            self._models.popitem(last=False)
        number, model.chunk_count = model.chunk_count, model.chunk_count + 1
        if number < FIRST_COUNT or number % AGAIN_COUNT == 0:
            return CopyWay(Encoding.RAW, is_measured=True)
        if model.cost is not None and model.sample_count >= FIRST_COUNT:
            model.is_encoded = pays(model.cost, self._line_s, self.paid_s, is_chosen=model.is_encoded)
        return CopyWay(Encoding.LZ4 if model.is_encoded else Encoding.RAW, is_measured=False)

    def measured(self, fingerprint: bytes, cost: EncodingCost) -> None:
        """Count what encoding and decoding one chunk took."""
        model = self._models.get(fingerprint)
        if model is None:
            return
        model.sample_count += 1
        old = model.cost or cost
        share = max(1 / model.sample_count, NEWEST)
        model.cost = EncodingCost(*(_mixed(before, now, share) for before, now in zip(old, cost, strict=True)))

    def answered(self, seconds: float) -> None:
        """Count the time of a request without bytes: a write takes so long before its bytes do."""
        self._asked_s.append(seconds)

    def sent(self, byte_count: int, seconds: float) -> None:
        """Count the time of a write that was not encoded."""
        if self.setting == "auto" and byte_count >= LINE_BYTES_MIN:
            line_s = max(seconds - min(self._asked_s, default=0.0), 0.0) / byte_count
            self._line_s = _mixed(self._line_s, line_s) if self._line_s else line_s

    def figures(self) -> tuple[EncodingFigures, ...]:
        """Return every model's choice and its reasons; nothing where the setting is the choice."""
        return tuple(self._figures(fingerprint, model) for fingerprint, model in self._models.items())

    def _figures(self, fingerprint: bytes, model: _Model) -> EncodingFigures:
        encoding = "lz4" if model.is_encoded else "raw"
        found = EncodingFigures(fingerprint, encoding, model.sample_count, line_bytes_per_s=_rate(self._line_s))
        if model.cost is None:
            return found
        ratio, encode_s, decode_s = model.cost
        return replace(found, ratio=ratio, encode_bytes_per_s=_rate(encode_s), decode_bytes_per_s=_rate(decode_s))


def _mixed(before: float, now: float, share: float = NEWEST) -> float:
    return before + share * (now - before)


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds else 0.0
