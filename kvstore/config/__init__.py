"""What can be set. One tree of frozen leaves; a component is given its leaf, never the tree.

Defaults < TOML file < environment (``KVSTORE__ARENA__CAPACITY_BYTES``) < command-line flags. An unknown key or
an unreadable value stops the start and names where it came from. Every value remembers its origin, which
``kvstore config`` prints.
"""

from kvstore.config.load import LoadedSettings, load
from kvstore.config.settings import (
    EventSettings,
    LimitSettings,
    NvmeSettings,
    PolicySettings,
    Settings,
)
from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings

__all__ = [
    "DEFAULT_TENANT",
    "EventSettings",
    "LimitSettings",
    "LoadedSettings",
    "NvmeSettings",
    "PolicySettings",
    "Settings",
    "TenantSettings",
    "load",
]
