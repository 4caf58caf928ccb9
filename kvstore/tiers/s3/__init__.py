"""Chunks in a bucket of any S3 endpoint: they outlive every node, and any node may read them.

    {prefix}/v1/{first two digits}/{storage key in hex}    header and strips of one chunk, as they are packed anywhere

A reader that looks for a chunk knows its storage key and no more, so the name has nothing else; the header names its
tenant and model, and ``kvstore scan`` reads it back. An object is written once, whole. Nothing relies on the store: it
may ignore conditions, drop or alter objects, and be written by others; a reader compares header, ETag and every strip.

Blocking jobs on lanes of the byte movers make the requests. In each lane's process one asyncio client has a thread of
its own (``connection``): signing, TLS and bytes stay away from the loop that answers clients.

- ``tier``        the contract: probe, open, write, remove
- ``reading``     an opened chunk in an object
- ``writing``     chunks into objects, in one request or in parts
- ``looking``     the first bytes of objects, and which chunks are probably there
- ``listing``     the bucket read back, for ``kvstore scan``
- ``depth``       finds the end of a chain in few questions
- ``bucket``      whether the bucket is there: a miss alone does not tell
- ``judging``     classifies an object for a reader or writer of one chunk (pure)
- ``bodies``      bytes between memory and bodies
- ``objects``     names, and how a job is done within a time limit
- ``connection``  one client per process; retries within a budget
- ``refusals``    endpoints' refusals as the contract's errors
- ``allowance``   limits of bytes and requests
"""

from kvstore.tiers.s3.tier import Lanes, S3Tier

__all__ = ["Lanes", "S3Tier"]
