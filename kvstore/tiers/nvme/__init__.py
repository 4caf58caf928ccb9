"""Chunks on a device: region files of equal slots, one chunk in each.

    <directory>/format            JSON: the format's version, and which snapshot is the one of the last clean stop
    <directory>/index             the snapshot: what the catalog knew, for a quick start after a clean stop
    <directory>/region-<number>-<slot bytes>.kvs
                                  a page that says how it is cut, then slots: header and body of one chunk each
    <directory>/lock              held by the one process that uses the directory

The headers on the device are the truth. A chunk is acknowledged when its header and strips are synced; nothing
else is written for it. After a crash every slot's header is read (``recovery``); the snapshot only saves that after
a clean stop, and one that is missing, damaged or of another time is not believed. What a scan brings back may have
been evicted before (its slot was not used again), or be torn: it is whole or it fails its checks, and it is never
something that an operator removed, nor a copy that failed a check, for those are erased with a sync. Nothing is
promised on it before it was read and synced anew (``UNPROVEN`` in the catalog).

Room: a slot is exactly as large as a full raw chunk of its model, and at most an eighth larger than anything else.
Regions of one slot size begin small and double. All of them together never pass the capacity.

- ``directory``  the format file, the lock, the snapshot
- ``slots``      one file, and what its slots are used for
- ``regions``    all files: made, found, given up; the account
- ``io``         the engine that moves bytes between slots and memory
- ``tier``       the contract: write, open, read, remove, scan
- ``sync``       one sync for everybody who waits for one
- ``recovery``   what the slots hold, in bulk
"""

from kvstore.tiers.nvme.directory import Directory, ForeignDirectory, FutureFormat, IndexColumns, Snapshot
from kvstore.tiers.nvme.io import DeviceIO, PosixIO, aligned
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.tier import NvmeTier

__all__ = [
    "DeviceIO",
    "Directory",
    "ForeignDirectory",
    "FutureFormat",
    "IndexColumns",
    "NvmeTier",
    "PosixIO",
    "Regions",
    "Snapshot",
    "aligned",
]
