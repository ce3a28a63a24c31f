"""Can processes of the former release and of this one talk? What of the former one's messages would be misread.

protos/former.json holds what counts on the wire of the messages and services of the former release:

    python scripts/wire_compatibility.py              # say what breaks; exit status 1 if anything does
    python scripts/wire_compatibility.py --record     # when a release is made: take down the messages as they are now

The rules are those of `buf breaking` in its category WIRE, as far as proto3 needs them, and that no call goes away.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "protos" / "former.json"
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

Described = dict[str, Any]
"""`messages`: by name, its fields by number and its reserved numbers; `enums`: by name, the numbers of their values;
`calls`: by service and name, what they take and answer."""


def described_files(protos: Path, *, with_comments: bool = False) -> list[descriptor_pb2.FileDescriptorProto]:
    """The files in a folder, as protoc reads them. Raises SystemExit with protoc's own message."""
    names = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "described"
        options = [f"--descriptor_set_out={out}", *(["--include_source_info"] if with_comments else [])]
        includes = [f"-I{protos}", f"-I{resources.files('grpc_tools') / '_proto'}"]
        # In a process of its own: the protobuf library in it and that of OR-Tools abort whichever process has both.
        code = subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", *includes, *options, *names], check=False
        ).returncode
        if code != 0:
            raise SystemExit(f"protoc failed with exit code {code}; its message stands above")
        return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def describe(protos: Path) -> Described:
    """What counts on the wire of all messages, enums and calls in a folder."""
    found: Described = {"messages": {}, "enums": {}, "calls": {}}
    for file in described_files(protos):
        for name, message in _messages(f".{file.package}", file.message_type):
            fields = {str(field.number): _field(field) for field in message.field}
            reserved = [number for span in message.reserved_range for number in range(span.start, span.end)]
            found["messages"][name] = {"fields": fields, "reserved": reserved}
            for enum in message.enum_type:
                found["enums"][f"{name}.{enum.name}"] = sorted({value.number for value in enum.value})
        for enum in file.enum_type:
            found["enums"][f".{file.package}.{enum.name}"] = sorted({value.number for value in enum.value})
        for service in file.service:
            for call in service.method:
                takes = f"{'stream ' * call.client_streaming}{call.input_type}"
                answers = f"{'stream ' * call.server_streaming}{call.output_type}"
                found["calls"][f".{file.package}.{service.name}/{call.name}"] = f"{takes} -> {answers}"
    return found


def breaks(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a process of the one side would misread, or not find, at the other; a sentence for each."""
    return [*_of_calls(former["calls"], now["calls"]), *_of_messages(former, now), *_of_enums(former, now)]


def _of_calls(former: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name, form in former.items():
        if name not in now:
            yield f"{name} is gone: keep it until no process of the former release calls it"
        elif now[name] != form:
            yield f"{name} was {form} and is {now[name]}: add another call beside it"


def _of_messages(former: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, message in former["messages"].items():
        present = now["messages"].get(name)
        if present is None:
            yield f"{name} is gone: keep it under this name"
            continue
        for number, field in message["fields"].items():
            after = present["fields"].get(number)
            if after is None and int(number) not in present["reserved"]:
                yield f"{name}: field {number} ({field['name']}) is gone: write `reserved {number};`"
            elif after is not None and after["form"] != field["form"]:
                yield (
                    f"{name}: field {number} was {field['form']} {field['name']} and is {after['form']} "
                    f"{after['name']}: take a number that nobody has used"
                )
        for number in set(message["reserved"]) & set(map(int, present["fields"])):
            yield f"{name}: field {number} is used again: take a number that nobody has used"


def _of_enums(former: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name, numbers in former["enums"].items():
        for number in sorted(set(numbers) - set(now["enums"].get(name, ()))):
            yield f"{name}: value {number} is gone: keep it, if only under another name"


def _messages(
    parent: str, messages: Iterable[descriptor_pb2.DescriptorProto]
) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    for message in messages:
        name = f"{parent}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _field(field: descriptor_pb2.FieldDescriptorProto) -> dict[str, str]:
    kind = field.type_name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return {"name": field.name, "form": f"repeated {kind}" if field.label == _REPEATED else kind}


def _readable(found: Mapping[str, Mapping[str, Any]]) -> str:
    """As JSON with a line for each message, enum and call, so that a change of the record can be read."""
    parts = []
    for kind, entries in found.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
        parts.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Exit status: 0 nothing breaks, 1 something does."""
    parser = argparse.ArgumentParser(description="Compare the messages with those of the former release.")
    parser.add_argument("--record", action="store_true", help="write protos/former.json from the messages as they are")
    parser.add_argument("--protos", type=Path, default=ROOT / "protos", help="folder of the messages; default: protos")
    arguments = parser.parse_args()
    now = describe(arguments.protos)
    if arguments.record:
        RECORD.write_text(_readable(now), encoding="utf-8")
        return 0
    found = breaks(json.loads(RECORD.read_text("utf-8")), now)
    print("\n".join(found) or "nothing breaks")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
