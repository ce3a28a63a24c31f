"""What grpcurl does, in Python: list services and call methods knowing nothing but the address."""

from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

DEADLINE_S = 5.0


class ReflectionClient:
    """Synchronous; use it from a thread when a server runs on the same event loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        """Full names, as `grpcurl ADDRESS list` prints them."""
        return sorted(self._database.get_services())

    def call(self, service: str, method: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One unary call, as `grpcurl -d JSON ADDRESS SERVICE/METHOD` makes it."""
        descriptor = self._pool.FindServiceByName(service).FindMethodByName(method)
        invoke = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(descriptor.output_type).FromString,
        )
        message = json_format.ParseDict(request or {}, GetMessageClass(descriptor.input_type)())
        return json_format.MessageToDict(invoke(message, timeout=DEADLINE_S), preserving_proto_field_name=True)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
