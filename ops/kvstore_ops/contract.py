"""The wire contract's keeper: generates the stubs, lints the protos, and refuses a breaking change.

The baseline is a committed descriptor set (``proto/baseline.binpb``). A change breaks when it removes or renames
a service, method, message, field, enum or enum value, or changes a field's number, type, label or ``oneof``, or a
method's types, or uses again what was ``reserved``. Where a version is not frozen a field may go, when its number and
name are ``reserved``. ``make proto-baseline`` takes what was added into the baseline; a break of ``v1alpha`` goes with
it, one of ``v1`` (and every later version without a suffix) is refused.

    python -m kvstore_ops.contract generate | check | baseline
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
BASELINE = PROTO / "baseline.binpb"
STUBS = (Path("kvstore/v1"), Path("kvstore/v1alpha"))

_FROZEN = re.compile(r"[a-z ]+ (\w+\.)+v\d+\.")  # names of v1 begin with this, names of v1alpha do not
_LOOSE = re.compile(r"/v\d+[a-z]")
_PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _sources() -> list[str]:
    return [str(path.relative_to(PROTO)) for path in sorted(PROTO.rglob("*.proto"))]


def _protoc(*arguments: str) -> None:
    if protoc.main(["protoc", f"-I{PROTO}", *arguments, *_sources()]) != 0:
        raise SystemExit("protoc refused the contract")


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "set.binpb"
        _protoc(f"--descriptor_set_out={target}", "--include_source_info")
        return descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())


def generate(target: Path = ROOT) -> None:
    """Write the stubs under ``target``."""
    for stubs in STUBS:
        (target / stubs).mkdir(parents=True, exist_ok=True)
    _protoc(f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}")


def _stubs(root: Path) -> dict[Path, bytes]:
    found = (path for stubs in STUBS for path in (root / stubs).glob("*_pb2*.py*"))
    return {path.relative_to(root): path.read_bytes() for path in found}


def stale_stubs() -> list[str]:
    """Committed stubs that differ from what the contract generates."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh = _stubs(Path(directory))
    held = _stubs(ROOT)
    return sorted(str(name) for name in fresh.keys() | held.keys() if fresh.get(name) != held.get(name))


# ------------------------------------------------------------------ lint


