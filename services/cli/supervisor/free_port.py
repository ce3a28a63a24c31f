"""Whether a mesh can have its port, told before anything is started."""

import socket

from mesh.errors import ConfigurationError


def check_port_is_free(host: str, port: int) -> None:
    """Raises `ConfigurationError`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
            ) from None
