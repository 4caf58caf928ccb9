"""All lists, in the order in which they run."""

from __future__ import annotations

from tests.mutants import (
    arena,
    chunk,
    client,
    controller,
    doors,
    engines,
    envelope,
    forks,
    kernels,
    keys,
    movers,
    nvme,
    recompute,
    redis,
    remote,
    s3,
    security,
    shared,
    spec,
    storing,
    telling,
    waits,
)
from tests.mutants.mutant import Mutant

MUTANTS: list[Mutant] = [
    *chunk.MUTANTS,
    *keys.MUTANTS,
    *spec.MUTANTS,
    *arena.MUTANTS,
    *kernels.MUTANTS,
    *controller.MUTANTS,
    *shared.MUTANTS,
    *s3.MUTANTS,
    *redis.MUTANTS,
    *storing.MUTANTS,
    *nvme.MUTANTS,
    *movers.MUTANTS,
    *client.MUTANTS,
    *waits.MUTANTS,
    *forks.MUTANTS,
    *remote.MUTANTS,
    *security.MUTANTS,
    *doors.MUTANTS,
    *telling.MUTANTS,
    *recompute.MUTANTS,
    *engines.MUTANTS,
    *envelope.MUTANTS,
]
