"""All lists, in the order in which they run."""

from __future__ import annotations

from tests.mutants import arena, chunk, kernels, keys
from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [*chunk.MUTANTS, *keys.MUTANTS, *arena.MUTANTS, *kernels.MUTANTS]
