"""What can be set. One tree of frozen leaves; a component is given its leaf, never the tree.

Defaults < TOML file < environment (``KVSTORE__ARENA__CAPACITY_BYTES``) < command-line flags. An unknown key or
an unreadable value stops the start and names where it came from. Every value remembers its origin, which
``kvstore config`` prints.
"""

from kvstore.config.load import LoadedSettings, load
from kvstore.config.settings import (
    ArenaSettings,
    ControllerSettings,
    EventSettings,
    LimitSettings,
    NvmeSettings,
    PolicySettings,
    RemoteSettings,
    ServerSettings,
    Settings,
    TierSettings,
)
from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings

__all__ = [
    "DEFAULT_TENANT",
    "ArenaSettings",
    "ControllerSettings",
    "EventSettings",
    "LimitSettings",
    "LoadedSettings",
    "NvmeSettings",
    "PolicySettings",
    "RemoteSettings",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "TierSettings",
    "load",
]
