"""The settings in vLLM's configuration of the connector, the secondary tier and the encoder-cache connector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute
from kvstore.planning.loading.outcome import MODES

LOADS = ("async", "layerwise")
DIGESTS = ("kvstore", "vllm")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str, "str | None": (str, type(None)), "int | None": (int, type(None)), "float": (int, float), "bool": bool,
    "dict[str, Any] | None": (dict, type(None)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Common:
    """The settings that all three have. Raises InvalidRequest naming the setting that is wrong.

    ``weights_digest``: the identity of the weights, when they should not or cannot be digested from their files.
    ``timeout_s`` bounds each call to the sidecar.
    """

    WHERE: ClassVar[str]
    address: str | None = None
    weights_digest: str | None = None
    timeout_s: float = 5.0
    allow_unknown_version: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), _KINDS[str(each.type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise InvalidRequest(f"{self.WHERE}: {each.name} cannot be {value!r}")
        if not 0 < self.timeout_s <= 600:
            raise InvalidRequest(f"{self.WHERE}: timeout_s {self.timeout_s} must be in 0..600 seconds")
        digest = self.weights_digest
        if digest is not None and not re.fullmatch(r"[0-9a-f]{32,128}|unverified:.+", digest):
            raise InvalidRequest(
                f"{self.WHERE}: weights_digest {digest[:40]!r} must be 32..128 lower-case hex digits, or "
                "'unverified:<name>'"
            )

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Self:
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise InvalidRequest(
                f"{cls.WHERE}: {', '.join(unknown)} is not a setting; the settings are {', '.join(sorted(known))}"
            )
        return cls(**extra)


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings(Common):
    """The connector's settings.

    ``chunk_tokens`` None: 256, or fewer where a window is shorter (see ``groups``). ``load``: ``async`` lets other
    requests run while a prefix is on its way; ``layerwise`` loads within the step, each layer while those before it
    compute. ``digests``: ``vllm`` names chunks by vLLM's own block hashes, for routers that use these (see ``hashes``).
    ``planning``: ``on`` loads only tokens that load sooner than they compute; ``observe`` logs that choice, and loads
    all. ``recompute``: how much of the documents in a prompt is computed again, as the arguments of ``Recompute``;
    None: no document is reused.
    """

    WHERE: ClassVar[str] = "kv_connector_extra_config"
    chunk_tokens: int | None = None
    load: str = "async"
    digests: str = "kvstore"
    save_output: bool = False
    planning: str = "off"
    recompute: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("load", LOADS), ("digests", DIGESTS), ("planning", MODES)):
            if getattr(self, name) not in values:
                raise InvalidRequest(f"{self.WHERE}: {name} {getattr(self, name)!r} must be one of {', '.join(values)}")
        if self.mends and self.digests != "kvstore":
            raise InvalidRequest(
                f'{self.WHERE}: recompute needs the tokens of documents, which "digests": "vllm" does not name: leave '
                "out one of the two"
            )

    @property
    def mends(self) -> Recompute | None:
        """How documents are mended; None: they are not reused. Raises InvalidRequest."""
        if self.recompute is None:
            return None
        known = {each.name for each in fields(Recompute)}
        unknown = sorted(set(self.recompute) - known)
        if unknown:
            raise InvalidRequest(
                f"{self.WHERE}: recompute has no {', '.join(map(str, unknown))}; it takes {', '.join(sorted(known))}"
            )
        try:
            found = Recompute(**{"first_layer": 0, "last_layer": -1, **self.recompute})
        except InvalidRequest as error:
            raise InvalidRequest(f"{self.WHERE}: recompute: {error.message}") from error
        if found.first_layer:
            raise InvalidRequest(
                f"{self.WHERE}: recompute: first_layer {found.first_layer} needs hidden states, which vLLM does not "
                "keep: leave it out"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class OffloadTierSettings(Common):
    """The secondary tier's settings. ``locality`` is vLLM's own: the tier's locality in its KV events."""

    WHERE: ClassVar[str] = "secondary_tiers"
    locality: str = "LOCAL"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights_digest is None:
            raise InvalidRequest(
                f"{self.WHERE}: weights_digest is missing: vLLM tells a tier the model's path only, so name the "
                "weights, and with them scales, quantisation, overrides and attention backend where engines differ in "
                "these: hex digits, or 'unverified:<name>'"
            )


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Common):
    """The encoder-cache connector's settings."""

    WHERE: ClassVar[str] = "ec_connector_extra_config"
