"""Chunks on a device: region files of equal slots, one chunk in each.

    <directory>/format            JSON: the format's version, and which snapshot is the one of the last clean stop
    <directory>/times             when the chunks of the snapshot were stored
    <directory>/index             the snapshot: what the catalog knew, for a quick start after a clean stop; sealed, too
    <directory>/region-<number>-<slot bytes>.kvs
                                  a page that says how it is cut, then slots: header and body of one chunk each
    <directory>/newest            where an older value could come back: which one is to be believed
    <directory>/lock              held by the one process that uses the directory

The headers on the device are the truth. A chunk is acknowledged when its header and strips are synced; nothing else is
written for it. After a crash every slot's header is read (``recovery``); the snapshot only saves that after
a clean stop, and one that is missing, damaged or of another time is not believed. What a start cannot see, files that
do not open and headers that are not read, may hold what was acknowledged: its room is nobody else's, the snapshot says
that it knows nothing of it, and the next start looks again.

What a scan brings back may have been evicted before (its slot was not used again), or be torn: it is whole or it fails
its checks. It is never a value that another one was stored in the place of, nor a copy that failed a check, for those
are erased with a sync, or ``newest`` says that they are not to be believed. Nothing is promised on what a scan found
before it was read and synced anew (``UNPROVEN`` in the catalog); nor is an erasure that a scan found believed before it
was done anew: an earlier process may not have come to its sync, or that failed.

In an envelope (``chunk.envelope``) a copy also proves where it was written: its tag covers the seat. A copy sealed with
a key that is not here is as one that cannot be read: its slot is nobody else's, and the next start looks again.

Room: a slot is exactly as large as a full raw chunk of its model, and at most an eighth larger than anything else.
Regions of one slot size begin small and double. All of them together never pass the capacity.

- ``directory``  the format file, the lock, the snapshot
- ``files``      how one file is opened, and its first page
- ``slots``      one file, and what its slots are used for
- ``regions``    all files: made, found, given up; the account
- ``io``         the engine that moves bytes between slots and memory, and seals them on their way
- ``outgoing``   a chunk on its way to a slot
- ``tier``       the contract: write, open, remove, recover
- ``reading``    a chunk in a slot, opened
- ``sync``       one sync for everybody who waits for one
- ``erasures``   what must not come back: erased, again and again, until the device takes it
- ``newest``     what is to be believed until then
- ``plain``      which copies without an envelope are believed where one is demanded
- ``recovery``   what the slots hold, in bulk
"""

from kvstore.tiers.nvme.directory import Directory, Snapshot
from kvstore.tiers.nvme.io import PosixIO, aligned
from kvstore.tiers.nvme.plain import PlainCopies
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.tier import NvmeTier

__all__ = ["Directory", "NvmeTier", "PlainCopies", "PosixIO", "Regions", "Snapshot", "aligned"]
