"""What grpcurl does, in Python: list services and call methods knowing nothing but the address."""

from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mesh.identity.identity import ANY_ROLE, expected_dns_name

DEADLINE_S = 5.0


class ReflectionClient:
    """Synchronous; use it from a thread when a server runs on the same event loop."""

    def __init__(self, address: str, identity: Path | None = None) -> None:
        """`identity`: the folder of the identity to show, of a mesh where everybody has one."""
        self._channel = grpc.insecure_channel(address) if identity is None else _secure_channel(address, identity)
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


def _secure_channel(address: str, identity: Path) -> grpc.Channel:
    """By the flags that `penstock ca grpcurl` prints."""
    authority, certificate, key = ((identity / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key"))
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    options = (("grpc.ssl_target_name_override", expected_dns_name(ANY_ROLE)),)
    return grpc.secure_channel(address, credentials, options)
