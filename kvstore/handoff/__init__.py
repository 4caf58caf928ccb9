"""The hand-off: a protocol by which a process on the same host gets a session, and memory by descriptor. Both ends use
this package: the server's half is ``kvstore.server.handoff``, the client's is
``kvstore_client.planes.shared_memory.mapped``, and ``kvstore.remote.session`` is the half for clients on other hosts.

The hand-off is an AF_UNIX SOCK_SEQPACKET connection with one JSON object per packet, and descriptors by SCM_RIGHTS. The
connection is the session: when either end closes it, the session's leases, reservations and staging end. The peer's uid
must be the tenant's, or the server's own.

    > {"op": "hello", "version": 1}                               and "operator": true, of an operator's command
    < {"op": "welcome", "session": 7, "secret": "<64 hex>", "server_pid": 1, "generations_bytes": n,
       "regions": [[index, bytes], ...], "offers": ["presence"]}  + [generations, region, ...]
    > {"op": "regions", "have": 3}
    < {"op": "regions", "regions": [[3, bytes], ...]}             + [region, ...]   from index 3 on
    > {"op": "staging", "bytes": n}
    < {"op": "staging", "staging_id": 9, "bytes": n}              + [staging]
    > {"op": "staging_close", "staging_id": 9}
    < {"op": "ok"}
    > {"op": "presence"}
    < {"op": "presence", "bytes": n, "token_count_max": n, "tail_tokens_max": n}   + [presence table]
    > {"op": "device"}                                            offered as "device"
    < {"op": "device", "device": "cpu", "generations_bytes": n, "bytes": n}       + [generations, memory]
    > {"op": "looked_up", COUNTER: n, ...}                        done without a call, to be counted; never answered
    > {"op": "redeemed", "ticket": "<32 hex>"}                    its chunks were copied without a call; never answered
    < {"op": "error", "status": "RESOURCE_EXHAUSTED", "message": "..."}   instead of any answer

``messages`` has these packets as values with the limits of their fields, ``packets`` converts between the two, and
``passing`` sends and receives packets with descriptors. ``kvstore.seams.memory`` makes the memfds, and seals them
before they are sent: a client cannot write memory that it may only read, and cannot shrink memory that it may write. So
neither end checks seals.

The packets are frozen: a field may be added, with a default for peers that do not know it; no field changes or is
removed.
"""
