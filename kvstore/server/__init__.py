"""The process's doors. Each parses, calls the controller, renders, and decides nothing.

- ``kvstore.sock``  gRPC: CacheService, AdminService, health, reflection
- ``data.sock``     the hand-off: session secret and memory by descriptor (``kvstore.handoff`` has the protocol)
- ``web``           a page for browsers and one for Prometheus, on 127.0.0.1

``app.serve`` is the whole life of the process. It is not imported here: the process of the remote plane takes a few of
this room's modules, and would start, and keep in its memory, all of the server with them.
"""
