"""Reloads: a running service reads its settings again when an operator asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvstore.config import LoadedSettings, Settings
from kvstore.config.reloading import SettingChange, setting_changes, take_over, with_taken_over
from kvstore.errors import InvalidRequest
from kvstore.telemetry import set_log_level

_log = logging.getLogger("kvstore.server")


@dataclass(frozen=True)
class _Followed:
    """The tree of settings that one tenant's parts use."""

    name: str
    settings: Settings


class Reloading:
    """Reloads the settings of all tenants of the process. Runs on the event loop's thread; another thread reads the
    sources."""

    def __init__(self, loaded: LoadedSettings, check: Callable[[Mapping[str, Settings]], None]) -> None:
        """``check``: raises InvalidRequest naming the setting where this process cannot do with each tenant's tree."""
        self._in_effect = loaded
        self._check = check
        self._followed: list[_Followed] = []
        self._heeding: list[Callable[[str], None]] = [set_log_level]

    def follow(self, name: str, settings: Settings) -> None:
        """Have reloads change this tenant's settings, too."""
        self._followed.append(_Followed(name, settings))

    def pass_on(self, set_level: Callable[[str], None]) -> None:
        """Have another process told of the log level after each reload, too."""
        self._heeding.append(set_level)

    async def reload(self, *, dry_run: bool) -> list[SettingChange]:
        """Read the sources again and take over the settings that can change while the service runs. Return all settings
        that differ from those in effect. Raises InvalidRequest naming the source and the setting, and then changes
        nothing."""
        before = self._in_effect
        after = await asyncio.to_thread(self._read, before)
        changes = setting_changes(before, after)
        live = [change.name for change in changes if change.is_live]
        self._check_effect(after, live)
        if dry_run or not live:
            return changes
        for each in self._followed:
            take_over(each.settings, after.of_tenant(each.name), live)
        take_over(before.settings, after.settings, live)
        for set_level in self._heeding:
            set_level(before.settings.server.log_level)
        origins = {**before.origins, **{name: after.origins[name] for name in live}}
        self._in_effect = replace(before, origins=origins)
        _log.info("settings were reloaded", extra={"changed": live})
        return changes

    def _read(self, before: LoadedSettings) -> LoadedSettings:
        after = before.again()
        self._check({name: after.of_tenant(name) for name in after.settings.tenant_names})
        return after

    def _check_effect(self, after: LoadedSettings, live: list[str]) -> None:
        """Check these changes beside the settings that wait for a restart: these still have their values from before,
        and take as much."""
        try:
            self._check({
                each.name: with_taken_over(each.settings, after.of_tenant(each.name), live) for each in self._followed
            })  # fmt: skip
        except InvalidRequest as error:
            said = f"until a restart takes over the other changes: {error.message}"
            raise InvalidRequest(said, **error.fields) from error
