"""Operators' requests to one tenant: listings of its chunks, and changes to them.

``Operators`` is a front of its own beside the controller's, which engines use. It shows one tenant's data; every tenant
has its own. A request may concern the whole catalog, so no request looks through all of it at once: all requests
together have one *turn* per round of the event loop, and the engines' requests run in between. A listing is no
snapshot: each chunk is told as it was in its turn.

- ``selection``  the chunks that a request selects, decided on columns
- ``listing``    the entries of selected chunks, and their totals
- ``showing``    all that is known of one chunk
- ``changes``    evict, pin, move, bring and verify; each with a dry run
- ``drains``     the service takes no more stores, and writes what waits
- ``looks``      a change reads a copy again, and gives a stalled tier up
- ``heartbeats`` reports of a request that waits, and of a change's progress
- ``turns``      the time that a request may keep the loop
- ``values``     arguments and results of the requests
"""

from kvstore.controller.operators.operators import Operators
from kvstore.controller.operators.values import (
    ChangeNews,
    ChunkDetail,
    ChunkEntry,
    CopyFacts,
    HotEntry,
    ListPage,
    ModelTotal,
    Selection,
    ShownChunk,
    TierTotal,
)

__all__ = [
    "ChangeNews",
    "ChunkDetail",
    "ChunkEntry",
    "CopyFacts",
    "HotEntry",
    "ListPage",
    "ModelTotal",
    "Operators",
    "Selection",
    "ShownChunk",
    "TierTotal",
]
