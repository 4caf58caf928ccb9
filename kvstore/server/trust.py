"""The protection of copies in tiers: the envelope that each tier's copies get, and the tenants' envelope keys."""

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


def envelope_of(envelope: str, owner: TierOwner) -> str:
    """Return the envelope that a tier's setting means for one tenant."""
    return envelope or (MAC if owner.ring else "none")


def trust_of(tier: str, envelope: str, owner: TierOwner) -> Trust:
    """Return the protection that ``tiers.<tier>.envelope`` means for one tenant, and log it; unprotected copies are
    worth a warning. Raises InvalidRequest where the envelope cannot be used."""
    setting = f"tiers.{tier}.envelope"
    kind = envelope_of(envelope, owner)
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
    """The envelope keys of all tenants. Raises InvalidRequest naming the setting for a file that is no key file."""

    def __init__(self, keys: Mapping[str, TenantKeys], tenants: Mapping[str, TenantSettings]) -> None:
        self._keys = keys
        self._tenants = tenants
        self._rings = {name: EnvelopeRing(self._read(name)) for name in keys}

    def __getitem__(self, tenant: str) -> EnvelopeRing:
        return self._rings[tenant]

    def follow(self) -> None:
        """Have the running loop read the key files again at SIGHUP. Without key files SIGHUP ends the process, as
        usual."""
        if any(each.envelope_key_file for each in self._tenants.values()):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_again)

    def read_again(self) -> None:
        """Read the key files again. A tenant whose file cannot be used keeps its keys."""
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
