"""The ModelSpec of a vLLM engine, from its configuration and the files of its weights."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec, RopeSpec
from kvstore.spec.configuration import named
from kvstore.spec.from_transformers import rope_of
from kvstore_client.engines.vllm.drafts import draft_of
from kvstore_client.engines.vllm.geometry import Geometry
from kvstore_client.engines.vllm.groups import chunk_tokens_of
from kvstore_client.engines.vllm.objects import EngineConfig, LoadConfig, LoraRequest, ModelConfig
from kvstore_client.engines.vllm.settings import Common, ConnectorSettings

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
FROM_FILES = (
    "auto", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "safetensors", "sharded_state",
)  # fmt: skip
"""vLLM's load formats that read the model's own files. Others take weights from a process, or from where their own
settings say."""
OF_ITEMS = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""vLLM's settings that decide how an image or a sound is encoded."""
OF_ADAPTERS = (
    "lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""vLLM's settings that decide what an adapter's files change."""
IGNORED = ("_name_or_path", "transformers_version")
"""Fields of the configuration that do not change the cache: a name (the weights are digested), and the file's
writer."""
CONFIGURATIONS = ("config.json", "hf_quant_config.json", "params.json")
"""Files of a model's configuration, as vLLM reads them."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Files: TypeAlias = tuple[str, bool, tuple[tuple[str, int, int, int], ...]]
"""An adapter's path, True if its request says that its experts are fused, and the states of its files."""
ADAPTERS_KEPT = 1024
"""Adapters whose files need not be read again, those of the last requests: callers bring new ones for ever."""


def spec_of(
    vllm_config: EngineConfig, geometry: Geometry, settings: ConnectorSettings, weights_digest: str | None = None
) -> ModelSpec:
    """Return the engine's spec. ``weights_digest`` None: digest the files. Raises InvalidRequest."""
    model = vllm_config.model_config
    chunk_tokens = chunk_tokens_of(geometry.groups, geometry.block_tokens, settings)
    first = geometry.layers[0]
    rope = rope_of(model.hf_text_config, first.v_dim if geometry.mla else first.k_dim)
    sections = _rope_parameters(model.hf_text_config).get("mrope_section") or ()
    return ModelSpec(
        model_id=Path(str(model.model)).name or "model",
        weights_digest=weights_digest or _with_draft(engine_identity(vllm_config, settings), vllm_config, settings),
        layers=geometry.layers,
        hidden_size=int(model.get_hidden_size()),
        vocab_size=int(model.get_vocab_size()),
        cache_dtype=geometry.cache_dtype,
        hidden_dtype=str(model.dtype).removeprefix("torch."),
        rope=RopeSpec(
            theta=rope.theta, kind=rope.kind, rotary_dim=rope.rotary_dim, factors=rope.factors,
            mrope=tuple(int(each) for each in sections),
        ),
        chunk_tokens=chunk_tokens,
        mla=geometry.mla,
    )  # fmt: skip


def _rope_parameters(hf: object) -> dict[str, Any]:
    found = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    return dict(found)


def engine_identity(vllm_config: EngineConfig, settings: Common) -> str:
    """Return a digest of the weights, their configuration, and the processing of images and sounds before the model.
    ``weights_digest`` in the settings vouches for the weights alone."""
    if settings.weights_digest:
        weights = named(
            settings.weights_digest, _described(vllm_config.model_config, _load_format(vllm_config.load_config))
        )
    else:
        weights = _digest_of_files(vllm_config)
    processor = _processor_digest(vllm_config.model_config)
    return _named_with("items", weights, processor) if processor else weights


def _named_with(what: str, weights: str, more: str) -> str:
    """Return an identity that has another digest, too."""
    if weights.startswith("unverified:"):
        return f"{weights}/{more}"
    return str(blake3(f"kvstore/vllm/{what}/1\0{weights}\0{more}".encode()).hexdigest())


def _with_draft(weights: str, vllm_config: EngineConfig, settings: Common) -> str:
    """Return an identity that has the draft's, too, where its layers are kept. ``weights_digest`` in the settings
    vouches for its weights. Its configuration is that of the file: ``--hf-overrides`` are the target's alone, and
    drafts change what vLLM read when they are loaded, in a process that may be this one or another."""
    draft = getattr(vllm_config, "speculative_config", None)
    if draft is None or draft_of(vllm_config) is None:
        return weights
    model, target = draft.draft_model_config, vllm_config.model_config
    load_config = getattr(draft, "draft_load_config", None) or vllm_config.load_config
    load_format = _load_format(load_config)
    lengths = _length_that_matters(model) and (model.max_model_len, target.max_model_len)  # vLLM scales by either
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(f"{draft.method}\0{model.dtype}\0{model.quantization}\0{load_format}\0{lengths}\0".encode())
    path = _directory(model)
    _add_files(hasher, [path / name for name in CONFIGURATIONS if (path / name).is_file()])
    files = [] if settings.weights_digest else _weights_of(model, load_config)
    if (str(model.model), model.revision) != (str(target.model), target.revision):  # else they are in it
        _add_files(hasher, files)
    return _named_with("draft", weights, str(hasher.hexdigest(16)))


def _processor_digest(model: ModelConfig) -> str:
    """Digest the settings and files that turn images and sounds into the encoder's input: vLLM's identifiers cover only
    the settings of a request. Empty for a model of text."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return ""
    hasher = blake3(b"kvstore/vllm/processor/1\0")
    told = {name: getattr(settings, name, None) for name in OF_ITEMS}
    hasher.update(json.dumps(told, sort_keys=True, default=str).encode() + b"\0")
    try:
        path = _directory(model)
    except InvalidRequest:  # not on this machine: weights_digest vouches for it
        return str(hasher.hexdigest(16))
    _add_files(hasher, sorted((path.parent if path.is_file() else path).glob("*processor_config.json")))
    return str(hasher.hexdigest(16))


def _digest_of_files(vllm_config: EngineConfig) -> str:
    """Digest the weights' files and vLLM's settings for them (BLAKE3). Cost: reads them once, 5 GB/s from memory."""
    model, load_config = vllm_config.model_config, vllm_config.load_config
    files = _weights_of(model, load_config)
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(b"kvstore/vllm/1\0")
    hasher.update(_described(model, _load_format(load_config)).encode() + b"\0")
    _add_files(hasher, files)
    return hasher.hexdigest()


def _weights_of(model: ModelConfig, load_config: LoadConfig) -> list[Path]:
    """Return the files that vLLM reads a model's weights from. Raises InvalidRequest."""
    load_format = _load_format(load_config)
    if load_format == "dummy":
        raise InvalidRequest(
            "load_format dummy makes up weights that no file names: set weights_digest (for example "
            "'unverified:dummy-<seed>') in kv_connector_extra_config"
        )
    elsewhere = getattr(model, "model_weights", "")
    if load_format not in FROM_FILES or elsewhere:
        raise InvalidRequest(
            f"load_format {load_format} takes the weights from {elsewhere or 'elsewhere'}, not from the files of "
            f"{str(model.model)!r}, so they have no digest: set weights_digest in kv_connector_extra_config"
        )
    return files_of(_directory(model, getattr(load_config, "download_dir", None)))


def _load_format(load_config: LoadConfig) -> str:
    found = load_config.load_format
    return str(getattr(found, "value", found))


def _described(model: ModelConfig, load_format: str) -> str:
    """Return the facts beside the files that decide the numbers: the configuration as read and overridden, as JSON."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in IGNORED}
    facts = {
        "config": config, "dtype": str(model.dtype), "quantization": str(model.quantization),
        "load_format": load_format, "max_model_len": _length_that_matters(model),
    }  # fmt: skip
    online = getattr(model, "quantization_config", None)  # of --quantization-config; the files' own is in the config
    if online is not None:
        facts["quantization_config"] = repr(online)
    if classes := getattr(model, "model_class_overrides", None):  # code that computes otherwise with the same weights
        facts["model_class_overrides"] = classes
    return json.dumps(facts, sort_keys=True, default=str)


def _length_that_matters(model: ModelConfig) -> int:
    """Return the longest context where the rope scaling depends on it, else 0."""
    kind = _rope_parameters(model.hf_text_config).get("rope_type", "default")
    return int(model.max_model_len) if kind in ("longrope", "dynamic", "su") else 0


def _directory(model: ModelConfig, download_dir: str | None = None) -> Path:
    """Return where a model's files are. ``download_dir``: the directory that vLLM has its weights in, if they come from
    the hub; its configuration is in the hub's own cache. Raises InvalidRequest."""
    path = Path(str(model.model))
    if path.exists():
        return path
    name = str(model.model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=model.revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:  # the hub's errors have no common base
        raise InvalidRequest(
            f"the files of {name!r} are not on this machine, so its weights have no digest: set "
            "weights_digest in kv_connector_extra_config"
        ) from error


def files_of(path: Path) -> list[Path]:
    """Return the files that hold weights, in order of name. Raises InvalidRequest when there are none."""
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in WEIGHTS)
    if not found:
        raise InvalidRequest(
            f"{path} has no file of weights ({', '.join(WEIGHTS)}): set weights_digest in kv_connector_extra_config"
        )
    return found


def _add_files(hasher: blake3, files: Iterable[Path]) -> None:
    for each in files:
        hasher.update(f"{each.name}\0{each.stat().st_size}\0".encode())
        hasher.update_mmap(str(each))


def adapter_settings(vllm_config: EngineConfig) -> str:
    """Return the engine's settings that decide what an adapter's files change, as JSON; empty where all have their
    default."""
    lora = getattr(vllm_config, "lora_config", None)
    told = {name: value for name in OF_ADAPTERS if (value := getattr(lora, name, None))}
    if told.get("lora_dtype") == vllm_config.model_config.dtype:
        del told["lora_dtype"]
    if "target_modules" in told:
        told["target_modules"] = sorted(told["target_modules"])
    return json.dumps(told, sort_keys=True, default=str) if told else ""


class Adapters:
    """The specs of a model's LoRA adapters: the same weights, another cache. Each adapter's files are read once, and
    again when ``ADAPTERS_KEPT`` others were in use since. ``settings``: as ``adapter_settings``.

    vLLM reads an adapter's files once, too, and then knows the adapter by its number: files that change under a number
    may or may not be what it computes with, so such an adapter has no name until it is loaded in place."""

    def __init__(self, spec: ModelSpec, settings: str = "") -> None:
        self._spec = spec
        self._settings = settings
        self._known: OrderedDict[_Files, ModelSpec] = OrderedDict()
        self._loaded: OrderedDict[int, _Files] = OrderedDict()
        self._in_cache: OrderedDict[tuple[str, str], _Files | None] = OrderedDict()
        """The files of which vLLM's prefix cache has blocks, by the adapter's name and path; None: of several."""

    def spec_for(self, lora_request: LoraRequest | None) -> ModelSpec:
        """Return the spec of a request's adapter. Raises InvalidRequest when the adapter's files cannot be read, or
        have changed since vLLM read them."""
        if lora_request is None:
            return self._spec
        path = str(lora_request.lora_path)
        if not Path(path).exists():
            raise InvalidRequest(
                f"adapter {lora_request.lora_name[:200]!r} is not at {path[:200]!r} on this machine: give vLLM the "
                "adapter's directory, no name of the hub"
            )
        settings = Path(path) / "adapter_config.json"
        files = [*files_of(Path(path)), *([settings] if settings.is_file() else [])]
        is_fused = bool(getattr(lora_request, "is_3d_lora_weight", False))
        key = (path, is_fused, tuple(_stamp(each) for each in files))
        self._check_loaded(lora_request, key)
        called = _called(lora_request)
        _keep(self._in_cache, called, key if self._in_cache.get(called, key) == key else None)
        if key not in self._known:
            hasher = blake3(b"kvstore/vllm/lora/1\0")
            if self._settings or is_fused:
                hasher.update(f"{self._settings} {is_fused}\0".encode())
            _add_files(hasher, files)
            name = f"{lora_request.lora_name[:200]}:{hasher.hexdigest()}"
            _keep(self._known, key, replace(self._spec, adapter_id=name))
        self._known.move_to_end(key)
        return self._known[key]

    def _check_loaded(self, lora_request: LoraRequest, key: _Files) -> None:
        number = int(lora_request.lora_int_id)
        if self._loaded.get(number, key) != key and not getattr(lora_request, "load_inplace", False):
            raise InvalidRequest(
                f"the files of adapter {lora_request.lora_name[:200]!r} have changed; vLLM may compute with the old "
                "ones: load it anew, best from another path"
            )
        _keep(self._loaded, number, key)

    def are_mixed(self, lora_request: LoraRequest) -> bool:
        """Return True when vLLM's own prefix cache may hold blocks that other files of this adapter computed: it knows
        an adapter by name and path, and drops nothing when the files are loaded anew."""
        return self._in_cache.get(_called(lora_request), ()) is None

    def cache_cleared(self) -> None:
        """Note that vLLM has dropped its prefix cache."""
        self._in_cache.clear()


def _keep(known: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to what is known of the last ``ADAPTERS_KEPT`` adapters."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > ADAPTERS_KEPT:
        known.popitem(last=False)


def _called(lora_request: LoraRequest) -> tuple[str, str]:
    return str(lora_request.lora_name), str(lora_request.lora_path)


def _stamp(path: Path) -> tuple[str, int, int, int]:
    """Return a file's state, which changes with every write: the kernel sets its change time, and nobody can set it
    back."""
    found = path.stat()
    return str(path), found.st_ctime_ns, found.st_ino, found.st_size


def worker_rank() -> int:
    """Return this worker's rank among those that share a model's tensors."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
