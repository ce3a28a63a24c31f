"""A Ray cluster as `penstock up` sees it: calls to a `ray_driver` process, which is started again when it has ended."""

import asyncio
import importlib.util
import itertools
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from mesh.errors import ConfigurationError, RayError
from mesh.parent_death import PARENT_VARIABLE
from mesh.tasks import TaskSet
from services.cli.carriers.ray_driver import CLIENT_SCHEME, GONE, MAX_LINE_BYTES

log = logging.getLogger(__name__)

ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
OF_THIS_MACHINE: Final = "auto"
"""The cluster of which this machine is a node."""
CONNECT_S: Final = 60.0
CALL_S: Final = 30.0
ENDS_WITHIN_S: Final = 5.0


class RayActorGone(RayError):
    """The actor has ended by itself, was killed, or its node is lost."""


class Driver(Protocol):
    """A process that answers calls."""

    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None

    def kill(self) -> None:
        """End it."""

    async def wait(self) -> int:
        """Return once it has ended."""


LaunchDriver = Callable[[], Coroutine[Any, Any, Driver]]


class RayCluster:
    """One namespace of a cluster. Calls raise `RayError` where it gives no answer, `RayActorGone` where it says so."""

    def __init__(self, address: str, namespace: str, launch_driver: LaunchDriver) -> None:
        self.address = address
        self.namespace = namespace
        self.host = ""
        """Of this machine, as the cluster's nodes reach it; known once connected."""
        self.gpus = 0
        """Of all nodes together, when this connected first."""
        self._launch_driver = launch_driver
        self._driver: Driver | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks = TaskSet("ray")

    async def connect(self) -> None:
        """No effect while connected. Raises `RayError`."""
        async with self._connecting:
            if self._driver is not None:
                return
            driver = await self._launch_driver()
            try:
                async with asyncio.timeout(CONNECT_S):
                    hello = await self._hello(driver)
            except (TimeoutError, RayError, asyncio.CancelledError) as error:
                await _end(driver)
                if isinstance(error, TimeoutError):
                    raise self._no_answer(f"it said nothing for {CONNECT_S:g} s") from None
                raise
            if not self.host:
                self.host, self.gpus = hello["host"], hello["gpus"]
            self._driver = driver
            self._tasks.spawn(self._read(driver), name="answers of Ray")

    async def call(self, call: str, deadline_s: float | None = CALL_S, **arguments: Any) -> Any:
        """What the method of this name of `RayDriver` returns. `deadline_s`: None for what may never be answered."""
        await self.connect()
        driver = self._driver
        if driver is None or driver.stdin is None:
            raise self._no_answer("its driver has just ended")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                driver.stdin.write(json.dumps({"id": number, "call": call, "arguments": arguments}).encode() + b"\n")
                await driver.stdin.drain()
                return await answer
        except TimeoutError:
            assert deadline_s is not None
            raise self._no_answer(f"{call} took more than {deadline_s:g} s") from None
        except OSError as error:
            raise self._no_answer(str(error)) from error
        finally:
            del self._asked[number]

    async def close(self) -> None:
        """End the driver; what it has started runs on."""
        driver, self._driver = self._driver, None
        await self._tasks.cancel()
        if driver is not None:
            await _end(driver)

    async def _hello(self, driver: Driver) -> dict[str, Any]:
        assert driver.stdout is not None
        line = await driver.stdout.readline()
        hello: dict[str, Any] = json.loads(line) if line else {"error": "its driver ended; see its log"}
        if "error" in hello:
            raise self._no_answer(hello["error"])
        return hello

    async def _read(self, driver: Driver) -> None:
        assert driver.stdout is not None
        while line := await driver.stdout.readline():
            answer = json.loads(line)
            future = self._asked.get(answer["id"])
            if future is None or future.done():
                continue
            if "error" not in answer:
                future.set_result(answer["answer"])
            elif answer["kind"] == GONE:
                future.set_exception(RayActorGone(answer["error"]))
            else:
                future.set_exception(self._no_answer(answer["error"]))
        log.warning("the Ray driver has ended; another one is started")
        if self._driver is driver:
            self._driver = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self._no_answer("its driver has ended"))
        await driver.wait()

    def _no_answer(self, why: str) -> RayError:
        at = f"at {self.address}" if self.address != OF_THIS_MACHINE else "of which this machine is a node"
        return RayError(
            f"no answer from a Ray cluster {at} ({why}): `ray start` makes this machine a node of one, --on "
            f"ray://HOST:PORT or {ADDRESS_VARIABLE} names another"
        )


def cluster_at(address: str, namespace: str, log_path: Path) -> RayCluster:
    """The cluster of --on's `address`; empty: that of RAY_ADDRESS, or of this machine. Raises `ConfigurationError`
    where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("--on ray needs Ray, which is not installed: pip install 'penstock[ray]'")
    where = address or os.environ.get(ADDRESS_VARIABLE) or OF_THIS_MACHINE

    async def launch() -> Process:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.cli.carriers.ray_driver", where, namespace),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_file,
                limit=MAX_LINE_BYTES,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    return RayCluster(where, namespace, launch)


def is_client_address(address: str) -> bool:
    """Whether this is ray://HOST:PORT."""
    host, _, port = address.removeprefix(CLIENT_SCHEME).rpartition(":")
    return address.startswith(CLIENT_SCHEME) and bool(host) and port.isdecimal()


async def _end(driver: Driver) -> None:
    if driver.stdin is not None:
        driver.stdin.close()
    try:
        await asyncio.wait_for(driver.wait(), ENDS_WITHIN_S)
    except TimeoutError:
        driver.kill()
        await driver.wait()
