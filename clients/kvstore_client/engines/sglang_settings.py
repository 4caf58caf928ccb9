"""The fields of ``--hicache-storage-backend-extra-config``: the backend's own, and those that SGLang reads itself; and
SGLang's own settings that say whose pages an engine has."""

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

OF_WEIGHTS = (
    "model_path", "revision", "load_format", "model_loader_extra_config", "modelopt_checkpoint_restore_path",
    "kt_weight_path", "remote_instance_weight_loader_seed_instance_ip",
    "remote_instance_weight_loader_seed_instance_service_port", "modelexpress_config", "weight_cache_mode",
    "weight_cache_socket",
)  # fmt: skip
"""SGLang's settings that name the weights, for engines without a ``weights_digest``."""
OF_ENGINE = (
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args", "modelopt_quant",
    "rl_quant_profile", "mamba_ssm_dtype", "qsa_indexer_dtype", "flashinfer_mxfp4_moe_precision",
    "enable_w4a4_mxfp4_megamoe", "enable_quant_communications", "decrypted_config_file", "kt_method",
    "kt_num_gpu_experts", "kt_max_deferred_experts_per_token", "model_impl", "model_config_parser", "forward_hooks",
    "rl_on_policy_target", "enable_deterministic_inference", "enable_tf32_matmul", "prefill_kv_cache_dequant_dtype",
    "deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay", "enable_deepseek_v4_fp4_indexer", "enable_precise_embedding_interpolation",
    "enable_mamba_cache_stochastic_rounding",
)  # fmt: skip
"""SGLang's settings that decide what the weights compute, or how a pool keeps it. Its choice of kernels is not here:
the rounding of all is taken for the same model's, unless a setting promises one."""
OF_DRAFTS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_window_size",
    "speculative_draft_sink_size", "decrypted_draft_config_file", "uno_lora_path", "speculative_draft_load_format",
    "speculative_enable_w4a4_mxfp4_megamoe",
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
