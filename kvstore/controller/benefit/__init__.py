"""Accounts of the cache's benefit: tokens that engines fetched and did not compute, and the prefixes fetched most.

Both are accounts of one tenant, and bounded. They cost a fetch a microsecond or two, and a lookup nothing. They change
nothing: no tier and no policy reads them.

- ``served``  tokens by model and hour, kept over restarts
- ``heat``    the hottest prefixes, as a tree
"""

from kvstore.controller.benefit.heat import Heat, HotPrefix
from kvstore.controller.benefit.served import NOTHING, Saving, Served, ServedHour, ServedModel

__all__ = ["NOTHING", "Heat", "HotPrefix", "Saving", "Served", "ServedHour", "ServedModel"]
