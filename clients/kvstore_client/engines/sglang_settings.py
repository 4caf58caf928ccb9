"""The fields of ``--hicache-storage-backend-extra-config``: the backend's own, and those that SGLang reads itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvstore.errors import InvalidRequest

WHERE = "--hicache-storage-backend-extra-config"
OF_SGLANG = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "prefetch_threshold",
        "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """The backend's settings. Raises InvalidRequest naming the field that is wrong.

    ``weights_digest``: the identity of the weights, for models that have their name and path in common.
    ``kv_cache_dtype``: that of a pool of plain bytes, outside of an engine.
    """

    socket: str | None = None
    weights_digest: str | None = None
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{WHERE}: {each.name} cannot be {value!r:.40}: give text")
        digest = self.weights_digest
        if digest and not re.fullmatch(r"[0-9a-f]{32,128}|unverified:.+", digest):
            raise InvalidRequest(
                f"{WHERE}: weights_digest {digest[:40]!r} must be 32..128 lower-case hex digits, or 'unverified:<name>'"
            )

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        """Return the settings among these fields. Raises InvalidRequest for one that nobody reads."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(map(str, extra.keys() - known - OF_SGLANG))
        if unknown:
            raise InvalidRequest(
                f"{WHERE}: {', '.join(unknown)} is not a field; kvstore's are {', '.join(sorted(known))}"
            )
        return cls(**{name: value for name, value in extra.items() if name in known})
