"""Sessions of connected clients, with their staging and leases.

A session is one client process. It ends with its connection, and all that it owns ends with it: the controller has each
room give that up. A lease keeps chunks where they are while their session copies them. Movement revokes leases that are
too old when it needs room. So leases are made before movement, and know neither lookups nor stores.
"""

from kvstore.controller.sessions.leases import Lease, Leases
from kvstore.controller.sessions.registry import Sessions
from kvstore.controller.sessions.session import Session

__all__ = ["Lease", "Leases", "Session", "Sessions"]
