"""Every move of bytes between tiers, and every copy that goes: into memory on use, down to slower tiers after a store,
out when room is needed, and read again to see that it is what it was.

``Movement`` is what the controller asks; nobody else calls the parts. It knows tiers by their contracts, in an ordered
list, the fastest first: memory, which clients map, is the first, and every other tier's bytes come and go through it.
Shared tiers, which other nodes use, too, come after the local ones: they are written to without anybody waiting, and
read where the node does not have what a chain goes on with.

- ``eviction``  what leaves a tier when it needs room, and ``room``: a place in memory for a chunk
- ``removal``   how copies go: given up, removed, quarantined
- ``queue``     moves that wait: bounded, by priority and age, one per chunk
- ``writes``    moves to slower tiers, to ``targets``; ``readbacks``: of what memory gave up before
- ``loads``     moves into memory, layer by layer, from ``sources``
- ``meters``  how fast tiers are read
- ``shared``    what one shared tier has, and ``breaker``: whether it is asked
- ``shared_tiers``  all of them, and hints of what they have
- ``demotion``  what is about to leave the node, and ``uses``: what comes back
- ``clearing``  what an operator has removed, and ``relocation``: moved
- ``levels``    how durable a chain is
- ``checks``    reads again what lies there, and proves what a crash left
- ``canary``    shows that a tier that says nothing still works
- ``recovery``  what a tier holds, at a start and at a stop
- ``accounts``  what each tier has, takes and lacks, for operators
- ``names``     what a read of a chunk must find
"""

from kvstore.movement.accounts import TierAccount
from kvstore.movement.clearing import Fate, Meant
from kvstore.movement.levels import LevelsReached
from kvstore.movement.loads import Loading
from kvstore.movement.meters import MeasuredTier, TierMeters
from kvstore.movement.movement import Movement, MovementParts
from kvstore.movement.relocation import Step, Transit
from kvstore.movement.shared_tiers import ChunkHint
from kvstore.movement.writes import Writes

__all__ = [
    "ChunkHint",
    "Fate",
    "LevelsReached",
    "Loading",
    "Meant",
    "MeasuredTier",
    "Movement",
    "MovementParts",
    "Step",
    "TierAccount",
    "TierMeters",
    "Transit",
    "Writes",
]
