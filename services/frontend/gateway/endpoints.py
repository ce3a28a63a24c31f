"""Where instances take requests from an Envoy: those of attached servers, by the addresses that Envoy wants."""

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from controlplane.model.incarnation import Incarnation
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.runtime import Threads
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

WORKER_ROLE: Final = "worker"
URL_ATTRIBUTE: Final = "http_url"
RESOLVE_S: Final = 5.0
"""How often the names of hosts are looked up: a server may come back at another address."""
_PORTS: Final = {"http": 80, "https": 443}


def resolve_host(host: str) -> str:
    """The address that a name stands for; blocks, and raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


@dataclass(slots=True)
class Endpoint:
    """One instance."""

    member: Member
    host: str
    port: int
    address: str = ""
    """ip:port, with an IPv6 address in brackets; empty while the host's name is not resolved."""

    @property
    def instance_id(self) -> str:
        """Of the instance."""
        return self.member.member_id

    @property
    def model(self) -> str:
        """That it serves."""
        return self.member.attributes.get("model", "")


class Endpoints:
    """Follows the directory. `on_change` hears which instances can be sent requests, whenever that has changed."""

    def __init__(self, threads: Threads, resolve: Callable[[str], str] = resolve_host) -> None:
        self._threads = threads
        self._resolve = resolve
        self._endpoints: dict[str, Endpoint] = {}
        self._told: tuple[Incarnation, ...] = ()
        self._tasks = TaskSet("endpoints")
        self._resolving: asyncio.Task[None] | None = None
        self.on_links: Callable[[tuple[Incarnation, ...]], None] = lambda _: None
        self.requests: Counter[str] = Counter()
        """Under way through this gateway, by instance id."""
        self.news = 0
        """How often an endpoint has come."""
        self._has_news = asyncio.Event()

    def on_member(self, change: MemberChange) -> None:
        """Follow the directory; members that take no requests over HTTP are ignored."""
        member = change.member
        if member.role != WORKER_ROLE:
            return
        known = self._endpoints.get(member.member_id)
        if change.kind is ChangeKind.LEFT:
            if known is not None and known.member.incarnation_id == member.incarnation_id:
                del self._endpoints[member.member_id]
                self._tell()
            return
        endpoint = _endpoint(member)
        if endpoint is None:
            return
        if known is not None and (known.host, known.port) == (endpoint.host, endpoint.port):
            endpoint.address = known.address
        self._endpoints[member.member_id] = endpoint
        log.info("endpoint", extra={"instance_id": member.member_id, "url": member.attributes[URL_ATTRIBUTE]})
        if not endpoint.address and self._resolving is None:
            self._resolving = self._tasks.spawn(self._resolve_forever(), name="resolve")
        self._tell()

    def all(self) -> tuple[Endpoint, ...]:
        """By instance id."""
        return tuple(self._endpoints[instance_id] for instance_id in sorted(self._endpoints))

    def of(self, model: str, among: Collection[str] | None = None) -> tuple[Endpoint, ...]:
        """Those of a model that can be reached, and are `among` these addresses, if any are given."""
        return tuple(
            each
            for each in self.all()
            if each.model == model and each.address and (among is None or each.address in among)
        )

    def find(self, instance_id: str) -> Endpoint | None:
        """That of an instance, if it can be reached."""
        endpoint = self._endpoints.get(instance_id)
        return endpoint if endpoint is not None and endpoint.address else None

    async def wait_for_news(self, seen: int, timeout_s: float) -> bool:
        """Return once `news` is beyond `seen`, or False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.news == seen:
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Let all who wait for news look again."""
        self.news += 1
        self._has_news.set()

    async def stop(self) -> None:
        """Look up no more names."""
        await self._tasks.cancel()

    def _tell(self) -> None:
        reached = tuple(
            Incarnation(each.instance_id, each.member.incarnation_id) for each in self.all() if each.address
        )
        if reached != self._told:
            self._told = reached
            self.on_links(reached)
            self.wake()

    async def _resolve_forever(self) -> None:
        while True:
            for endpoint in self.all():
                await self._look_up(endpoint)
            self._tell()
            await asyncio.sleep(RESOLVE_S if all(each.address for each in self.all()) else RESOLVE_S / 10)

    async def _look_up(self, endpoint: Endpoint) -> None:
        if _is_address(endpoint.host):
            return
        try:
            found = await self._threads.run(self._resolve, endpoint.host)
        except OSError as error:
            extra = {"instance_id": endpoint.instance_id, "host": endpoint.host, "error": str(error)}
            log.warning("an endpoint's host is not known", extra=extra)
            return
        address = _joined(found, endpoint.port)
        if address != endpoint.address:
            log.info("endpoint resolved", extra={"instance_id": endpoint.instance_id, "address": address})
            endpoint.address = address


def _endpoint(member: Member) -> Endpoint | None:
    url = member.attributes.get(URL_ATTRIBUTE, "")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        host, port = "", 0
    if not host:
        log.error("an instance announces a URL that is none", extra={"instance_id": member.member_id, "url": url})
        return None
    return Endpoint(member, host, port, _joined(host, port) if _is_address(host) else "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
