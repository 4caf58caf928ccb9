"""The doors of the server process. Each door parses a request, calls the controller and renders the reply. A door
decides nothing.

- ``kvstore.sock``  gRPC: CacheService, AdminService, health, reflection
- ``data.sock``     the hand-off: session secret and memory by descriptor (``kvstore.handoff`` has the protocol)
- ``web``           a page for browsers and one for Prometheus, on 127.0.0.1

``app.serve`` is the whole life of the process. It is not imported here: the remote plane's process imports a few
modules of this room, and would load all of the server with them.
"""
