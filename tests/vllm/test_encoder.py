"""The encoder-cache connector, and the KV connector with images: in a real vLLM that sees, and on its classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client.engines.vllm.encoder import KVStoreECConnector
from kvstore_ops.sidecar import Sidecar
from vllm.config import ECTransferConfig, ModelConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvstore.errors import InvalidRequest
from tests.vllm.engine import Engine
from tests.vllm.test_end_to_end import CHUNK, leases_of, prompt, wait_durable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
CONFIG = {"ec_connector": "KVStoreECConnector", "ec_connector_module_path": "kvstore_client.engines.vllm.encoder"}
OPTIONS = {"skip_tokenizer_init": False, "max_model_len": 512, "enable_prefix_caching": False}
FIRST, SECOND = prompt(100, 50), prompt(100, 51)


def encoding(address: str) -> dict[str, Any]:
    return {
        "ec_connector": "TellingECConnector", "ec_connector_module_path": "tests.vllm.breaking", "ec_role": "ec_both",
        "ec_connector_extra_config": {"address": address},
    }  # fmt: skip


def test_what_one_engine_encoded_another_loads(seeing: Path, durable: Sidecar) -> None:
    with Engine(seeing, None, **OPTIONS) as plain:
        said = plain.ask(FIRST, FIRST, SECOND, SECOND, images=[0, 1, 0, 1])[0]
    assert said[0] != said[1]
    assert said[2] != said[3]
    both = {**OPTIONS, "extra": CHUNK, "ec_transfer_config": encoding(durable.address)}
    with Engine(seeing, durable.address, **both) as first:
        assert first.ask(FIRST, images=[0]) == (said[:1], [0])
        assert first.ask(FIRST, images=[1]) == (said[1:2], [0])  # the same words under another image
        assert first.log().count("an item was encoded") == 2
        wait_durable(durable, 2 * 2 + 2)
    durable.stop(kill=True)
    durable.start()
    with Engine(seeing, durable.address, **both) as second:
        assert second.ask(FIRST, images=[1]) == (said[1:2], [96])  # three blocks of 108 tokens, image and all
        assert "an item was" not in second.log()
        assert second.ask(SECOND, SECOND, images=[0, 1]) == (said[2:], [0, 0])  # other words: only the images are known
        assert second.log().count("an item was loaded") == 2
        assert "an item was encoded" not in second.log()
        durable.stop(kill=True)
        outputs, cached = second.ask(SECOND, images=[2])
        assert cached == [0]
        assert outputs[0] not in said
        assert second.log().count("an item was encoded") == 1
        durable.start()
    assert leases_of(durable) == (0, 0)


def test_images_that_vllm_numbers_are_refused(seeing: Path, durable: Sidecar) -> None:
    """In each process the first image would be the same one."""
    numbered = {**OPTIONS, "mm_processor_cache_gb": 0}
    with pytest.raises(RuntimeError, match="--mm-processor-cache-gb above 0"):
        Engine(seeing, durable.address, **numbered).__enter__()
    with pytest.raises(RuntimeError, match="--mm-processor-cache-gb above 0"):
        Engine(seeing, None, **numbered, ec_transfer_config=encoding(durable.address)).__enter__()


# ---------------------------------------------------------------- on vLLM's classes


@pytest.fixture(scope="module")
def configured(seeing: Path) -> Any:
    model = ModelConfig(str(seeing), dtype="float32", max_model_len=512)
    parts = {
        "load_config": SimpleNamespace(load_format="auto"),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
    }
    return SimpleNamespace(model_config=model, lora_config=None, **parts)


def connector(configured: Any, role: ECConnectorRole, address: str, **extra: Any) -> KVStoreECConnector:
    """As vLLM makes it."""
    settings = {"address": address, **extra}
    transfer = ECTransferConfig(**CONFIG, ec_role="ec_both", ec_connector_extra_config=settings)
    return ECConnectorFactory.create_connector(
        SimpleNamespace(**{**vars(configured), "ec_transfer_config": transfer}), role
    )


def asked(name: str, *items: tuple[str, int, int]) -> Any:
    """A request with items (identifier, first token, token count)."""
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=at, length=count)
        )
        for identifier, at, count in items
    ]
    return SimpleNamespace(request_id=name, mm_features=features)


def step(scheduler: KVStoreECConnector, *freed: str) -> Any:
    return scheduler.build_connector_meta(SimpleNamespace(free_encoder_mm_hashes=list(freed)))


def settle(scheduler: KVStoreECConnector, request: Any, computed: int = 0) -> None:
    """Ask at each step, as vLLM does."""
    while not scheduler.ensure_cache_available(request, computed):
        step(scheduler)


def test_items_go_and_come_back(configured: Any, own_sidecar: Sidecar) -> None:
    scheduler = connector(configured, ECConnectorRole.SCHEDULER, own_sidecar.address)
    worker = connector(configured, ECConnectorRole.WORKER, own_sidecar.address)
    request = asked("a", ("cat", 0, 8), ("dog", 20, 8))
    settle(scheduler, request)
    assert not scheduler.has_cache_item("cat")
    scheduler.update_state_after_alloc(request, 0)
    worker.bind_connector_metadata(step(scheduler))
    cat = torch.randn(8, 128)
    worker.save_caches({"cat": cat}, "cat")
    worker._keeping._client._context.committer.submit(lambda: None).result()  # the store is over
    scheduler.request_finished(request)

    other = connector(configured, ECConnectorRole.SCHEDULER, own_sidecar.address)
    request = asked("b", ("cat", 0, 8), ("dog", 20, 8))
    settle(other, request)
    assert (other.has_cache_item("cat"), other.has_cache_item("dog")) == (True, False)
    own_sidecar.stop(kill=True)  # what was promised is in hand
    other.update_state_after_alloc(request, 0)
    metadata = step(other)
    worker.bind_connector_metadata(metadata)
    cache: dict[str, Any] = {}
    worker.start_load_caches(cache)
    assert torch.equal(cache.pop("cat"), cat)
    assert not cache
    assert not other.has_cache_item("cat")  # vLLM has it now
    settle(other, request)
    for each in (scheduler, worker, other):
        each.shutdown()


def test_an_item_of_another_size_is_encoded(configured: Any, durable: Sidecar) -> None:
    """Clients may call their items as they like, and call two by one name."""
    worker = connector(configured, ECConnectorRole.WORKER, durable.address)
    scheduler = connector(configured, ECConnectorRole.SCHEDULER, durable.address)
    worker.bind_connector_metadata(step(scheduler))
    worker.save_caches({"mine": torch.randn(8, 128)}, "mine")
    worker._keeping._client._context.committer.submit(lambda: None).result()
    right, wrong = asked("a", ("mine", 0, 8)), asked("b", ("mine", 0, 9))
    settle(scheduler, right)
    assert scheduler.has_cache_item("mine")
    settle(scheduler, wrong)
    assert not scheduler.has_cache_item("mine")
    settle(scheduler, right)
    assert not scheduler.has_cache_item("mine")
    for each in (scheduler, worker):
        each.shutdown()


def test_what_is_refused(configured: Any) -> None:
    nowhere = "unix:///nonexistent/kvstore.sock"
    both = SimpleNamespace(**{**vars(configured), "model_config": SimpleNamespace(is_encoder_decoder=True)})
    with pytest.raises(InvalidRequest, match="leave out --ec-transfer-config"):
        connector(both, ECConnectorRole.WORKER, nowhere)
    tower = SimpleNamespace(**{**vars(configured), "lora_config": SimpleNamespace(enable_tower_connector_lora=True)})
    with pytest.raises(InvalidRequest, match="--enable-tower-connector-lora"):
        connector(tower, ECConnectorRole.WORKER, nowhere)
    with pytest.raises(InvalidRequest, match="ec_connector_extra_config: chunk_tokens is not a setting"):
        connector(configured, ECConnectorRole.WORKER, nowhere, chunk_tokens=4)


def test_without_a_sidecar_everything_is_encoded(configured: Any) -> None:
    scheduler = connector(configured, ECConnectorRole.SCHEDULER, "unix:///nonexistent/kvstore.sock")
    request = asked("a", ("cat", 0, 8))
    settle(scheduler, request)
    assert not scheduler.has_cache_item("cat")
    worker = connector(configured, ECConnectorRole.WORKER, "unix:///nonexistent/kvstore.sock")
    worker.bind_connector_metadata(step(scheduler))
    worker.save_caches({"cat": torch.randn(8, 128)}, "cat")
    for each in (scheduler, worker):
        each.shutdown()
