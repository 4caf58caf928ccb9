"""Every list, text and run of bytes of the wire contract has a limit, and requests beyond one are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire import METADATA_SESSION, METADATA_TOKEN
from kvstore.wire.bounds import check_parts, decode
from kvstore.wire.data import FIELD_COUNT_MAX, data_message, split_message
from kvstore.wire.limits import FIELD_LIMITS, MESSAGE_BYTES, PARTS_MAX
from tests.server.raw import Raw

ROOT = Path(__file__).resolve().parents[2]
FILES = (pb.DESCRIPTOR, rpb.DESCRIPTOR, admin_pb2.DESCRIPTOR, prefill_pb2.DESCRIPTOR)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES for service in file.services_by_name.values() for method in service.methods
}  # fmt: skip
HANDED_ON = (pb.HeldPrefix, pb.SharedStore)


def messages(kinds: Any) -> Iterator[Any]:
    for kind in kinds.values():
        yield kind
        yield from messages(kind.nested_types_by_name)


def bounded(kind: Any) -> list[Any]:
    """The fields of a message whose size its sender chooses."""
    return [each for each in kind.fields if each.is_repeated or each.type in (each.TYPE_BYTES, each.TYPE_STRING)]


FIELDS = [field for file in FILES for kind in messages(file.message_types_by_name) for field in bounded(kind)]


def test_every_file_of_the_contract_is_walked() -> None:
    assert {file.name for file in FILES} == {
        each.relative_to(ROOT / "proto").as_posix() for each in (ROOT / "proto").rglob("*.proto")
    }


def test_every_field_whose_size_the_sender_chooses_has_a_limit_and_nothing_else_has() -> None:
    assert sorted(FIELD_LIMITS) == sorted(field.full_name for field in FIELDS)
    for field in FIELDS:
        limit = FIELD_LIMITS[field.full_name]
        assert (limit.count > 0) == field.is_repeated, field.full_name
        is_sized = field.type in (field.TYPE_BYTES, field.TYPE_STRING)
        assert (limit.size > 0) == is_sized, field.full_name


def test_every_request_has_a_limit_of_its_own() -> None:
    read = {method.input_type.full_name for method in METHODS.values()}
    read |= {kind.DESCRIPTOR.full_name for kind in HANDED_ON} | {rpb.FetchBytesResponse.DESCRIPTOR.full_name}
    assert set(MESSAGE_BYTES) == read


def paths(kind: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every way from a message to a field whose size is the sender's choice."""
    for field in kind.fields:
        if field in bounded(kind):
            yield (*above, field)
        if field.message_type is not None:
            yield from paths(field.message_type, (*above, field))


def message_with(kind: Any, path: tuple[Any, ...], more: int) -> Any:
    """A message of which the field at the path is at its limit, and ``more`` above it, in as few bytes as can be."""
    root = message = GetMessageClass(kind)()
    for step in path[:-1]:
        message = getattr(message, step.name).add() if step.is_repeated else getattr(message, step.name)
        message.SetInParent()
    field, limit = path[-1], FIELD_LIMITS[path[-1].full_name]
    text = {field.TYPE_BYTES: b"x", field.TYPE_STRING: "x"}.get(field.type, 1)
    if not field.is_repeated:
        setattr(message, field.name, text * (limit.size + more))
    elif field.message_type is None:
        shortest = text if isinstance(text, int) else text[:0]
        getattr(message, field.name).extend([shortest] * (limit.count + more))
    else:
        items = getattr(message, field.name)
        for _ in range(limit.count + more):
            items.add()
    return root


