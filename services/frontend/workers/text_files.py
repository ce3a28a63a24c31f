"""A model's tokenizer and templates, from one of its workers."""

from typing import Final

import grpc

from mesh.errors import ProtocolViolation
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from mesh.text_files import GIVEN_FILES, MAX_TEXT_BYTES, TextFiles, text_hash
from penstock.v1 import worker_pb2, worker_pb2_grpc

FETCH_DEADLINE_S: Final = 60.0


async def fetch_text_files(worker: Member, transport: Transport, wanted_hash: str) -> TextFiles:
    """Those that the worker has announced, checked by their hash. Raises RpcError."""
    files: dict[str, bytearray] = {}
    received_bytes = 0
    peer = f"worker {worker.member_id} at {worker.address}"
    async with open_channel(transport, worker.address, worker.role) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        request = worker_pb2.GetTextFilesRequest(text_hash=wanted_hash)
        try:
            async for piece in stub.GetTextFiles(request, timeout=FETCH_DEADLINE_S):
                received_bytes += len(piece.content)
                if piece.file not in GIVEN_FILES or received_bytes > MAX_TEXT_BYTES:
                    raise ProtocolViolation(f"{peer} sends {piece.file!r} and {received_bytes} bytes; not a tokenizer")
                files.setdefault(piece.file, bytearray()).extend(piece.content)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, peer) from error
    found = {name: bytes(content) for name, content in files.items()}
    if text_hash(found) != wanted_hash:
        raise ProtocolViolation(f"{peer} sent other files than it has announced")
    return found
