"""Reloading: the settings that change while the service runs. All others need a restart.

A leaf is frozen for the components that have it. Only a reload writes into a leaf, on the event loop's thread, between
two steps of other tasks. So only settings that are read anew at every use can change. Other settings were used once, to
build memory, sockets and tiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvstore.config.load import DEFAULT, LoadedSettings
from kvstore.config.settings import Settings

LIVE = frozenset(
    {
        "server.log_level",
        "policy.demotion_wait_s", "policy.scrub_bytes_per_s", "policy.canary_interval_s",
        *(
            f"limits.{name}"
            for name in (
                "session_count_max", "staging_bytes_max", "staging_bytes_total_max", "staging_count_max",
                "reservation_count_max", "reservation_age_s_max", "leased_bytes_max", "lease_age_s_max",
                "lease_count_max", "ticket_age_s_max", "ticket_count_max", "ticket_bytes_max", "stream_count_max",
                "watcher_count_max", "watch_event_count_max", "pin_bytes_max",
            )
        ),
    }
)  # fmt: skip
ONLY_WHILE_ON = frozenset({"policy.scrub_bytes_per_s", "policy.canary_interval_s"})
"""Settings that 0 turns off until the next restart."""


class SettingChange(NamedTuple):
    """A setting whose value in the sources differs from the value in effect. ``before``: the value in effect,
    ``after``: the value in the sources; as text, None when the setting does not exist there. ``is_live``: it can change
    while the service runs."""

    name: str
    before: str | None
    after: str | None
    is_live: bool


def setting_changes(before: LoadedSettings, after: LoadedSettings) -> list[SettingChange]:
    """Return the settings that differ. A setting that is a default in both is left out: it follows from other settings
    or from the machine, and changes at the next restart."""
    old, new = _by_name(before), _by_name(after)
    found = []
    for name in dict.fromkeys((*old, *new)):
        (was, was_shown), (now, now_shown) = old.get(name, (None, None)), new.get(name, (None, None))
        is_said = not before.origins.get(name) == after.origins.get(name) == DEFAULT
        if was != now and is_said:
            is_live = name in LIVE and (name not in ONLY_WHILE_ON or bool(was and now))
            found.append(SettingChange(name, was_shown, now_shown, is_live))
    return found


def _by_name(loaded: LoadedSettings) -> Mapping[str, tuple[object, str]]:
    return {name: (loaded.value(name), str(shown)) for name, shown, _ in loaded.rows()}


def take_over(target: Settings, source: Settings, names: list[str]) -> None:
    """Copy the values of these live settings from ``source`` to ``target``."""
    for name in names:
        assert name in LIVE, name
        section, _, field = name.partition(".")
        object.__setattr__(getattr(target, section), field, getattr(getattr(source, section), field))


def with_taken_over(target: Settings, source: Settings, names: list[str]) -> Settings:
    """Return what ``take_over`` makes of ``target``, which stays as it is."""
    sections = {name.partition(".")[0] for name in names}
    tree = replace(target, **{each: replace(getattr(target, each)) for each in sections})
    take_over(tree, source, names)
    return tree
