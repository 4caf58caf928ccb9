"""Seeds that may be used to choose, and seeds that may only be reported on: disjoint, committed, checked here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

from kvstore.errors import InvalidRequest

Purpose = Literal["calibration", "evaluation"]


@dataclass(frozen=True)
class Seeds:
    """Committed seeds of one purpose. Seeds that are not committed for it cannot be made into this."""

    purpose: Purpose
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        committed = _committed()
        if self.purpose not in committed:
            raise InvalidRequest(f"purpose is {self.purpose!r}: calibration or evaluation")
        strange = sorted(set(self.numbers) - set(committed[self.purpose]))
        if strange or not self.numbers:
            known = ", ".join(map(str, committed[self.purpose]))
            raise InvalidRequest(
                f"seeds {strange} are not committed for {self.purpose} in seeds.toml: choose from {known}"
            )

    def to_choose_with(self) -> Seeds:
        """These seeds, for whatever tunes, profiles or picks; InvalidRequest for evaluation seeds."""
        if self.purpose != "calibration":
            raise InvalidRequest(
                f"seeds {list(self.numbers)} are evaluation seeds: they are for reported figures only, "
                "calibrate with seeds.calibration()"
            )
        return self


def calibration() -> Seeds:
    """All seeds that may choose."""
    return Seeds("calibration", _committed()["calibration"])


def evaluation() -> Seeds:
    """All seeds that figures are reported on."""
    return Seeds("evaluation", _committed()["evaluation"])


@cache
def _committed() -> dict[str, tuple[int, ...]]:
    """The file's two lists; a seed in both stops everything that uses either."""
    text = resources.files(__package__).joinpath("seeds.toml").read_text(encoding="utf-8")
    lists = {purpose: tuple(tomllib.loads(text)[purpose]) for purpose in get_args(Purpose)}
    both = sorted(set(lists["calibration"]) & set(lists["evaluation"]))
    if both:
        raise InvalidRequest(f"seeds {both} are in both lists of seeds.toml: remove them from one")
    return lists
