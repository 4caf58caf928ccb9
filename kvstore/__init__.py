"""kvstore: a tiered KV cache storage service that runs beside any LLM inference engine.

Rooms, from the outside in (imports point one way, downwards):

- ``remote``      the door for other hosts: bytes in messages; a process of its own.
- ``server``      the process's doors: gRPC, the hand-off socket, metrics. Parses, calls, renders; decides nothing.
- ``controller``  sessions, stores, fetches, leases and limits: what a request means.
- ``movement``    every move of bytes between tiers, and every copy that goes.
- ``planning``    from facts to a plan: what is reused and what is computed again. Pure, and the client's too.
- ``catalog``     who holds what: chain lookup, rows, copies per tier, events.
- ``tiers``       what holds chunks: one contract for tiers of our own, one for shared engines.
- ``arena``       the bytes in memory: regions, extents, generations, staging.
- ``chunk``       the stored format: layout, header, strip checksums.
- ``presence``    which chunks are stored, in memory that clients read: lookups without a call.
- ``handoff``     sessions and memory by descriptor; ``wire`` specs on the wire, and every message's bounds.
- ``keys``        chain digests, fingerprints and storage keys.
- ``telemetry``   counters and logs.
- ``config``      the settings.
- ``policy``      what leaves first when room is needed, and what may enter. Pure: no I/O, no clock.
- ``spec``        whose cache it is: model, layers, dtypes, rope.
- ``simulated``   twins of the seams, for tests and benchmarks.
- ``seams``       clock, randomness, disk, scheduling, memory and fault points, replaceable in simulation.

docs/architecture.md follows a store and a fetch through them.
"""

__version__ = "0.2.0"
