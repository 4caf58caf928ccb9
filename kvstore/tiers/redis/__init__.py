"""The Redis tier: chunks in a Redis or Valkey that other nodes use, too.

A chunk is one HASH, ``<prefix>:v1:c:{<hex storage key>}`` (``names``): field ``h`` is its header, ``<write mark>.0``
and so on are runs of its slabs. It is written under another name and committed by a script (``scripts``), so a chunk is
there whole or not at all, and a replacement during a read is a miss, never a mixture of two writes.

    the service                                         a byte mover
    ``tier``      implements the contract
    ``control``   questions and scripts (redis-py)      ``moves``   fields between extents and a server,
    ``topology``  which server has a key                            each strip checked before a caller sees it
    ``cluster``   several servers at once               ``line``    a blocking connection
    ``tls``       its encrypted connections
    ``commands``  for the directory of nodes
    ``errands``   background work in batches
    ``claims``    nodes' claims on chunks that they are about to write to S3
    ``chunk``     an opened chunk; ``reads``: its reads, given to byte movers in turns
    ``embedded``  a server that the sidecar runs itself
    ``replies``   refusals as typed errors; ``packed``: commands of many words
    ``access``    what a byte mover needs to reach a server

Invariants: every call ends, by a timeout of its connection or a bound of its own. A server's words and bytes are
believed only as far as header and checksums confirm them. No reply is read that is longer than the expected length.
Nothing is exported here: a byte mover imports ``moves`` alone, and does not need redis-py.
"""
