"""The limits of the wire's fields: one table for every repeated, bytes and string field of every message.

``bounds`` checks requests against it before anything is computed from them. The limits are contract, not settings. They
are far above the requests of engines (a prompt of 2 M tokens named by hashes of 16; every layer of the deepest model),
and low enough that one message costs its reader milliseconds and a few times its own size in memory. Limits that an
operator may want lower are settings: ``limits.token_count_max``, ``limits.message_bytes_max``.

The server makes a reply from its own data. The limits of its fields follow from the request's; both ends hold the whole
reply to ``REPLY_BYTES_MAX``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.keys import DIGEST_BYTES, SUPERSEDES_MAX, TAILS_BESIDE_MAX
from kvstore.planning.loading.kept import ENGINES_MAX
from kvstore.planning.loading.outcome import PLANS_KEPT
from kvstore.planning.profile import PROFILE_SENT_BYTES_MAX, PROFILES_MAX
from kvstore.units import MIB

CHAIN_CHUNKS_MAX = 1 << 17
"""Digests in one chain: 2 M tokens in chunks of 16."""
LAYERS_MAX = 1024
PARTS_MAX = 1 << 17
"""Chunks of one request, times the parts of each that it asks for (the attention cache, E of each hidden layer)."""
SEGMENTS_MAX = 4096
PREFILLS_TOLD_MAX = 64
"""Prefills of one engine in one report."""
FILLS_MAX = 1 << 18
TAILS_ASKED_MAX = 1024
LENGTHS_BYTES = (1 << 16) // 8
"""A bit for every length that a partial chunk can have."""
REPLACES_MAX = 1024
RUNS_MAX = 1 << 15
"""Runs in a message with data: slabs of 128 bytes in the largest one."""
IDS_MAX = 1 << 14
NODE_NAME_MAX = 128
SELECTED_CHUNKS_MAX = 1 << 14
"""Chunks of a prompt that an operator names: 2 M tokens in chunks of 128."""
HOTTEST_MAX = 256
REPLY_BYTES_MAX = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit of one field. ``count``: items of a repeated field. ``size``: bytes of a bytes field, characters of a
    string; of each item where the field is repeated. 0: no such limit."""

    count: int = 0
    size: int = 0


def _digests(count: int) -> Limit:
    return Limit(size=count * DIGEST_BYTES)


_SPEC: Mapping[str, Limit] = {
    "RopeFactor.name": Limit(size=128),
    "RopeSpec.kind": Limit(size=128),
    "RopeSpec.factors": Limit(count=4096),
    "RopeSpec.mrope": Limit(count=64),
    "ModelSpec.model_id": Limit(size=512),
    "ModelSpec.weights_digest": Limit(size=512),
    "ModelSpec.adapter_id": Limit(size=512),
    "ModelSpec.layers": Limit(count=LAYERS_MAX),
    "ModelSpec.cache_dtype": Limit(size=64),
    "ModelSpec.hidden_dtype": Limit(size=64),
    "ModelSpec.scales": Limit(count=LAYERS_MAX),
    "ModelSpec.tokenizer_digest": Limit(size=512),
}

