"""What the clients of a run have stored, and what they may ask for next."""

from __future__ import annotations

import random
from collections import deque

from tests.sim.models import (
    NARROW,
    SPECS,
    WIDE,
    Chain,
)

STEP_COUNT, DEPTH_MAX = 3, 4


class Knowledge:
    """What the clients of a run have stored, most recent last."""

    def __init__(self) -> None:
        self.chains: deque[Chain] = deque(maxlen=24)

    def pick(self, chance: random.Random) -> Chain:
        """Something stored, or stored in part, or never."""
        if self.chains and chance.random() < 0.8:
            return chance.choice(self.chains)
        return self.fresh(chance)

    def fresh(self, chance: random.Random) -> Chain:
        spec = chance.choice(SPECS)
        path = tuple(chance.randrange(STEP_COUNT) for _ in range(chance.randint(1, DEPTH_MAX)))
        tail = chance.choice((0, 0, 8)) if spec is WIDE else chance.choice((0, 0, 0, 5, 9))
        hidden = (1,) if spec is NARROW and chance.random() < 0.3 else ()
        return Chain(spec, path, tail, hidden)
