"""Accounts of the benefit of the cache: tokens that engines fetched and did not compute, and the prefixes that they
fetch most.

Both are accounts of one tenant, bounded, and cost a fetch a microsecond or two; lookups cost them nothing. They change
nothing: no tier and no policy reads them.

- ``served``  tokens by model and hour, kept over restarts
- ``heat``    the hottest prefixes, as a tree
"""

from kvstore.controller.benefit.heat import Heat, HotPrefix
from kvstore.controller.benefit.served import Saving, Served, ServedHour, ServedModel

__all__ = ["Heat", "HotPrefix", "Saving", "Served", "ServedHour", "ServedModel"]
