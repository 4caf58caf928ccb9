"""All moves of bytes between tiers, and all removals of copies: into memory on use, down to slower tiers after a store,
out when room is needed. Copies are also read again to verify them.

The controller calls ``Movement``, or a part that it has under its own name. Movement knows tiers by their contracts, in
an ordered list, the fastest first. Memory, which clients map, is the first, and every other tier's bytes pass through
it. Shared tiers, which other nodes use, too, come after the local ones: no caller waits for writes to them, and they
are read where a chain continues beyond the chunks of the node.

- ``eviction``  picks the copies that leave a tier when it needs room; ``room``: a place in memory for a chunk
- ``removal``   removes copies: given up, removed, quarantined
- ``queue``     moves that wait: bounded, by priority and age, one per chunk
- ``writes``    moves to slower tiers, to ``targets``; ``readbacks``: of chunks that memory gave up before;
  ``parked``: chunks that wait to be tried again; ``refusals``: the log of them; ``left``: chunks that other nodes write
- ``loads``     moves into memory, layer by layer, from ``sources``, in ``pieces``
- ``meters``  measures how fast tiers are read
- ``shared``    the chunks of one shared tier; ``breaker``: pauses requests to a tier that fails
- ``shared_tiers``  all shared tiers, and hints of what they have; ``shared_source``: one as a source of loads;
  ``shared_target``: one as a target of writes; ``reach``: how far a chain goes on there
- ``hbm``  copies on a device of what memory has, for fetches into its tensors
- ``demotion``  writes chunks to shared tiers before they leave the node; ``uses``: counts chunks that come back
- ``clearing``  removes chunks by an operator's word, and ``relocation`` moves them
- ``levels``    reports how durable a chain is
- ``checks``    reads copies again, and proves those that a crash left
- ``canary``    shows that a tier that reports no error still works
- ``recovery``  the content of a tier, at a start and at a stop
- ``accounts``  the content, state and backlog of each tier, for operators
- ``names``     the key, layout and write that a read of a chunk must find
"""

from kvstore.movement.accounts import TierAccount
from kvstore.movement.clearing import Fate, Meant
from kvstore.movement.levels import LevelsReached
from kvstore.movement.loading import Loading
from kvstore.movement.meters import MeasuredTier, TierMeters
from kvstore.movement.movement import Movement, MovementParts
from kvstore.movement.reach import Beyond, ChunkHint
from kvstore.movement.relocation import ChunkStep, Transit
from kvstore.movement.shared_tiers import TierWord
from kvstore.movement.writes import Writes

__all__ = [
    "Beyond",
    "ChunkHint",
    "ChunkStep",
    "Fate",
    "LevelsReached",
    "Loading",
    "Meant",
    "MeasuredTier",
    "Movement",
    "MovementParts",
    "TierAccount",
    "TierMeters",
    "TierWord",
    "Transit",
    "Writes",
]
