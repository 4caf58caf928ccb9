"""Least squares over a handful of measurements. Errors are relative, so that a measurement of a second counts as much
as one of a millisecond."""

from __future__ import annotations

import math
from collections.abc import Sequence

SINGULAR = 1e-9
CAUTION_MAX = 1e6
"""A larger caution tells no more. Who gets a rate over the wire takes one for no rate at all."""


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...] | None:
    """Return the coefficients with which ``rows`` give ``values``, each error relative to its value. Return None when
    the rows do not determine them, or when one is negative: no latency and no rate can be."""
    scaled = [[each / value for each in row] for row, value in zip(rows, values, strict=True)]
    sizes = [max(abs(row[column]) for row in scaled) or 1.0 for column in range(len(scaled[0]))]
    scaled = [[each / size for each, size in zip(row, sizes, strict=True)] for row in scaled]
    count = len(sizes)
    system = [
        [sum(row[i] * row[j] for row in scaled) for j in range(count)] + [sum(row[i] for row in scaled)]
        for i in range(count)
    ]
    found = _solved(system)
    if found is None or min(found) < 0:
        return None
    return tuple(each / size for each, size in zip(found, sizes, strict=True))


def _solved(system: list[list[float]]) -> list[float] | None:
    """Solve by Gaussian elimination with pivots; ``system`` is [A | b]. None: the system is singular."""
    count = len(system)
    largest = max(abs(row[column]) for row in system for column in range(count))
    for column in range(count):
        pivot = max(range(column, count), key=lambda row: abs(system[row][column]))
        if abs(system[pivot][column]) <= SINGULAR * largest:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for row in range(count):
            if row != column:
                factor = system[row][column] / system[column][column]
                system[row] = [a - factor * b for a, b in zip(system[row], system[column], strict=True)]
    found = [system[row][count] / system[row][row] for row in range(count)]
    return found if all(map(math.isfinite, found)) else None


def caution_of(ratios: Sequence[float]) -> float:
    """Return the 90th percentile of measured over expected time. It is at least 1 + 0.5 / n for n measurements, because
    few of them prove little: 1.5 after one, 1.05 after ten."""
    ordered = sorted(ratios)
    high = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return min(max(high, 1.0 + 0.5 / len(ordered)), CAUTION_MAX)


def confidence_of(sample_count: int, caution: float) -> float:
    """Return a confidence from 0 (nothing was measured) to 1 (many measurements agree)."""
    return sample_count / (sample_count + 1) / max(caution, 1.0)
