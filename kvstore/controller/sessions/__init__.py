"""Sessions of connected clients, and what a session keeps: staging and leases.

A session is one client process. It ends with its connection, and with it ends what it owns: the controller asks each
room to give that up. A lease keeps chunks where they are while their session copies them. Movement takes leases back
that are too old when it needs room, so leases are made before movement, and know neither lookups nor stores.
"""

from kvstore.controller.sessions.leases import Lease, Leases
from kvstore.controller.sessions.registry import Sessions
from kvstore.controller.sessions.session import Session

__all__ = ["Lease", "Leases", "Session", "Sessions"]