REQUESTS = {method.input_type.full_name: method.input_type for method in METHODS.values()}
REQUESTS |= {kind.DESCRIPTOR.full_name: kind.DESCRIPTOR for kind in HANDED_ON}
CASES = [
    pytest.param(kind, path, id=".".join([kind.name, *(step.name for step in path)]))
    for kind in REQUESTS.values() for path in paths(kind) if path[-1].name != "data"
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_one_more_than_the_limit_is_refused_by_name(kind: Any, path: tuple[Any, ...]) -> None:
    read = GetMessageClass(kind)
    decode(read, message_with(kind, path, 0).SerializeToString())
    with pytest.raises(InvalidRequest) as caught:
        decode(read, message_with(kind, path, 1).SerializeToString())
    field = path[-1]
    limit = FIELD_LIMITS[field.full_name]
    assert f"{field.containing_type.name}.{field.name}" in caught.value.message
    assert str(limit.count or limit.size) in caught.value.message


LONG_ITEMS = [
    pytest.param(kind, path, id=".".join([kind.name, *(step.name for step in path)]))
    for kind in REQUESTS.values() for path in paths(kind)
    if path[-1].is_repeated and FIELD_LIMITS[path[-1].full_name].size
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path"), LONG_ITEMS)
def test_one_long_item_of_a_list_is_refused_by_name(kind: Any, path: tuple[Any, ...]) -> None:
    message = GetMessageClass(kind)()
    getattr(message, path[-1].name).append(bytes(FIELD_LIMITS[path[-1].full_name].size + 1))
    with pytest.raises(InvalidRequest, match=path[-1].name):
        decode(GetMessageClass(kind), message.SerializeToString())


@pytest.mark.parametrize("kind", REQUESTS.values(), ids=lambda kind: kind.name)
def test_a_request_too_large_for_its_fields_is_refused_before_it_is_decoded(kind: Any) -> None:
    most = MESSAGE_BYTES[kind.full_name]
    with pytest.raises(InvalidRequest, match=rf"at most {most}"):
        decode(GetMessageClass(kind), b"\xff" * (most + 1))


def test_many_chunks_of_many_parts_are_refused_together() -> None:
    check_parts(PARTS_MAX // 8, 8)
    with pytest.raises(InvalidRequest, match="hidden_layers"):
        check_parts(PARTS_MAX // 8 + 1, 8)


def test_fields_before_the_data_are_counted_while_they_are_walked() -> None:
    empty_runs = b"\x12\x00" * (FIELD_COUNT_MAX + 1)
    with pytest.raises(InvalidRequest, match="fields"):
        split_message(rpb.StoreBytesRequest, empty_runs + data_message(rpb.StoreBytesRequest(), []))


# ---------------------------------------------------------------- every door reads so


@pytest.fixture(scope="module")
def remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB", plane="remote") as running:
        yield running


def refused(call: Any, data: bytes, metadata: Any) -> tuple[str, str]:
    """The status of a call, and what it says."""
    try:
        answer = call(data, timeout=20, metadata=metadata)
        list(answer) if hasattr(answer, "__iter__") else None
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@pytest.mark.parametrize("path", sorted(METHODS))
def test_the_server_holds_every_method_to_the_limits(remote: Sidecar, path: str) -> None:
    """On the local plane, or on the remote one where only that has the method: the largest message of its kind and a
    byte, which is not even decoded."""
    method = METHODS[path]
    data = b"\x00" * (MESSAGE_BYTES[method.input_type.full_name] + 1)
    if method.containing_service.name != "RemoteService":
        with Raw(remote) as raw:
            kind = raw.channel.unary_stream if method.server_streaming else raw.channel.unary_unary
            status = refused(kind(path), data, ((METADATA_SESSION, raw.secret),))
    else:
        with grpc.insecure_channel(remote.tcp_address) as channel:
            token = (METADATA_TOKEN, f"Bearer {TOKEN}")
            stream = channel.unary_stream("/kvstore.v1.RemoteService/Connect")(
                rpb.ConnectRequest(version=1).SerializeToString(), timeout=20, metadata=(token,)
            )
            opened = rpb.ConnectResponse.FromString(next(stream))
            kind = channel.unary_stream if method.server_streaming else channel.stream_unary
            sent: Any = data if method.server_streaming else iter([data])
            status = refused(kind(path), sent, (token, (METADATA_SESSION, opened.secret)))
            stream.cancel()
    assert status[0] in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"), status
    assert "at most" in status[1] or "larger than max" in status[1], status
