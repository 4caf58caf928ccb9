"""Operators' questions to one tenant, chunk by chunk, and the changes that they order.

``Operators`` is a front of its own beside the controller's, which engines use. It shows one tenant's data: another
tenant has another. Whoever asks here may ask for all of the catalog, so nothing is looked through at once: all
questions together have one *turn* per round of the event loop, and what engines wait for runs in between. A listing is
no snapshot: each chunk is told as it was in its turn.

- ``selection``  which chunks are meant, decided on columns
- ``listing``    what is said of each, and what they come to
- ``showing``    all that is known of one
- ``changes``    what is removed, pinned, moved and read again; each with a dry run
- ``turns``      how long a question may keep the loop
- ``values``     what goes in and comes out
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
