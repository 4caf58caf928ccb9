"""The process's doors. Each parses, calls the controller, renders, and decides nothing.

- ``kvstore.sock``  gRPC: CacheService, AdminService, health, reflection
- ``data.sock``     the hand-off: session secret and memory by descriptor (``kvstore.handoff`` has the protocol)
- ``web``           a page for browsers and one for Prometheus, on 127.0.0.1

``serve`` is the whole life of the process.
"""

from kvstore.server.app import serve

__all__ = ["serve"]
