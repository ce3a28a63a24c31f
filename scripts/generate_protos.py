"""Generate the Python stubs of `protos/` into `generated/` (messages, type stubs, services).

Run by `make protos` and by the wheel build; the output is never committed.
"""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(root: Path = ROOT) -> list[Path]:
    """Generate every stub and return the files written. Raises SystemExit with protoc's own message."""
    source, target = root / "protos", root / "generated"
    target.mkdir(exist_ok=True)
    protos = sorted(source.rglob("*.proto"))
    includes = [f"-I{source}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    outputs = [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}"]
    code = protoc.main(["protoc", *includes, *outputs, *map(str, protos)])
    if code != 0:
        raise SystemExit(f"protoc failed with exit code {code}; its message stands above")
    for package in {target / proto.relative_to(source).parent for proto in protos}:
        (package / "__init__.py").touch()
    # `penstock` is a namespace: `penstock.testing` lies elsewhere in a checkout. Earlier releases made it a package.
    (target / "penstock" / "__init__.py").unlink(missing_ok=True)
    return sorted(target.rglob("*_pb2*"))


if __name__ == "__main__":
    print(f"generated {len(generate())} files", file=sys.stderr)