_REQUESTS: Mapping[str, Limit] = {
    "ChainQuery.fingerprint": Limit(size=64),
    "ChainQuery.digests": _digests(CHAIN_CHUNKS_MAX),
    "ChainQuery.hidden_layers": Limit(count=LAYERS_MAX),
    "LookupRequest.segments": Limit(count=SEGMENTS_MAX),
    "LocateRequest.queries": Limit(count=SEGMENTS_MAX),
    "LookupRequest.tail_digests": _digests(TAILS_ASKED_MAX),
    "FetchRequest.layers": Limit(count=LAYERS_MAX),
    "FetchRequest.ticket": Limit(size=64),
    "ReleaseRequest.lease_ids": Limit(count=IDS_MAX),
    "ReleaseRequest.tickets": Limit(count=IDS_MAX, size=64),
    "WatchRequest.tenant": Limit(size=64),
    "Reserve.token_digests": _digests(CHAIN_CHUNKS_MAX),
    "Reserve.replaces": _digests(REPLACES_MAX),
    "Join.ticket": Limit(size=64),
    "Join.fingerprint": Limit(size=64),
    "FillStrips.fills": Limit(count=FILLS_MAX),
    "Commit.fills": Limit(count=FILLS_MAX),
    "Commit.supersedes": _digests(SUPERSEDES_MAX),
    "StoreBytesRequest.runs": Limit(count=RUNS_MAX),
    "StoreBytesRequest.checksum": Limit(size=16),
    "StoreBytesRequest.padding": Limit(size=64),
    "StoreBytesRequest.data": Limit(size=REPLY_BYTES_MAX),
}

_HANDED_ON: Mapping[str, Limit] = {
    "HeldPrefix.ticket": Limit(size=64),
    "HeldPrefix.digests": _digests(CHAIN_CHUNKS_MAX),
    "HeldPrefix.places": Limit(count=PARTS_MAX),
    "SharedStore.ticket": Limit(size=64),
    "SharedStore.digests": _digests(CHAIN_CHUNKS_MAX),
    "SharedStore.hidden_layers": Limit(count=LAYERS_MAX),
}

