"""The connector that vLLM loads: a KVConnectorBase_V1 that hands each call to the scheduler's or the workers' side."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)  # fmt: skip
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from kvstore.errors import InvalidRequest
from kvstore_client.arrays import Tensor
from kvstore_client.begin import connect
from kvstore_client.client import Client
from kvstore_client.engines.vllm.documents import check_documents
from kvstore_client.engines.vllm.geometry import FP8, geometry_of
from kvstore_client.engines.vllm.groups import check_groups
from kvstore_client.engines.vllm.identity import Adapters, adapter_settings, spec_of, worker_rank
from kvstore_client.engines.vllm.mending import Mender
from kvstore_client.engines.vllm.metrics import MovedMetrics, MovedStats
from kvstore_client.engines.vllm.naming import check_algorithm, check_items
from kvstore_client.engines.vllm.objects import CacheConfig, EngineRequest, RequestBlocks, ScheduledStep, WorkersReport
from kvstore_client.engines.vllm.pages import CPU, PagesOfModel, Writer
from kvstore_client.engines.vllm.runner import VllmRunner, model_of
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.step import Mended, Step
from kvstore_client.engines.vllm.versions import OF_GROUPS, check_interface, check_version
from kvstore_client.engines.vllm.worker import WorkerSide


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The metadata that vLLM carries from the scheduler to the workers."""

    step: Step = field(default_factory=Step)


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """The number of the step whose results a worker reports: a step that computes nothing may have some, too. And the
    prompts that it computed over documents."""

    number: int
    mended: list[Mended] = field(default_factory=list)

    def aggregate(self, other: StepReport) -> StepReport:
        """Return one report of all ranks: each is of the same step."""
        return self


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Loads prompts from a kvstore sidecar and keeps them there. Raises InvalidRequest for settings that it cannot
    serve."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _register(cls)

    def __init__(self, vllm_config: Any, role: object, kv_cache_config: CacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        check_version(vllm_version, self._settings.allow_unknown_version)
        check_interface(KVConnectorBase_V1, type(self), vllm_version)
        check_interface(SupportsHMA, type(self), vllm_version, OF_GROUPS)
        _check_policy(transfer)
        is_within_steps = self._settings.load == "layerwise" or self._settings.mends is not None
        if is_within_steps and getattr(vllm_config.scheduler_config, "async_scheduling", False):
            raise InvalidRequest(
                "vLLM schedules a step ahead of the one that runs, and would answer with what that step computes over "
                'a load within the step that fails: set --no-async-scheduling, or "load": "async" and no "recompute" '
                "in the extra settings"
            )
        check_items(vllm_config)
        self._geometry = geometry_of(vllm_config, kv_cache_config)
        algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        check_algorithm(self._settings.digests, algorithm, self._geometry.draft)
        if not self._geometry.is_one_table:
            check_groups(self._geometry.groups, self._settings, has_draft=self._geometry.draft is not None)
        if self._geometry.draft is not None and (self._settings.load == "layerwise" or self._settings.save_output):
            raise InvalidRequest(
                "a draft computes behind the step, so with --speculative-config prompts alone are kept, and loaded "
                'between steps: set "load": "async", and no "save_output", in the extra settings'
            )
        is_alone = _around(transfer).kv_connector == transfer.kv_connector
        if (setting := self._settings.mends) is not None:
            check_documents(vllm_config, self._geometry, setting, is_alone=is_alone)
        fp8 = str(current_platform.fp8_dtype()).removeprefix("torch.")
        if self._geometry.cache_dtype in FP8.values() and self._geometry.cache_dtype != fp8:
            raise InvalidRequest(f"this device's fp8 is {fp8}, which kvstore does not keep: set --kv-cache-dtype auto")
        self._layer_of = {name: index for index, name in enumerate(self._geometry.layer_names)}
        self._config = vllm_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            spec = spec_of(vllm_config, self._geometry, self._settings)
            adapters = Adapters(spec, adapter_settings(vllm_config))
            self._scheduler = SchedulerSide(
                self._connect(self._settings.planning), adapters, self._settings, self._geometry.block_tokens,
                groups=self._geometry.groups, loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer,
                ranks=self._geometry.ranks, step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
                draft=self._geometry.draft, is_alone=is_alone,
            )  # fmt: skip

    def _connect(self, planning: str = "off") -> Client:
        """Connect to the sidecar. What is loaded is planned by the scheduler's side alone."""
        settings = self._settings
        return connect(settings.address, required=False, timeout_s=settings.timeout_s, planning=planning)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a prompt that was not kept costs only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        return extra_config.get("load") == "layerwise"

    # ------------------------------------------------------------ scheduler

    def on_new_request(self, request: EngineRequest) -> None:
        assert self._scheduler is not None
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: EngineRequest, blocks: RequestBlocks, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> StepMetadata:
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: WorkersReport) -> None:
        assert self._scheduler is not None
        wrong = self._scheduler.received(connector_output)
        manager = getattr(self, "_kv_cache_manager", None)
        if wrong and manager is not None:
            manager.evict_blocks(wrong)

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request.request_id)

    def request_finished(self, request: EngineRequest, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        """As above: a MultiConnector calls this one where another of its connectors needs one table."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Handle ``reset_prefix_cache(reset_connector=True)``, and a pause of vLLM that clears its caches."""
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        missing = sorted(set(self._layer_of) - set(kv_caches))
        if missing:
            raise InvalidRequest(
                f"vLLM {vllm_version} registered no pages for {missing[0]} and {len(missing) - 1} more"
            )
        names = self._geometry.layer_names
        # The weights' identity comes with each request; here only the geometry is compared.
        spec = spec_of(self._config, self._geometry, self._settings, "unverified:geometry")
        backends = {self._backend_of(name) for name in names}
        if len(backends) != 1:
            raise InvalidRequest(
                f"the layers use {', '.join(sorted(backends))}: set --attention-backend to one of them, and for a "
                "draft attention_backend in --speculative-config"
            )
        backend = backends.pop()
        writer = _cpu_writer(self._config) if backend == CPU else None
        tensors = [kv_caches[name] for name in names]
        ranks = self._geometry.ranks
        pages = PagesOfModel(
            spec, tensors, self._geometry.block_tokens, backend, writer, groups=self._geometry.groups,
            rank=worker_rank() if ranks > 1 else 0, ranks=ranks, replicas=self._geometry.replicas,
        )  # fmt: skip
        client, setting, mender = self._connect(), self._settings.mends, None
        if setting is not None:
            model = model_of(self._config.compilation_config.static_forward_context[names[0]])
            mender = Mender(client, pages, VllmRunner(model, spec, tensors[0].device), setting)
        self._worker = WorkerSide(
            client, pages, is_layerwise=self._settings.load == "layerwise",
            is_one_table=self._geometry.is_one_table,
            is_waiting=bool(self._config.model_config.enable_sleep_mode), call_s_max=self._settings.timeout_s,
            mender=mender,
        )  # fmt: skip

    def _backend_of(self, layer_name: str) -> str:
        layer = self._config.compilation_config.static_forward_context[layer_name]
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else layer.attn_backend
        return str(backend.get_name())

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """End saves that still read blocks which the coming step may write: vLLM calls this before it."""
        if self._worker is not None:
            self._worker.give_way(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        if self._worker is not None:
            self._worker.begin(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None and layer_name in self._layer_of:
            self._worker.wait_layer(self._layer_of[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Do nothing: layers are kept once the step has ended."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_layerwise()
            self._worker.save(self._step().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        # With speculative decoding ``wait_for_save`` comes after this, too late to tell of this step's failures.
        self._worker.end_layerwise()
        return None, self._worker.landed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the loads that have ended, and which of them failed, where blocks do not tell."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.failed_requests()
        return results

    def get_kv_connector_stats(self) -> MovedStats | None:
        """Return what this worker moved since the last step; None where nothing did, as in most steps."""
        told = self._worker.moved.take() if self._worker is not None else {}
        return MovedStats(told) if told else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MovedStats:
        return MovedStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> MovedMetrics:  # fmt: skip
        return MovedMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_worker_meta(self) -> StepReport | None:
        number = self._step().number if self._worker is not None else 0
        return StepReport(number, self._worker.mended()) if number and self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks() if self._worker is not None else set()

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _register(connector: type[KVStoreConnector]) -> None:
    """Tell vLLM a connector's name, which its module path does not: a MultiConnector has of those whose statistics it
    passes on the names alone, and ends the engine at one that is not registered."""
    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


_register(KVStoreConnector)


def _check_policy(transfer: Any) -> None:
    """Raise InvalidRequest where vLLM would fail a request whose load failed. ``transfer``: this connector's settings;
    vLLM goes by those of a MultiConnector around it, which its workers see."""
    for each, place in ((transfer, ""), (_around(transfer), ", in the settings of the connector around this one, too")):
        if each.kv_load_failure_policy != "recompute":
            raise InvalidRequest(
                f"kv_load_failure_policy is {each.kv_load_failure_policy!r}: a sidecar that goes away would fail "
                f'requests; set "kv_load_failure_policy": "recompute" in --kv-transfer-config{place}'
            )


def _around(transfer: Any) -> Any:
    """Return the settings of the connector around this one, as workers see them; its own where it stands alone."""
    return getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None) or transfer


def _cpu_writer(config: Any) -> Writer:
    """Return a function that writes pages by vLLM's own kernel, as its CPU backend calls it."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = config.cache_config.cache_dtype

    def write(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        k, v = k.to(config.model_config.dtype), v.to(config.model_config.dtype)
        isa = _get_attn_isa(config.model_config.dtype, key_cache.shape[2], k.shape[-1], cache_dtype)
        _custom_ops.cpu_attn_reshape_and_cache(
            k, v, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype
        )

    return write
