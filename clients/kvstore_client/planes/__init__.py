"""Planes: the paths of bytes between this client and a sidecar.

- ``shared_memory``  this host: the sidecar's arena is mapped here, names and extents go by calls
- ``stream``         another host: the same calls, the bytes in messages

``place`` finds the plane of an address, ``session`` is common to both planes, ``returns`` gives leases and tickets back
beside the caller. ``prefix`` and ``store`` say what both planes do with a fetch and with a store. ``parts`` checks that
a chunk is the one that was asked for, ``incoming`` reads a call's stream of messages. No other package knows which
plane it uses.
"""
