"""`python -m services.parser SOCKET`: vLLM's parsers behind a socket of this machine, as long as its parent lives."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

import grpc

from mesh.errors import ConfigurationError
from mesh.exit_status import ExitStatus
from mesh.parent_death import end_with_parent_if_asked
from mesh.rpc.limits import SERVER_OPTIONS
from mesh.runtime import Transport, system_runtime
from mesh.telemetry import set_up_logs
from penstock.v1 import parser_pb2_grpc
from services.parser.interface import Parsers
from services.parser.service import ParserServicer

ROLE = "parser"


async def serve(make: Callable[[], Parsers], socket: str, transport: Transport) -> None:
    """Answer until SIGTERM. `make` may take long: nobody is answered before."""
    parsers = make()
    server: grpc.aio.Server = transport.server(SERVER_OPTIONS, [])
    parser_pb2_grpc.add_ParserServicer_to_server(ParserServicer(parsers), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{socket}")  # in a folder of its parent's alone
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(0)


def run(make: Callable[[], Parsers]) -> None:
    """The whole process; its argument is the socket."""
    end_with_parent_if_asked()
    (socket,) = sys.argv[1:]
    set_up_logs(ROLE, ROLE, "warning")
    try:
        asyncio.run(serve(make, socket, system_runtime().transport))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitStatus.WRONG_SETTINGS)


def _vllm_parsers() -> Parsers:
    from services.parser.vllm_parsers import VllmParsers

    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what an engine would lack here
    return VllmParsers()


if __name__ == "__main__":
    run(_vllm_parsers)
