"""Pages of reference, made from the code: the commands, the gRPC services, the interfaces of plugins."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
from wire_compatibility import described_files

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 118
_SERVICE, _METHOD = 6, 2  # numbers of the fields in FileDescriptorProto and ServiceDescriptorProto


def command_reference() -> str:
    """Every command with its --help, in the order in which a newcomer meets them."""
    from services.cli.main import penstock

    def show(command: click.Command, names: list[str], parent: click.Context | None) -> Iterator[str]:
        context = click.Context(
            command, info_name=names[-1], parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
        )
        yield f"{'#' * min(len(names) + 1, 4)} {' '.join(names)}\n\n```text\n{command.get_help(context)}\n```\n"
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None, name
                yield from show(found, [*names, name], context)

    note = "What `--help` says of each command. `penstock completion SHELL` has a shell complete them.\n"
    return "\n".join(["# Commands\n", note, *show(penstock, ["penstock"], None)])


def grpc_reference() -> str:
    """Every service with its calls and their comments, then the file that it is declared in."""
    parts = [
        "# gRPC services\n",
        "Every role answers gRPC reflection on its port: `grpcurl -plaintext HOST:PORT list`. What holds "
        "between releases: [upgrade](../upgrade.md).\n",
    ]
    for file in described_files(ROOT / "protos", with_comments=True):
        comments = {tuple(place.path): _text(place.leading_comments) for place in file.source_code_info.location}
        parts.append(f"## {Path(file.name).stem}\n")
        for number, service in enumerate(file.service):
            parts.append(f"### {file.package}.{service.name}\n\n{comments.get((_SERVICE, number), '')}\n")
            parts.append("| call | |\n|---|---|")
            for at, method in enumerate(service.method):
                asks = f"{'stream ' * method.client_streaming}{_name(method.input_type)}"
                answers = f"{'stream ' * method.server_streaming}{_name(method.output_type)}"
                says = comments.get((_SERVICE, number, _METHOD, at), "").replace("|", "\\|")
                parts.append(f"| `{method.name}({asks}) -> {answers}` | {says} |")
            parts.append("")
        text = (ROOT / "protos" / file.name).read_text("utf-8")
        parts.append(f"```proto\n{text}```\n")
    return "\n".join(parts)


def python_reference() -> str:
    """What a package with plugins implements, and what it tests it with: each class with its docstring and methods."""
    import controlplane.model.placement
    import controlplane.policies.interface
    import engine_worker.engines.interface
    import engine_worker.engines.movable
    import penstock.testing.engine
    import penstock.testing.judge
    import penstock.testing.policy
    import services.cascade.judges.interface

    modules = (
        controlplane.policies.interface,
        controlplane.model.placement,
        engine_worker.engines.interface,
        engine_worker.engines.movable,
        services.cascade.judges.interface,
        penstock.testing.policy,
        penstock.testing.engine,
        penstock.testing.judge,
    )
    head = "# Python interfaces\n\nWhat a [plugin](../plugins.md) implements, sees, and is tested with.\n"
    return "\n".join([head, *(_module(module) for module in modules)])


def _module(module: ModuleType) -> str:
    own = [
        each
        for name, each in vars(module).items()
        if inspect.isclass(each) and each.__module__ == module.__name__ and not name.startswith("_")
    ]
    return "\n".join([f"## {module.__name__}\n\n{inspect.getdoc(module) or ''}\n", *map(_class, own)])


def _class(each: type) -> str:
    """The code of a class; of its methods only what they are called with and what they promise."""
    lines = inspect.cleandoc("\n" + inspect.getsource(each)).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef), each
    for method in reversed([node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]):
        first = method.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        end = first.end_lineno if is_docstring else first.lineno - 1
        start = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)]) - 1
        is_helper = method.name.startswith("_") and method.name != "__init__"
        lines[start if is_helper else end : method.end_lineno] = [] if is_helper or is_docstring else ["        ..."]
    code = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()
    return f"### {each.__name__}\n\n```python\n{code}\n```\n"


def _text(comment: str) -> str:
    """In one line."""
    return " ".join(comment.split())


def _name(of_type: str) -> str:
    """Without the package."""
    return of_type.rpartition(".")[2]
