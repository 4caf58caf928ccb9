"""Chunks on a device: region files of equal slots, one chunk in each.

    <directory>/format            JSON: the format's version, and which snapshot is the one of the last clean stop
    <directory>/times             when the chunks of the snapshot were stored
    <directory>/index             the snapshot: what the catalog knew, for a quick start after a clean stop; sealed, too
    <directory>/region-<number>-<slot bytes>.kvs
                                  a page that says how it is cut, then slots: header and body of one chunk each
    <directory>/newest            where an older value could come back: the write of each key that is to be believed
    <directory>/lock              held by the one process that uses the directory

The headers on the device are the truth. A chunk is acknowledged when its header and strips are synced; nothing else is
written for it. After a crash every slot's header is read (``recovery``). The snapshot only saves that work after a
clean stop; a snapshot that is missing, damaged or of another time is not believed. A start may be unable to open a file
or to read a header. Such places may hold acknowledged chunks: their room is not reused, the snapshot says that it knows
nothing of them, and the next start looks again.

A scan may bring back a chunk that was evicted before (its slot was not used again), or a torn one: a copy is whole or
it fails its checks. A scan never brings back a value that was replaced, nor a copy that failed a check: those are
erased with a sync, or ``newest`` says that they are not to be believed. Nothing is promised on a copy that a scan found
before the copy was read and synced anew (``UNPROVEN`` in the catalog). An erasure that a scan found is not believed
either before it was done anew: an earlier process may not have come to its sync, or the sync failed.

In an envelope (``chunk.envelope``) a copy also proves where it was written: its tag covers the seat. A copy sealed with
a key that is not here is treated as one that cannot be read: its slot is not reused, and the next start looks again.

Room: a slot is exactly as large as a full raw chunk of its model, and at most an eighth larger than any other chunk.
Regions of one slot size begin small and double. All of them together never pass the capacity.

- ``directory``  the format file, the lock, the snapshot
- ``files``      opens one file, and reads and writes its first page
- ``slots``      one file, and the state of its slots
- ``regions``    all files: made, found, given up; the account
- ``free_slots`` makes room for a chunk: a new file, or others leave
- ``io``         the engine that moves bytes between slots and memory, and seals them on their way
- ``outgoing``   a chunk on its way to a slot
- ``tier``       the contract: write, open, remove, recover
- ``reading``    an opened chunk in a slot
- ``sync``       one sync for all callers that wait for one
- ``erasures``   erases copies that must not come back, again and again, until the device does it
- ``newest``     the writes that are to be believed until then
- ``plain``      the copies without an envelope that are believed where one is demanded
- ``recovery``   reads the headers of all slots
"""

from kvstore.tiers.nvme.directory import Directory, Snapshot
from kvstore.tiers.nvme.io import PosixIO, aligned
from kvstore.tiers.nvme.plain import PlainCopies
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.tier import NvmeTier

__all__ = ["Directory", "NvmeTier", "PlainCopies", "PosixIO", "Regions", "Snapshot", "aligned"]
