"""The remote plane serves clients on other hosts, with the cache's bytes in its messages. It is a process of its own.

The sidecar starts ``python -m kvstore.remote`` when ``remote.address`` is set. That process listens on TCP and checks
tokens. To the sidecar it is a local client like any other: for each remote session it holds one hand-off connection,
maps the same arena read-only and fills the same kind of staging. So leases, reservations, staging and every limit are
the sidecar's own, they end with the connection, and bytes for the network never hold the sidecar's interpreter. When
the sidecar ends, by whatever cause, this process ends: its standard input closes.

- ``tokens``    bearer tokens, and their tenants
- ``node``      one tenant's sidecar seen from here: its sockets, its arena, the models it knows
- ``session``   one remote client: its hand-off connection and staging
- ``sending``   FetchBytes: from the arena into messages
- ``receiving`` StoreBytes: from messages into staging
- ``door``      the listener and its handlers; ``boundary``: tokens and statuses, common to all handlers
- ``certificates``  the listener's own; ``renewal``: reads its files, and those of tokens, again when they change
- ``inbox``     the memory that incoming messages may take

A byte is copied once on its way out (from the arena to the message that gRPC takes) and once on its way in (from the
message that gRPC gives to staging; the sidecar then copies and checksums it as for every client). A stream holds at
most two messages here. The client trusts nothing from here: it checks every strip against the chunk's header.
"""
