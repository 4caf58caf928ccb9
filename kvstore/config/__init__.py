"""Settings: one tree of frozen leaves. A component is given its leaf, never the tree.

Defaults < TOML file < environment (``KVSTORE__ARENA__CAPACITY_BYTES``) < command-line flags. An unknown key or
an unreadable value stops the start and names where it came from. Every value remembers its origin, which
``kvstore config`` prints.
"""

from kvstore.config.limits import OPERATOR_SESSION_COUNT, LimitSettings
from kvstore.config.load import LoadedSettings, load
from kvstore.config.redis import RedisAddress, RedisSettings
from kvstore.config.s3 import S3Settings
from kvstore.config.settings import (
    LEVEL_SETTINGS,
    EventSettings,
    NvmeSettings,
    PolicySettings,
    Settings,
    TracingSettings,
)
from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings

__all__ = [
    "DEFAULT_TENANT",
    "LEVEL_SETTINGS",
    "OPERATOR_SESSION_COUNT",
    "EventSettings",
    "LimitSettings",
    "LoadedSettings",
    "NvmeSettings",
    "PolicySettings",
    "RedisAddress",
    "RedisSettings",
    "S3Settings",
    "Settings",
    "TenantSettings",
    "TracingSettings",
    "load",
]
