"""Planes: the ways for bytes between this client and a sidecar.

- ``shared_memory``  this host: the sidecar's arena is mapped here, names and extents go by calls
- ``stream``         another host: the same calls, the bytes in messages

``place`` says which one an address means, ``calls`` has what the sessions of both have in common, ``returns`` what a
session gives back while nobody waits. No other room knows which plane it uses.
"""