def lint(files: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Return breaks of the house rules: package named by its folder and version; PascalCase types, snake_case fields;
    enum values carry the enum's name and start at UNSPECIFIED; requests and responses named by their method; a frozen
    file imports only frozen files."""
    found = []
    for file in files.file:
        if file.package != str(Path(file.name).parent).replace("/", "."):
            found.append(f"{file.name}: package {file.package} does not match its folder")
        if _FROZEN.match(f"file {file.package}."):
            loose = [each for each in file.dependency if _LOOSE.search(each)]
            found += [f"{file.name}: is frozen and imports {each}, which may change" for each in loose]
        for message in file.message_type:
            found += _lint_message(file.name, message)
        for enum in file.enum_type:
            found += _lint_enum(file.name, enum)
        for service in file.service:
            found += _lint_service(file.name, service)
    return found


def _lint_message(place: str, message: descriptor_pb2.DescriptorProto) -> Iterator[str]:
    if not _PASCAL.fullmatch(message.name):
        yield f"{place}: message {message.name} is not PascalCase"
    for field in message.field:
        if not _SNAKE.fullmatch(field.name):
            yield f"{place}: field {message.name}.{field.name} is not snake_case"
    for nested in message.nested_type:
        if not nested.options.map_entry:
            yield from _lint_message(place, nested)


def _lint_enum(place: str, enum: descriptor_pb2.EnumDescriptorProto) -> Iterator[str]:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    for value in enum.value:
        if not value.name.startswith(prefix):
            yield f"{place}: enum value {value.name} must begin with {prefix}"
    if enum.value[0].number != 0 or enum.value[0].name != prefix + "UNSPECIFIED":
        yield f"{place}: enum {enum.name} must start with {prefix}UNSPECIFIED = 0"


def _lint_service(place: str, service: descriptor_pb2.ServiceDescriptorProto) -> Iterator[str]:
    if not service.name.endswith("Service"):
        yield f"{place}: service {service.name} must end in Service"
    for method in service.method:
        for kind, name in (("Request", method.input_type), ("Response", method.output_type)):
            if name.rsplit(".", 1)[-1] != method.name + kind:
                yield f"{place}: {service.name}.{method.name} must use {method.name}{kind}, not {name}"


# ------------------------------------------------------------------ breaking changes


def _surface(files: descriptor_pb2.FileDescriptorSet) -> dict[str, str]:
    """Return everything that a peer relies on: qualified name -> the shape that must not change."""
    surface: dict[str, str] = {}

    def add_message(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        name = f"{prefix}.{message.name}"
        surface[f"message {name}"] = ""
        for field in message.field:
            oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            shape = f"{field.number} {field.type} {field.label} {field.type_name} {oneof}"
            surface[f"field {name}.{field.name}"] = shape.strip()
        for nested in message.nested_type:
            add_message(name, nested)
        for enum in message.enum_type:
            add_enum(name, enum)

    def add_enum(prefix: str, enum: descriptor_pb2.EnumDescriptorProto) -> None:
        surface[f"enum {prefix}.{enum.name}"] = ""
        for value in enum.value:
            surface[f"enum value {prefix}.{enum.name}.{value.name}"] = str(value.number)

    for file in files.file:
        for message in file.message_type:
            add_message(file.package, message)
        for enum in file.enum_type:
            add_enum(file.package, enum)
        for service in file.service:
            for method in service.method:
                streams = f"{method.client_streaming} {method.server_streaming}"
                surface[f"method {file.package}.{service.name}.{method.name}"] = (
                    f"{method.input_type} {method.output_type} {streams}"
                )
    return surface


def _reserved(files: descriptor_pb2.FileDescriptorSet) -> set[str]:
    """Return the fields that were removed properly: both number and name are reserved."""
    kept: set[str] = set()

    def add(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        numbers = {n for span in message.reserved_range for n in range(span.start, min(span.end, span.start + 1000))}
        for name in message.reserved_name:
            kept.update(f"field {prefix}.{message.name}.{name} {number}" for number in numbers)
        for nested in message.nested_type:
            add(f"{prefix}.{message.name}", nested)

    for file in files.file:
        for message in file.message_type:
            add(file.package, message)
    return kept


def _kept_free(files: descriptor_pb2.FileDescriptorSet) -> dict[str, list[tuple[str, int, int]]]:
    """Return the reservations of each message as (name, first number, number after the last)."""
    kept: dict[str, list[tuple[str, int, int]]] = {}

    def add(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        spans = [("", span.start, span.end) for span in message.reserved_range]
        kept[f"message {prefix}.{message.name}"] = spans + [(name, 0, 0) for name in message.reserved_name]
        for nested in message.nested_type:
            add(f"{prefix}.{message.name}", nested)

    for file in files.file:
        for message in file.message_type:
            add(file.package, message)
    return kept


def _freed(before: descriptor_pb2.FileDescriptorSet, after: descriptor_pb2.FileDescriptorSet) -> Iterator[str]:
    """Yield reservations that were dropped. A new field there would clash with the old field of older peers."""
    now = _kept_free(after)
    for message, kept in _kept_free(before).items():
        for name, start, stop in kept:
            held = any(name == other and low <= start and stop <= high for other, low, high in now.get(message, []))
            if message in now and not held:
                yield f"{message} reserves {name or f'{start} to {stop - 1}'} no more"


def breaking(before: descriptor_pb2.FileDescriptorSet, after: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Return the changes in ``after`` that break a peer built against ``before``."""
    old, new, reserved = _surface(before), _surface(after), _reserved(after)
    found = []
    for name, shape in old.items():
        if name not in new:
            if _FROZEN.match(name) or f"{name} {shape.split(' ')[0]}" not in reserved:
                found.append(f"{name} was removed (reserve its number and name; what is frozen stays)")
        elif new[name] != shape:
            found.append(f"{name} changed: {shape} -> {new[name]}")
    return found + list(_freed(before, after))


def frozen(names: list[str]) -> list[str]:
    """Return those breaks found by :func:`breaking` that concern a frozen version: v1, v2 and so on."""
    return [name for name in names if _FROZEN.match(name)]


def _baseline() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes())


def rebase() -> int:
    """Make the current contract the baseline. Return 1, and change nothing, when a frozen version would break."""
    broken = frozen(breaking(_baseline(), _descriptors()))
    if broken:
        print("\n".join(f"frozen: {line}" for line in broken))
        return 1
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "set.binpb"
        _protoc(f"--descriptor_set_out={target}")
        shutil.copyfile(target, BASELINE)
    return 0


def check() -> int:
    """Print all findings. Return 0 when there are none."""
    files = _descriptors()
    found = lint(files)
    found += [f"{name} is stale: run `make proto`" for name in stale_stubs()]
    found += [f"breaking: {line}" for line in breaking(_baseline(), files)]
    print("\n".join(found) or f"contract: {len(_surface(files))} names, none broken")
    return 1 if found else 0


def main(arguments: list[str]) -> int:
    """Run one of generate, check, baseline."""
    if arguments == ["check"]:
        return check()
    if arguments == ["generate"]:
        generate()
        return 0
    if arguments == ["baseline"]:
        return rebase()
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
