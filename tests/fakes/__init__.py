"""Tiers that only tests have: what a folder and a line where tiers are built must be enough for.

``files`` is a local tier, ``engine`` and ``objects`` are shared ones. Each is made from a frozen settings value alone,
keeps what it says it keeps, and fails as its ``switches`` say, which lie in a file: a test turns them in a server of
another process, too.
"""

from tests.fakes.engine import EngineSettings, EngineTier
from tests.fakes.files import FilesSettings, FilesTier
from tests.fakes.objects import ObjectSettings, ObjectTier
from tests.fakes.switches import Switch, Switches

__all__ = [
    "EngineSettings",
    "EngineTier",
    "FilesSettings",
    "FilesTier",
    "ObjectSettings",
    "ObjectTier",
    "Switch",
    "Switches",
]
