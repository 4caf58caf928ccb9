"""The plane of this host: memory that the sidecar shares.

- ``mapped``    the hand-off socket, the mapped regions, the channel; ``session`` opens prefixes and begins stores by it
- ``reading``   the chunk at a place: its header tells whether it is the one that was asked for
- ``resident``  prefixes in the arena: their bytes count only while their generations stay what they were; ``prefix``
  has a lease, ``placed`` a ticket that names the places, ``warm`` neither, but places that an earlier fetch was told
- ``staging``   memory that this client writes and the sidecar reads once
"""
