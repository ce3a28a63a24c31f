"""gRPC with mutual TLS: both ends show a certificate of the mesh's authority, and each new connection the latest."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from mesh.errors import ConfigurationError
from mesh.identity.contexts import TlsContexts
from mesh.identity.files import Credentials, IdentityFolder, own_folder
from mesh.identity.guard import IdentityGuard
from mesh.identity.identity import Identity, expected_dns_name
from mesh.runtime import GrpcTransport, Transport


def transport_of(identity: str, role: str) -> "Transport":
    """Of a process of this role with the identity in a folder, see `own_folder`; plaintext for no folder. Raises
    ConfigurationError, also where the identity is another role's."""
    if not identity:
        return GrpcTransport()
    transport = TlsTransport(IdentityFolder(own_folder(identity, role)))
    if transport.identity.role != role:
        raise ConfigurationError(f"{identity} holds the identity {transport.identity}; this process is a {role}")
    return transport


_UNIX: Final = "unix:"
_CONNECT_MS: Final = ("grpc.min_reconnect_backoff_ms", 3_000)
"""What an attempt to connect gets, whatever the name says. Both ends compute in a handshake: on a machine at load 20
100 ms were too short, and each new attempt began anew."""
_MAX_FORMER: Final = 4
"""Channels with credentials of before that one `RenewingChannel` keeps, for the calls on them."""


class TlsTransport:
    """The `Transport` of a process with an identity. Sockets of this machine's file system stay plaintext: their
    folder's permissions guard them."""

    def __init__(self, folder: IdentityFolder, *, names_members: bool = True) -> None:
        """`names_members`: servers are known by their role; else by the host name or address in their certificate."""
        self._folder = folder
        self._names_members = names_members
        self.contexts = TlsContexts(folder)
        """For sockets beside gRPC's."""

    def to_others(self) -> "TlsTransport":
        """The same certificate for servers that are no members, and whose certificates name hosts."""
        return TlsTransport(self._folder, names_members=False)

    @property
    def identity(self) -> Identity:
        """This process's own."""
        return self._folder.credentials().identity

    def channel(
        self, address: str, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any], role: str = ""
    ) -> grpc.aio.Channel:
        """Calls fail unless a member of the mesh answers, of this role if it is given."""
        if address.startswith(_UNIX):
            return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
        if self._names_members:
            options = (*options, ("grpc.ssl_target_name_override", expected_dns_name(role)))
        options = (*(option for option in options if option[0] != _CONNECT_MS[0]), _CONNECT_MS)

        def connect(credentials: Credentials) -> grpc.aio.Channel:
            own = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
            return grpc.aio.secure_channel(address, own, options=options, interceptors=interceptors)

        return RenewingChannel(self._folder, connect)

    def server(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[Any]) -> grpc.aio.Server:
        """One that asks every caller who it is."""
        guard = IdentityGuard(self.identity.trust_domain)
        return grpc.aio.server(options=options, interceptors=(guard, *interceptors))

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Raises RuntimeError if the address cannot be had."""
        last = self._folder.credentials()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads before each handshake; None: as before."""
            nonlocal last
            credentials = self._folder.credentials()
            if credentials is last:
                return None
            last = credentials
            return _configuration(credentials)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(last), renewed, require_client_authentication=True
        )
        return int(server.add_secure_port(bind, credentials))


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], root_certificates=credentials.authority
    )


class RenewingChannel(grpc.aio.Channel):
    """A channel whose calls use the certificate of the time at which they begin.

    gRPC gives a channel its credentials once and for all; a process that serves for months would lose its peers when
    they expire. Calls under way stay where they are.
    """

    def __init__(self, folder: IdentityFolder, connect: Callable[[Credentials], grpc.aio.Channel]) -> None:
        self._folder = folder
        self._connect = connect
        self._credentials = folder.credentials()
        self._channel = connect(self._credentials)
        self._former: list[grpc.aio.Channel] = []

    def current(self) -> grpc.aio.Channel:
        """The one whose credentials are those of now."""
        credentials = self._folder.credentials()
        if credentials is not self._credentials:
            self._former.append(self._channel)
            self._credentials, self._channel = credentials, self._connect(credentials)
            del self._former[:-_MAX_FORMER]  # gRPC closes what nobody refers to
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        """The present one and those with calls of before."""
        for channel in (*self._former, self._channel):
            await channel.close(grace)

    async def __aenter__(self) -> "RenewingChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)


class _Method:
    """A multi-callable of whatever channel is the present one."""

    def __init__(self, channel: RenewingChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel = channel
        self._make = (kind, args, kwargs)
        self._made_for: grpc.aio.Channel | None = None
        self._made: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._channel.current()
        if channel is not self._made_for:
            kind, made_of, named = self._make
            self._made_for, self._made = channel, getattr(channel, kind)(*made_of, **named)
        return self._made(*args, **kwargs)
