"""Layers with block tables of their own, against vLLM's own classes."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm import KVStoreConnector
from kvstore_client.engines.vllm.geometry import KNOWN, geometry_of
from kvstore_client.engines.vllm.identity import spec_of
from kvstore_client.engines.vllm.settings import ConnectorSettings
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

from kvstore.errors import InvalidRequest
from tests.vllm.engine import CONNECTOR
from tests.vllm.test_interface import FULL, NAMES, NOWHERE, SLIDING, caches, changed, configured

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["configured"]


def test_each_of_vllms_kinds_of_caches_is_kept_or_refused(configured: VllmConfig) -> None:
    """By its name: what a kind that is new here means is not known."""
    kinds, left = set(), [KVCacheSpec]
    while left:
        for each in left.pop().__subclasses__():
            kinds.add(each.__name__)
            left.append(each)
    assert {*KNOWN} <= kinds
    for kind in sorted(kinds - {*KNOWN, "UniformTypeKVCacheSpecs"}):
        with pytest.raises(InvalidRequest, match=f"keeps a {kind}; kvstore keeps FullAttentionSpec"):
            geometry_of(configured, caches(FULL, type(kind, (), vars(FULL))()))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_are_vllms_own(configured: VllmConfig, layout: Any) -> None:
    """As vLLM makes them of a model's layers, with its hybrid allocator and without, whose layers have one name."""
    layers = {name: FULL if number % 6 == 5 else SLIDING for number, name in enumerate(NAMES)}
    found = {}
    for is_one in (True, False):
        made = copy.copy(configured)
        made.scheduler_config = copy.copy(configured.scheduler_config)
        made.scheduler_config.disable_hybrid_kv_cache_manager = is_one
        made.cache_config = copy.copy(configured.cache_config)
        made.cache_config.kv_cache_layout = layout
        groups = get_kv_cache_groups(made, dict(layers))
        found[is_one] = geometry_of(made, KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups))
        assert found[is_one].is_one_table == is_one
    assert [(each.window, len(each.layers)) for each in found[True].groups] == [(0, 12)]
    assert sorted((each.window, len(each.layers)) for each in found[False].groups) == [(0, 2), *[(64, 2)] * 5]
    assert sorted(layer for each in found[False].groups for layer in each.layers) == list(range(12))
    settings = ConnectorSettings(chunk_tokens=64)
    assert spec_of(configured, found[True], settings) == spec_of(configured, found[False], settings)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("heads", [1, 2])
def test_layers_of_several_shapes_have_one_name(configured: VllmConfig, layout: Any, heads: int) -> None:
    """Full layers with wider heads (Gemma 4), or with other numbers of them, too (MiMo-V2): of these vLLM tells each
    one's own window, with one table and with several, whose blocks may differ in size."""
    wide = replace(FULL, num_kv_heads=heads, head_size=64, head_size_v=64)
    found = []
    for is_one in (True, False):
        made = copy.copy(configured)
        made.scheduler_config = copy.copy(configured.scheduler_config)
        made.scheduler_config.disable_hybrid_kv_cache_manager = is_one
        made.cache_config = copy.copy(configured.cache_config)
        made.cache_config.kv_cache_layout = layout
        groups = get_kv_cache_groups(made, {name: (wide, SLIDING)[n % 2] for n, name in enumerate(NAMES)})
        geometry = geometry_of(made, KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups))
        assert geometry.is_one_table == is_one
        found.append(spec_of(configured, geometry, ConnectorSettings(chunk_tokens=64)))
    assert found[0] == found[1]
    assert [each.window for each in found[0].layers[:2]] == [0, 64]


@pytest.mark.parametrize("method", ["request_finished", "request_finished_all_groups"])
def test_a_request_that_has_ended_is_forgotten(configured: VllmConfig, method: str) -> None:
    """vLLM calls the one, and a MultiConnector the other where not all of its connectors know several tables."""
    made = KVConnectorFactory.create_connector(configured, KVConnectorRole.SCHEDULER, caches(FULL))
    asked = Request("a", list(range(100)), SamplingParams(max_tokens=1), None)
    made.on_new_request(asked)
    assert "a" in made._scheduler._tracked
    assert getattr(made, method)(asked, [1, 2] if method == "request_finished" else ([1, 2],)) == (False, None)
    assert not made._scheduler._tracked
    made.shutdown()


@pytest.mark.parametrize("name", ["KVStoreConnector", "BreakingConnector"])
def test_a_multiconnector_reads_what_workers_moved(configured: VllmConfig, name: str) -> None:
    """It has the names of its connectors alone, and ends the engine at one that it does not know."""
    module = "kvstore_client.engines.vllm" if name == "KVStoreConnector" else "tests.vllm.breaking"
    one = {**CONNECTOR, "kv_connector": name, "kv_connector_module_path": module}
    many = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [one]}
    )
    assert KVConnectorFactory.supports_hma_config(many)  # vLLM asks this at the start
    told = MultiConnector.build_kv_connector_stats({name: {"loads": 2}})
    assert told is not None
    assert told.aggregate(MultiConnector.build_kv_connector_stats({name: {"loads": 3}})).reduce() == {
        name: {"loads": 5}
    }


def test_vllm_leaves_its_hybrid_allocator_on(configured: VllmConfig) -> None:
    assert not configured.scheduler_config.disable_hybrid_kv_cache_manager
    made = KVConnectorFactory.create_connector(
        changed(configured, "kv_transfer_config", kv_connector_extra_config={"address": NOWHERE, "chunk_tokens": 64}),
        KVConnectorRole.SCHEDULER, caches(FULL, SLIDING),
    )  # fmt: skip
    made.shutdown()
    for setting in ({"load": "layerwise"}, {"planning": "on"}, {"chunk_tokens": 128}):
        shadow = changed(configured, "kv_transfer_config", kv_connector_extra_config={"address": NOWHERE, **setting})
        shadow.scheduler_config = SimpleNamespace(**{**vars(configured.scheduler_config), "async_scheduling": False})
        with pytest.raises(InvalidRequest, match="--disable-hybrid-kv-cache-manager"):
            KVStoreConnector(shadow, KVConnectorRole.SCHEDULER, caches(FULL, SLIDING))
