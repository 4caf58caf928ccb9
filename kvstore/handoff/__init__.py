"""The hand-off: how a process on the same host gets its session and its memory, by descriptor. Both ends speak it from
here: the server's half is ``kvstore.server.handoff``, the client's ``kvstore_client.planes.shared_memory.session``, and
a client on another host has its half in ``kvstore.remote.session``.

An AF_UNIX SOCK_SEQPACKET connection; one JSON object per packet, descriptors by SCM_RIGHTS. The connection is the
session: when either end closes it, the session's leases, reservations and staging end. The peer's uid must be the
tenant's, or the server's own.

    > {"op": "hello", "version": 1}
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
    > {"op": "looked_up", COUNTER: n, ...}                        done without a call, to be counted; never answered
    < {"op": "error", "status": "RESOURCE_EXHAUSTED", "message": "..."}   instead of any answer

``messages`` has these as values with the limits of their fields, ``packets`` turns one into the other, and ``passing``
sends and takes descriptors. The memfds that travel are made, and sealed before they do, in
``kvstore.seams.memory``: what a client only reads it cannot write, and what it writes it cannot shrink. So neither end
looks at seals.

The packets are frozen: a field may come, with a default for peers that do not know it; none changes or goes.
"""