_REPLIES: Mapping[str, Limit] = {
    "RegisterModelResponse.fingerprint": Limit(size=64),
    "PartialTail.digest": _digests(1),
    "SegmentFound.runs": Limit(count=CHAIN_CHUNKS_MAX),
    "NodePrefix.node": Limit(size=NODE_NAME_MAX),
    "LocatedChain.prefixes": Limit(count=1 << 16),
    "LocateResponse.chains": Limit(count=SEGMENTS_MAX),
    "LocateResponse.node": Limit(size=NODE_NAME_MAX),
    "LocateResponse.reason": Limit(size=4096),
    "LocateResponse.unknown_tiers": Limit(count=64),
    "LookupResponse.runs": Limit(count=CHAIN_CHUNKS_MAX),
    "LookupResponse.tails": Limit(count=64),
    "LookupResponse.tail_lengths": Limit(size=LENGTHS_BYTES),
    "LookupResponse.ticket": Limit(size=64),
    "LookupResponse.segments": Limit(count=SEGMENTS_MAX),
    "LookupResponse.places": Limit(count=PARTS_MAX),
    "ResidentChunk.extents": Limit(count=1 << 20),
    "Arrival.slabs": Limit(size=LAYERS_MAX // 8),
    "FetchResponse.chunks": Limit(count=PARTS_MAX),
    "FetchResponse.tails": Limit(count=64),
    "FetchResponse.tail_lengths": Limit(size=LENGTHS_BYTES),
    "FetchResponse.arrivals": Limit(count=PARTS_MAX),
    "ChunkEvent.fingerprint": Limit(size=64),
    "ChunkEvent.model_id": Limit(size=512),
    "ChunkEvent.digest": _digests(1),
    "ChunkEvent.parent": _digests(1),
    "WatchResponse.epoch": Limit(size=64),
    "WatchResponse.events": Limit(count=1024),
    "StoreResponse.states": Limit(count=PARTS_MAX),
    "StoreResponse.refusal": Limit(size=4096),
    "StoreResponse.tails": Limit(count=TAILS_BESIDE_MAX),
    "TailsBeside.lengths": Limit(size=LENGTHS_BYTES),
    "StoreResponse.ticket": Limit(size=64),
    "StoreResponse.levels": Limit(count=8),
    "LevelState.reason": Limit(size=4096),
    "ConnectResponse.secret": Limit(size=64),
    "FetchBytesResponse.lost": Limit(count=PARTS_MAX),
    "FetchBytesResponse.runs": Limit(count=RUNS_MAX),
    "FetchBytesResponse.padding": Limit(size=64),
    "FetchBytesResponse.data": Limit(size=REPLY_BYTES_MAX),
}

_OPERATORS: Mapping[str, Limit] = {
    "ModelStats.model_id": Limit(size=512),
    "ModelStats.fingerprint": Limit(size=64),
    "TierStats.name": Limit(size=64),
    "TierStats.state": Limit(size=64),
    "TierStats.envelope": Limit(size=64),
    "TierStats.reason": Limit(size=4096),
    "StatsResponse.version": Limit(size=64),
    "StatsResponse.tenant": Limit(size=64),
    "StatsResponse.models": Limit(count=1 << 16),
    "StatsResponse.counters": Limit(count=1024),
    "StatsResponse.CountersEntry.key": Limit(size=128),
    "StatsResponse.tiers": Limit(count=16),
    "StatsResponse.tier_problem": Limit(size=4096),
    "StatsResponse.rates": Limit(count=64),
    "StatsResponse.engines": Limit(count=ENGINES_MAX),
    "EngineRate.fingerprint": Limit(size=64),
    "EngineRate.model_id": Limit(size=512),
    "TierRate.tier": Limit(size=64),
    "SettingChange.name": Limit(size=256),
    "SettingChange.before": Limit(size=8192),
    "SettingChange.after": Limit(size=8192),
    "ReloadResponse.changes": Limit(count=1 << 16),
    "ModelStats.served_hours": Limit(count=64),
    "HottestResponse.prefixes": Limit(count=HOTTEST_MAX),
    "HotPrefix.digest": _digests(1),
    "HotPrefix.model_id": Limit(size=512),
    "HotPrefix.fingerprint": Limit(size=64),
    "HotPrefix.tier": Limit(size=64),
    "Selection.model": Limit(size=512),
    "Selection.digest": Limit(size=2 * DIGEST_BYTES),
    "Selection.tier": Limit(size=64),
    "Selection.chain": _digests(SELECTED_CHUNKS_MAX),
    "Move.tier": Limit(size=64),
    "Outcome.what": Limit(size=64),
    "ChangeResponse.outcomes": Limit(count=64),
    "ChangeResponse.problem": Limit(size=4096),
    "ShowChunkRequest.digest": Limit(size=2 * DIGEST_BYTES),
    "TierReport.problem": Limit(size=4096),
    "TierReport.write_policy": Limit(size=64),
    "TierReport.encodings": Limit(count=1024),
    "EncodingReport.fingerprint": Limit(size=64),
    "EncodingReport.encoding": Limit(size=64),
    "TiersResponse.tiers": Limit(count=16),
    "TiersResponse.absent": Limit(count=16, size=4096),
    "TiersResponse.tenant": Limit(size=64),
    "ListChunksResponse.chunks": Limit(count=1024),
    "ListChunksResponse.totals": Limit(count=1 << 16),
    "ChunkCopy.tier": Limit(size=64),
    "ChunkEntry.digest": _digests(1),
    "ChunkEntry.parent": _digests(1),
    "ChunkEntry.fingerprint": Limit(size=64),
    "ChunkEntry.model_id": Limit(size=512),
    "ChunkEntry.copies": Limit(count=16),
    "TierTotal.tier": Limit(size=64),
    "ModelTotal.fingerprint": Limit(size=64),
    "ModelTotal.model_id": Limit(size=512),
    "ModelTotal.tiers": Limit(count=16),
    "ModelTotal.profiles": Limit(count=PROFILES_MAX, size=1024),
    "HeaderFacts.kind": Limit(size=64),
    "HeaderFacts.write_id": Limit(size=64),
    "HeaderFacts.storage_key": Limit(size=64),
    "HeaderFacts.token_digest": _digests(1),
    "HeaderFacts.rope_digest": Limit(size=64),
    "HeaderFacts.tier": Limit(size=64),
    "ChunkDetail.header_problem": Limit(size=4096),
    "ChunkDetail.ancestors": _digests(1024),
    "ChunkDetail.children": _digests(256),
    "ChunkDetail.levels": Limit(count=8),
    "ShowChunkResponse.parts": Limit(count=1 << 16),
    "StatsRequest.computed": Limit(count=ENGINES_MAX),
    "StatsRequest.planned": Limit(count=PREFILLS_TOLD_MAX),
    "PlannedPrompt.fingerprint": Limit(size=64),
    "EnginePrefills.fingerprint": Limit(size=64),
    "EnginePrefills.prefills": Limit(count=PREFILLS_TOLD_MAX),
    "PlanEntry.fingerprint": Limit(size=64),
    "PlanEntry.model_id": Limit(size=512),
    "PlanEntry.state": Limit(size=64),
    "PlansResponse.plans": Limit(count=PLANS_KEPT),
}

_PREFILLS: Mapping[str, Limit] = {
    "BeginPrefill.ways": Limit(count=16),
    "Candidate.form": Limit(size=64),
    "Candidate.refused": Limit(size=4096),
    "RegisterProfileRequest.profile": Limit(size=PROFILE_SENT_BYTES_MAX),
    "FindProfileRequest.receiver": Limit(size=512),
    "FindProfileRequest.sender": Limit(size=512),
    "FindProfileRequest.reuse": Limit(size=64),
    "FindProfileRequest.provenance": Limit(size=64),
    "FindProfileResponse.profile": Limit(size=PROFILE_SENT_BYTES_MAX),
    "RecomputeSetting.selector": Limit(size=64),
    "RecomputeSetting.metric": Limit(size=64),
    "LoadPlan.candidates": Limit(count=64),
    "LoadPlan.why": Limit(size=4096),
}

FIELD_LIMITS: Mapping[str, Limit] = {
    **{f"kvstore.v1.{name}": limit for name, limit in {**_SPEC, **_REQUESTS, **_HANDED_ON, **_REPLIES}.items()},
    **{f"kvstore.v1alpha.{name}": limit for name, limit in {**_OPERATORS, **_PREFILLS}.items()},
}

MESSAGE_BYTES: Mapping[str, int] = {
    "kvstore.v1.RegisterModelRequest": MIB,
    "kvstore.v1.LookupRequest": 8 * MIB,
    "kvstore.v1.LocateRequest": 5 * MIB,
    "kvstore.v1.StoreRequest": 16 * MIB,
    "kvstore.v1.FetchRequest": 5 * MIB,
    "kvstore.v1.ReleaseRequest": 2 * MIB,
    "kvstore.v1.WatchRequest": 4096,
    "kvstore.v1.ConnectRequest": 4096,
    "kvstore.v1.FetchBytesRequest": 5 * MIB,
    "kvstore.v1.StoreBytesRequest": 4 * MIB,
    "kvstore.v1.FetchBytesResponse": REPLY_BYTES_MAX,
    "kvstore.v1.HeldPrefix": 6 * MIB,
    "kvstore.v1.SharedStore": 6 * MIB,
    "kvstore.v1alpha.StatsRequest": MIB,
    "kvstore.v1alpha.TiersRequest": 4096,
    "kvstore.v1alpha.ListChunksRequest": MIB,
    "kvstore.v1alpha.ChangeRequest": 6 * MIB,
    "kvstore.v1alpha.ShowChunkRequest": 4096,
    "kvstore.v1alpha.HottestRequest": 4096,
    "kvstore.v1alpha.ReloadRequest": 4096,
    "kvstore.v1alpha.PlansRequest": 4096,
    "kvstore.v1alpha.PartialPrefillRequest": 5 * MIB,
    "kvstore.v1alpha.RegisterProfileRequest": PROFILE_SENT_BYTES_MAX + 4096,
    "kvstore.v1alpha.FindProfileRequest": 4096,
}
"""Bytes of a whole message, checked before it is decoded; of a message with data, the bytes before the data."""
