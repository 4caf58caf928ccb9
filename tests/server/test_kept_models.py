"""The specs of models, kept over restarts: which are, and what a file that says something wrong can do."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalog import Catalog
from kvstore.errors import InvalidRequest
from kvstore.seams import SystemDisk
from kvstore.server import kept
from kvstore.server.kept import MODELS, KeptFile, KeptModels
from kvstore.wire import spec_to_message
from tests.simulated import BytearrayMemory
from tests.specs import odd_spec, small_spec

COUNT_MAX = 16


def catalog_of(model_count_max: int = COUNT_MAX) -> Catalog:
    return Catalog(model_count_max, BytearrayMemory(), 64)


def kept_of(catalog: Catalog) -> KeptModels:
    return KeptModels(catalog, COUNT_MAX)


def spec_of(number: int) -> Any:
    return small_spec(model_id=f"model-{number}", weights_digest=f"{number:064x}")


def packed(count: int) -> tuple[bytes, list[bytes]]:
    """The file of so many models, and their fingerprints in the order of their use."""
    catalog = catalog_of()
    names = [catalog.register(spec_of(number)).fingerprint for number in range(count)]
    return kept_of(catalog).pack(), names


def test_every_kind_of_model_comes_back_as_it_was() -> None:
    first, again = catalog_of(), catalog_of()
    specs = [
        small_spec(scales=((0.5, 0.25),) * 2, cache_dtype="float8_e4m3fn", tokenizer_digest="cd" * 32),
        odd_spec("float16", 3, 8, 4, 32), odd_spec("bfloat16", 1, 24, 8, 16, mla=True),
    ]  # fmt: skip
    for spec in specs:
        first.register(spec)
    models = kept_of(first)
    assert models.is_changed
    kept_of(again).unpack(models.pack())
    assert not models.is_changed
    assert [each.spec for each in again.models.values()] == specs
    assert again.models.keys() == first.models.keys()


def test_news_is_a_model_that_came_or_was_forgotten() -> None:
    data, names = packed(2)
    catalog = catalog_of(model_count_max=2)
    models = kept_of(catalog)
    models.unpack(data)
    assert not models.is_changed
    catalog.register(spec_of(1))
    assert not models.is_changed
    catalog.register(spec_of(7))
    assert models.is_changed
    assert list(MODELS.unpack(models.pack())) == [catalog.register(spec_of(7)).fingerprint.hex(), names[1].hex()]
    assert not models.is_changed


def test_past_the_limits_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    data, names = packed(5)
    few = catalog_of(model_count_max=5)
    KeptModels(few, 5).unpack(data)
    assert list(few.models) == names[3:], "new ones find room"
    (size,) = {len(each) + 2 for each in MODELS.unpack(data).values()}
    monkeypatch.setattr(kept, "MODELS_BYTES_MAX", 3 * size + 1)
    data, names = packed(5)
    some = catalog_of()
    kept_of(some).unpack(data)
    assert list(some.models) == names[2:]


def test_a_spec_that_is_another_models_or_none_registers_nothing() -> None:
    data, names = packed(3)
    found: dict[str, Any] = MODELS.unpack(data)
    odd = odd_spec("float16", 3, 8, 4, 32)  # it would refuse the engines of that model another geometry
    found[names[0].hex()] = b64encode(spec_to_message(odd).SerializeToString()).decode()
    found[names[1].hex()] = 7
    wrong = spec_to_message(spec_of(4))
    wrong.layers[0].kind = 99  # type: ignore[assignment]  # as a newer release may write it
    found["00" * 32] = b64encode(wrong.SerializeToString()).decode()
    found["01" * 32] = "not base64!"
    found["02" * 32] = b64encode(b"\xff" * 9).decode()
    catalog = catalog_of()
    models = kept_of(catalog)
    models.unpack(MODELS.pack(found))
    assert list(catalog.models) == names[2:]


@pytest.mark.parametrize("change", [b"", b"{}", b'{"format": "kvstore-models"}', b"\xff\xfe"])
def test_a_file_that_is_none_is_left_alone(tmp_path: Path, change: bytes) -> None:
    path = tmp_path / "models" / "default.json"
    path.parent.mkdir()
    path.write_bytes(change)
    catalog = catalog_of()
    KeptFile(path, SystemDisk(), kept_of(catalog), "registered models").load()
    assert not catalog.models
    assert path.read_bytes() == change


def test_a_changed_byte_of_a_file_is_seen() -> None:
    data, names = packed(1)
    whole = json.loads(data)
    text = whole["models"][names[0].hex()]
    whole["models"][names[0].hex()] = ("A" if text[0] != "A" else "B") + text[1:]
    with pytest.raises(InvalidRequest, match="digest"):
        kept_of(catalog_of()).unpack(json.dumps(whole).encode())
