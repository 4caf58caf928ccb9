"""What may be set in ``kv_connector_extra_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import InvalidRequest

LOADS = ("async", "layerwise")
DIGESTS = ("kvstore", "vllm")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Raises InvalidRequest naming the setting that is wrong.

    ``load``: ``async`` lets other requests run while a prefix is on its way; ``layerwise`` loads within the step, each
    layer while those before it compute. ``weights_digest``: whose weights these are, when they should not or cannot be
    digested from their files. ``timeout_s`` bounds each call to the sidecar. ``digests``: ``vllm`` names chunks by
    vLLM's own block hashes, for who routes by these (see ``hashes``).
    """

    address: str | None = None
    chunk_tokens: int = 256
    load: str = "async"
    digests: str = "kvstore"
    weights_digest: str | None = None
    timeout_s: float = 5.0
    save_output: bool = False
    allow_unknown_version: bool = False

    def __post_init__(self) -> None:
        kinds: dict[str, type | tuple[type, ...]] = {
            "address": (str, type(None)), "chunk_tokens": int, "load": str, "digests": str,
            "weights_digest": (str, type(None)), "timeout_s": (int, float), "save_output": bool,
            "allow_unknown_version": bool,
        }  # fmt: skip
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise InvalidRequest(f"kv_connector_extra_config: {name} cannot be {value!r}")
        for name, values in (("load", LOADS), ("digests", DIGESTS)):
            if getattr(self, name) not in values:
                raise InvalidRequest(
                    f"kv_connector_extra_config: {name} {getattr(self, name)!r} must be one of {', '.join(values)}"
                )
        if not 0 < self.timeout_s <= 600:
            raise InvalidRequest(f"kv_connector_extra_config: timeout_s {self.timeout_s} must be in 0..600 seconds")
        digest = self.weights_digest
        if digest is not None and not re.fullmatch(r"[0-9a-f]{32,128}|unverified:.+", digest):
            raise InvalidRequest(
                f"kv_connector_extra_config: weights_digest {digest[:40]!r} must be 32..128 lower-case hex digits, or "
                "'unverified:<name>'"
            )

    @staticmethod
    def of(extra: Mapping[str, Any]) -> Settings:
        known = {each.name for each in fields(Settings)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise InvalidRequest(
                f"kv_connector_extra_config: {', '.join(unknown)} is not a setting; the settings are "
                f"{', '.join(sorted(known))}"
            )
        return Settings(**extra)
