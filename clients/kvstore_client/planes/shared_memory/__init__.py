"""The plane of this host: memory that the sidecar shares.

- ``session``   the hand-off socket, the mapped regions, the channel
- ``prefix``    leased chunks in the arena: their bytes count only while their generations stay what they were
- ``staging``   memory that this client writes and the sidecar reads once
"""
