"""Decides which envelope the copies in a tier get."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping

from kvstore.chunk import MAC, Trust, check_available
from kvstore.config import TenantSettings
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.seams import EnvelopeKey, EnvelopeRing, TenantKeys
from kvstore.server.secrets import read_envelope_keys
from kvstore.server.world import TierOwner

_log = logging.getLogger("kvstore.trust")


def trust_of(tier: str, envelope: str, owner: TierOwner) -> Trust:
    """Resolve ``tiers.<tier>.envelope`` for one tenant; where copies are not protected that is said. Raises
    InvalidRequest where it cannot be had."""
    setting = f"tiers.{tier}.envelope"
    kind = envelope or (MAC if owner.ring else "none")
    if kind == "none":
        _log.warning(
            "copies in this tier are not protected: whoever can write there can alter them, and this node would not "
            "see it; give the tenant a secret_file or an envelope_key_file, and set the tier's envelope to mac or aead",
            extra={"tier": tier, "setting": setting},
        )
        return Trust("none", owner.ring)
    if not owner.ring:
        raise InvalidRequest(
            f"{setting} = {kind}: the tenant has no key: set tenants.NAME.envelope_key_file or secret_file, "
            "or use none",
            setting=setting,
        )
    check_available(kind, setting)
    _log.info("copies in this tier are sealed", extra={"tier": tier, "envelope": kind})
    return Trust(kind, owner.ring)


class Rings:
    """The envelope keys of all tenants. Raises InvalidRequest naming the setting for a file that is none."""

    def __init__(self, keys: Mapping[str, TenantKeys], tenants: Mapping[str, TenantSettings]) -> None:
        self._keys = keys
        self._tenants = tenants
        self._rings = {name: EnvelopeRing(self._read(name)) for name in keys}

    def __getitem__(self, tenant: str) -> EnvelopeRing:
        return self._rings[tenant]

    def follow(self) -> None:
        """From the running loop: read the files anew at SIGHUP. Without any it ends the process, as ever."""
        if any(each.envelope_key_file for each in self._tenants.values()):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_again)

    def read_again(self) -> None:
        """A tenant whose file is none keeps the keys that it has."""
        for name, ring in self._rings.items():
            before = set(ring.key_ids)
            try:
                ring.change(self._read(name))
            except KVStoreError as error:
                _log.error("envelope keys stay as they were", extra={"tenant": name, "reason": error.message})
            else:
                _log.info("envelope keys were read", extra={"tenant": name, "keys": len(ring.key_ids)})
                if gone := before - set(ring.key_ids):
                    _log.warning(
                        "envelope keys were taken out: the device is read with them until the next start; from then on "
                        "what they sealed there are misses",
                        extra={"tenant": name, "keys": len(gone)},
                    )

    def _read(self, name: str) -> list[EnvelopeKey]:
        return read_envelope_keys(self._keys[name], self._tenants.get(name))
