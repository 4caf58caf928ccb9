"""Chunks in a bucket of any S3 endpoint: what outlives every node, and any node may read.

    {prefix}/v1/{first two digits}/{storage key in hex}    header and strips of one chunk, as they are packed anywhere

Whoever looks for a chunk knows its storage key and no more, so the name has nothing else; the header says of which
tenant and model it is, and ``kvstore scan`` reads it back. An object is written once, whole. Nothing rests on the
store: it may ignore conditions, drop or alter objects, and be written by others; a reader compares header, ETag and
every strip.

Requests are made by blocking jobs on lanes of the byte movers, in each of which one asyncio client has a thread of its
own (``connection``): signing, TLS and bytes stay away from the loop that answers clients.

- ``tier``        the contract: probe, open, write, remove
- ``reading``     a chunk in an object, opened
- ``writing``     chunks into objects, in one request or in parts
- ``looking``     what lies there: headers, and which chunks are probably there
- ``listing``     the bucket read back, for ``kvstore scan``
- ``depth``       how far a chain goes on, in few questions
- ``judging``     what an object is to somebody who looks for a chunk (pure)
- ``bodies``      bytes between memory and bodies
- ``objects``     names, and how a job is done within a bound
- ``connection``  one client per process; retries within a budget
- ``refusals``    what endpoints answer, as the contract's errors
- ``allowance``   what it may cost
"""

from kvstore.tiers.s3.tier import Lanes, S3Tier

__all__ = ["Lanes", "S3Tier"]
