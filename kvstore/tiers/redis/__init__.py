"""The Redis tier: chunks in a Redis or Valkey that other nodes use, too.

A chunk is one HASH, ``<prefix>:v1:c:{<hex storage key>}`` (``names``): field ``h`` is its header, ``<write mark>.0``
and so on are runs of its slabs. It is written under another name and committed by a script (``scripts``), so a chunk is
there whole or not at all, and a replacement during a read is a miss, never a mixture of two writes.

    the service                                         a byte mover
    ``tier``      what the contract says
    ``control``   questions and scripts (redis-py)      ``moves``   fields between extents and a server,
    ``topology``  which server has a key                            each strip checked before anybody is told
    ``cluster``   several servers at once               ``line``    a blocking connection
    ``errands``   what nobody waits for
    ``claims``    what nodes are about to write to S3

Invariants: every call ends, by a timeout of its connection or a bound of its own. What a server says or has there is
believed only as far as header and checksums confirm it. No reply is read that is longer than what was asked for.
Nothing is exported here: a byte mover imports ``moves`` alone, and has no use for redis-py.
"""
