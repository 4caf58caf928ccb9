"""The catalog: the chunks that the tiers have. Every stored chunk is a row of one table. A namespace (fingerprint,
provenance, exactness) maps chain digests to rows. A row says in which tiers the chunk lies.

A lookup is a walk: it finds the leading digests that are in the index, and the reasons why the rest are missing. The
catalog owns no bytes and takes no decisions; the controller and movement change it, on the event loop's thread only. A
digest is in the index as long as some tier holds the chunk. A chunk that leaves while something still refers to its row
(its children, a lease, a ticket, a move) leaves a *ghost*: the row without the index entry. A store of that digest
takes the ghost over.

A model without rows may be forgotten when others need its place, and so may a namespace; the number of that is used
again. What is under way without having rows holds a ``Use``; what is remembered over an await is an id (see
``ChunkTable.identity``).

Cost: about 220 bytes a chunk (``kvstore bench index`` measures it): columns, not objects.
"""

from kvstore.catalog.catalog import Catalog, ChainRun, Walk, absent_runs, joined_runs
from kvstore.catalog.copies import NOWHERE, Copies, MappedCopies
from kvstore.catalog.events import Event, EventBatch, Watcher
from kvstore.catalog.models import Use
from kvstore.catalog.namespace import Namespace
from kvstore.catalog.spaces import parent_digest
from kvstore.catalog.table import ROOT_ROW, USE_COUNT_MAX, ChunkTable, RowIdentity, whole_seconds

__all__ = [
    "NOWHERE",
    "ROOT_ROW",
    "USE_COUNT_MAX",
    "Catalog",
    "ChainRun",
    "ChunkTable",
    "Copies",
    "Event",
    "EventBatch",
    "MappedCopies",
    "Namespace",
    "RowIdentity",
    "Use",
    "Walk",
    "Watcher",
    "absent_runs",
    "joined_runs",
    "parent_digest",
    "whole_seconds",
]
