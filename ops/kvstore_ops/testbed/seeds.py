"""Seeds of contexts that may choose settings, and seeds for reported figures only. The two are committed and disjoint;
this module checks both."""

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
    """Committed seeds of one purpose. Raises: InvalidRequest for seeds that are not committed for the purpose."""

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
        """Return these seeds. Code that tunes, profiles or picks calls it. Raises InvalidRequest for evaluation
        seeds."""
        if self.purpose != "calibration":
            raise InvalidRequest(
                f"seeds {list(self.numbers)} are evaluation seeds: they are for reported figures only, "
                "calibrate with seeds.calibration()"
            )
        return self


def calibration() -> Seeds:
    """Return all seeds that may choose."""
    return Seeds("calibration", _committed()["calibration"])


def evaluation() -> Seeds:
    """Return all seeds of reported figures."""
    return Seeds("evaluation", _committed()["evaluation"])


@cache
def _committed() -> dict[str, tuple[int, ...]]:
    """Return the file's two lists by purpose. Raises InvalidRequest for a seed that is in both."""
    text = resources.files(__package__).joinpath("seeds.toml").read_text(encoding="utf-8")
    lists = {purpose: tuple(tomllib.loads(text)[purpose]) for purpose in get_args(Purpose)}
    both = sorted(set(lists["calibration"]) & set(lists["evaluation"]))
    if both:
        raise InvalidRequest(f"seeds {both} are in both lists of seeds.toml: remove them from one")
    return lists
