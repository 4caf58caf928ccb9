"""vLLM's encoder-cache connector: an image or a sound is encoded once on a node.

    --ec-transfer-config '{"ec_connector": "KVStoreECConnector", "ec_role": "ec_both",
        "ec_connector_module_path": "kvstore_client.engines.vllm.encoder"}'

An item's name has two parts. One is vLLM's identifier: a hash of its content and of the request's settings for it, or
the client's own name. The other is the model: weights, configuration, dtype, and the settings of its input processor.

Source: vLLM 0.32, vllm/distributed/ec_transfer/ec_connector/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.version import __version__ as vllm_version

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Tensor
from kvstore_client.begin import connect
from kvstore_client.engines.vllm.embeddings import Fetching, Keeping
from kvstore_client.engines.vllm.identity import engine_identity, worker_rank
from kvstore_client.engines.vllm.naming import check_items
from kvstore_client.engines.vllm.objects import EngineConfig, EngineRequest, ScheduledStep
from kvstore_client.engines.vllm.settings import EncoderSettings
from kvstore_client.engines.vllm.versions import ENCODER, check_interface, check_version


@dataclass
class StepItems(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The metadata that vLLM carries from the scheduler to the workers: embeddings by identifier, and their model."""

    spec: ModelSpec | None = None
    loads: dict[str, Tensor] = field(default_factory=dict)


class KVStoreECConnector(ECConnectorBase):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Takes embeddings from a kvstore sidecar and keeps them there. Raises InvalidRequest for settings that it cannot
    serve."""

    def __init__(self, vllm_config: Any, role: object) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = EncoderSettings.of(vllm_config.ec_transfer_config.ec_connector_extra_config)
        check_version(vllm_version, settings.allow_unknown_version)
        check_interface(ECConnectorBase, type(self), vllm_version, ENCODER)
        _check_model(vllm_config)
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        client = connect(settings.address, required=False, timeout_s=settings.timeout_s)
        self._spec: ModelSpec | None = None
        self._fetching: Fetching | None = None
        self._keeping: Keeping | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._spec = _spec_of(vllm_config, settings)
            self._fetching = Fetching(client, self._spec)
        else:
            self._keeping = Keeping(client)

    # ------------------------------------------------------------ scheduler

    def ensure_cache_available(self, request: EngineRequest, num_computed_tokens: int) -> bool:
        if self._fetching is None or not self.is_consumer:
            return True
        wanted = [
            (each.identifier, each.mm_position.get_num_embeds())
            for each in request.mm_features
            if each.mm_position.offset + each.mm_position.length > num_computed_tokens
            and each.modality != "prompt_embeds"
        ]
        return self._fetching.are_settled(request.request_id, wanted)

    def has_cache_item(self, identifier: str) -> bool:
        return self._fetching is not None and self._fetching.has(identifier)

    def update_state_after_alloc(self, request: EngineRequest, index: int) -> None:
        assert self._fetching is not None
        self._fetching.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> StepItems:
        assert self._fetching is not None
        return StepItems(self._spec, self._fetching.step(scheduler_output.free_encoder_mm_hashes))

    def request_finished(self, request: EngineRequest) -> tuple[bool, dict[str, object] | None]:
        assert self._fetching is not None
        self._fetching.finished(request.request_id)
        return False, None

    # ------------------------------------------------------------ worker

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: object) -> None:
        device = _device()
        for identifier, embeddings in self._items().loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = embeddings.to(device)

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: object) -> None:
        spec = self._items().spec
        is_first = self._ranks == 1 or worker_rank() == 0  # all ranks have the same embeddings
        if self._keeping is not None and self.is_producer and spec is not None and is_first:
            self._keeping.keep(spec, mm_hash, encoder_cache[mm_hash])

    def _items(self) -> StepItems:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepItems)
        return metadata

    def shutdown(self) -> None:
        for side in (self._fetching, self._keeping):
            if side is not None:
                side.close()


def _check_model(vllm_config: EngineConfig) -> None:
    check_items(vllm_config)
    if vllm_config.model_config.is_encoder_decoder:
        raise InvalidRequest(
            "this model has encoder and decoder in one, whose encoder vLLM does not share: leave out "
            "--ec-transfer-config"
        )
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        raise InvalidRequest(
            "adapters of the encoder are known by their names only, which may come to mean others: "
            "leave out --enable-tower-connector-lora, or --ec-transfer-config"
        )


def _spec_of(vllm_config: EngineConfig, settings: EncoderSettings) -> ModelSpec:
    """Return the spec that names the embeddings' model. It has no layers: only its identity is used."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return ModelSpec(
        model_id=Path(str(model.model)).name or "model", weights_digest=engine_identity(vllm_config, settings),
        layers=(), hidden_size=int(model.get_hidden_size()), vocab_size=int(model.get_vocab_size()), cache_dtype=dtype,
        hidden_dtype=dtype,
    )  # fmt: skip


def _device() -> str:
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return f"{kind}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else kind
