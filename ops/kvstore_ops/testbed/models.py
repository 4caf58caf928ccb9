"""The testbed's models by name: what each starts from, which answers it gives, and how long it trains."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed import task


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A run of steps under one schedule: warm-up, then a cosine down to 3 % of the rate, counted in steps.

    span is the cosine's length in steps (0: this phase's own); a phase shorter than its span ends above the 3 %.
    """

    steps: int
    rate: float
    span: int = 0
    curriculum: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model: its depth and seed, the model it starts from (None: from nothing), and its answer to each value."""

    name: str
    layers: int
    seed: int
    phases: tuple[Phase, ...]
    start: str | None = None
    answers: tuple[int, ...] = tuple(range(task.VALUES))


def shifted(by: int, among: int = task.VALUES) -> tuple[int, ...]:
    """Answers v + by among the first `among` values; the others stay."""
    return tuple((v + by) % among if v < among else v for v in range(task.VALUES))


SEEDS = (2, 5)
"""Training seeds of the base models. Seeds 1, 3 and 4 stood still in stage 2 for 300 steps and more: they resolve every
reference where it stands, but answer a question about one with a value of any reference, not of the one asked for.
"""

BASE = (Phase(steps=1000, span=2300, rate=1e-3, curriculum=True), Phase(steps=400, rate=7e-4))
GROWN = (Phase(steps=100, span=300, rate=1e-3), Phase(steps=60, rate=7e-4))
HARSH = (Phase(steps=150, rate=7e-4),)
MILD = (Phase(steps=100, rate=4e-4),)
HARSH_DEEP = (Phase(steps=100, rate=7e-4),)
MILD_DEEP = (Phase(steps=60, rate=4e-4),)


def _recipes() -> dict[str, Recipe]:
    found = []
    for seed in SEEDS:
        found.append(Recipe(name=f"l6-s{seed}", layers=6, seed=seed, phases=BASE))
        found.append(Recipe(name=f"l12-s{seed}", layers=12, seed=seed, phases=GROWN, start=f"l6-s{seed}"))
        for layers, harsh, mild in ((6, HARSH, MILD), (12, HARSH_DEEP, MILD_DEEP)):
            base = f"l{layers}-s{seed}"
            for kind, answers, phases in (
                ("plus3", shifted(3), harsh),
                ("plus11", shifted(11), harsh),
                ("mild", shifted(1, 8), mild),
            ):
                name = f"{base}-{kind}"
                found.append(Recipe(name=name, layers=layers, seed=seed, phases=phases, start=base, answers=answers))
    return {recipe.name: recipe for recipe in found}


RECIPES = _recipes()


def recipe(name: str) -> Recipe:
    """The recipe of a model by name; InvalidRequest lists the names there are."""
    if name not in RECIPES:
        raise InvalidRequest(f"model {name!r} is not in the testbed: one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
