"""kvstore: a tiered KV cache storage service that runs beside any LLM inference engine.

Rooms, from the outside in (imports point one way, downwards):

- ``server``      the processes' doors: gRPC, the hand-off socket, metrics. Parses, calls, renders; decides nothing.
- ``controller``  sessions, reservations, leases and limits: what a request means.
- ``catalog``     who holds what: chain lookup, chunk records, pins.
- ``tiers``       what holds chunks: one contract; memory and NVMe so far.
- ``planning``    from facts to a plan: what is reused and what is computed again. Pure, and the client's too.
- ``policy``      what leaves first when room is needed. Pure: no I/O, no clock.
- ``arena``       the bytes in memory: regions, extents, generations, staging.
- ``chunk``       the stored format: layout, header, strip checksums.
- ``presence``    which chunks are stored, in memory that clients read: lookups without a call.
- ``keys``        chain digests, fingerprints and storage keys.
- ``spec``        whose cache it is: model, layers, dtypes, rope.
- ``seams``       clock, randomness, disk, scheduling, memory and fault points, replaceable in simulation.
"""

__version__ = "0.1.0"
