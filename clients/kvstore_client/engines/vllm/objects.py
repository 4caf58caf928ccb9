"""vLLM's own objects: the attributes that are used here, and no others. Types are checked without vLLM, so these say
what a new release must still have. What only some releases have is read by ``getattr`` where it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol


class ItemPlace(Protocol):
    """The place of an image or a sound in the prompt, in tokens."""

    offset: int
    length: int

    def get_num_embeds(self) -> int: ...


class Item(Protocol):
    """An image or a sound of a request. ``identifier``: the hash of its content, or the client's own name of it."""

    identifier: str
    modality: str
    mm_position: ItemPlace


class LoraRequest(Protocol):
    """A request's adapter. ``lora_int_id``: the number by which vLLM knows what it has loaded."""

    lora_int_id: int
    lora_name: str
    lora_path: str


class EngineRequest(Protocol):
    """A request, as the scheduler has it. ``block_hashes``: those of its full blocks, by vLLM's own hash."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    mm_features: Sequence[Item]


class RequestBlocks(Protocol):
    """The blocks that a request was given, by group."""

    def get_block_ids(self) -> Sequence[list[int]]: ...


class NewRequest(Protocol):
    """A request in the first step that computes of it."""

    req_id: str
    block_ids: Sequence[list[int]]
    num_computed_tokens: int


class RunningRequests(Protocol):
    """The requests that go on in a step, in columns. ``new_block_ids``: by group; None where a request needs no more;
    all of its blocks where it is resumed."""

    req_ids: Sequence[str]
    new_block_ids: Sequence[Sequence[list[int]] | None]
    num_computed_tokens: Sequence[int]
    resumed_req_ids: Collection[str]


class BlockState(Protocol):
    """The block tables of the requests of a step."""

    resolve_block_ids: Callable[[str], Sequence[list[int]]]
    """Returns a request's blocks now, by group: 0 where there is none any more."""


class ScheduledStep(Protocol):
    """A step, as the scheduler has planned it."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: RunningRequests
    free_encoder_mm_hashes: Sequence[str]
    kv_connector_block_state: BlockState


def scheduled_requests(output: ScheduledStep) -> Iterable[tuple[str, Sequence[list[int]], bool, int]]:
    """Yield, per request of a step: its id, blocks by group (none: no groups), True if these are all it has, and the
    number of tokens computed before."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, True, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for index, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index] or ()
        yield name, blocks, bool(blocks) and name in cached.resumed_req_ids, cached.num_computed_tokens[index]


class WorkersReport(Protocol):
    """The workers' report of a step: the blocks whose loads failed, and the requests whose loads have ended."""

    invalid_block_ids: Collection[int] | None
    finished_recving: Collection[str] | None
    failed_recving: Collection[str]
    """Those of them whose loads failed, where failures are told by request."""


class LayerCache(Protocol):
    """The cache of one layer, or of a group of layers. Its class tells its kind."""

    dtype: object
    block_size: int
    head_size: int
    num_kv_heads: int


class CacheGroup(Protocol):
    """Layers that share a block table."""

    kv_cache_spec: LayerCache
    layer_names: Sequence[str]


class CacheConfig(Protocol):
    """The groups of layers that keep a cache."""

    kv_cache_groups: Sequence[CacheGroup]


class HuggingFaceConfig(Protocol):
    """A model's configuration. Its fields are the family's own."""

    def to_dict(self) -> dict[str, object]: ...


class ModelConfig(Protocol):
    """The model's part of an engine's configuration. ``model``: a directory, or a name of the hub."""

    model: object
    revision: str | None
    dtype: object
    quantization: object
    max_model_len: int
    is_encoder_decoder: bool
    enable_sleep_mode: bool
    hf_config: HuggingFaceConfig
    hf_text_config: HuggingFaceConfig

    def get_hidden_size(self) -> int: ...

    def get_vocab_size(self) -> int: ...

    def get_total_num_kv_heads(self) -> int: ...


class ParallelConfig(Protocol):
    """The number of ranks that share the model."""

    tensor_parallel_size: int


class LoadConfig(Protocol):
    """The way in which the weights are read. ``load_format``: a word, or an enum of words."""

    load_format: object


class CacheSettings(Protocol):
    """The engine's settings of its cache. ``cache_dtype``: a name of vLLM's own."""

    cache_dtype: str


class DraftConfig(Protocol):
    """The settings of speculative decoding, where another model drafts tokens. ``num_speculative_tokens``: those of one
    step."""

    method: str
    num_speculative_tokens: int
    draft_model_config: ModelConfig
    draft_load_config: LoadConfig | None


class EngineConfig(Protocol):
    """An engine's configuration, as far as it decides what the cache is."""

    model_config: ModelConfig
    cache_config: CacheSettings
    parallel_config: ParallelConfig
    load_config: LoadConfig


class OffloadJob(Protocol):
    """Chunks of vLLM's CPU cache to be stored or loaded: their keys, and the numbers of their rows."""

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: Sequence[int]
    is_promotion: bool


class OffloadRequest(Protocol):
    """The request for which chunks were looked up."""

    req_id: str
