"""httpx over the simulated network, for roles that are HTTP clients themselves."""

import asyncio

import httpx

from fault_simulation.http import http_request
from fault_simulation.network import Network
from fault_simulation.node import Node


class SimulatedHttpTransport(httpx.AsyncBaseTransport):
    """Each request on a connection of its own, from `node`. httpx's read timeout bounds the whole exchange, where httpx
    itself would bound each pause."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Called by httpx. Raises httpx.ReadTimeout, and httpx.ReadError where the connection breaks or is refused."""
        url = request.url
        exchange = http_request(
            self._network,
            self._node,
            f"{url.host}:{url.port or 80}",
            request.method,
            url.raw_path.decode(),
            {name: value for name, value in request.headers.items() if name not in ("host", "content-length")},
            await request.aread(),
        )
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                status = await exchange.started()
                body = await exchange.body()
        except TimeoutError as error:
            raise httpx.ReadTimeout("no whole answer within the read timeout", request=request) from error
        except ConnectionError as error:
            raise httpx.ReadError(str(error), request=request) from error
        finally:
            exchange.leave()
        return httpx.Response(status, headers=exchange.headers, content=body, request=request)
