"""What each tenant has used, for who bills or plans by it: a JSON line for each request that has ended.

A stream that was resumed ends more than once, perhaps at two frontends, under one request id: each line has what the
whole request has used up to then, and of those with one id the one with the most tokens counts (`penstock usage`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec
from prometheus_client import Counter

from mesh.errors import ConfigurationError
from mesh.runtime import Threads

log = logging.getLogger(__name__)

MAX_UNWRITTEN: Final = 65_536
"""Records that wait for a disk that takes none, some 20 MB; beyond them the oldest are lost, which a metric counts."""
BATCH: Final = 1024
RETRY_S: Final = 1.0
_MILLION: Final = 1_000_000


class Price(msgspec.Struct, frozen=True):
    """Of a million tokens each, in a currency that only its reader knows."""

    prompt: float
    """Of a prompt's tokens that were computed."""
    cached: float
    """Of those that were found in a prefix cache."""
    output: float

    @classmethod
    def parse(cls, text: str) -> tuple[str, "Price"]:
        """MODEL=PROMPT,CACHED,OUTPUT. Raises ConfigurationError."""
        model, _, prices = text.rpartition("=")
        try:
            prompt, cached, output = (float(price) for price in prices.split(","))
        except ValueError:
            prompt = cached = output = -1.0
        if not model or not all(0 <= price < float("inf") for price in (prompt, cached, output)):
            raise ConfigurationError(
                f"--price {text}: write MODEL=PROMPT,CACHED,OUTPUT, three prices of a million tokens, such as "
                "chat=0.5,0.05,1.5"
            )
        return model, cls(prompt, cached, output)

    def of(self, used: "ModelUsage") -> float:
        """What so many tokens cost."""
        computed = used.prompt_tokens - used.cached_tokens
        return (self.prompt * computed + self.cached * used.cached_tokens + self.output * used.output_tokens) / _MILLION


class ModelUsage(msgspec.Struct, frozen=True):
    """Of one model."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's."""
    output_tokens: int


class UsageRecord(msgspec.Struct, frozen=True):
    """Of one request, up to its end or its break."""

    request_id: str
    unix_ms: int
    """When it ended."""
    tenant: str
    """Name of the API key, or the tenant of the token; empty without either."""
    model: str
    """As the client named it: a model or a cascade."""
    endpoint: str
    status: int
    """Of HTTP; 499: the client left before the end."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tier: str = ""
    """Of a cascade: whose answer the client got."""
    tiers: Sequence[ModelUsage] = ()
    """Of a cascade: all that were asked; their sum is what the record says."""
    cost: float | None = None
    """By the prices of `--price`; None where one that is needed is not known."""


def cost_of(record: UsageRecord, prices: Mapping[str, Price]) -> float | None:
    """By the price of the name that the client asked for, else by those of a cascade's tiers."""
    whole = ModelUsage(record.model, record.prompt_tokens, record.cached_tokens, record.output_tokens)
    parts = [whole] if record.model in prices or not record.tiers else record.tiers
    if any(part.model not in prices for part in parts):
        return None
    return sum(prices[part.model].of(part) for part in parts)


class UsageFile:
    """A file of lines, which is renamed to `.1`, that to `.2` and so on, when it is full."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        """`kept`: full files besides the one that is written; the oldest beyond are deleted. Raises
        ConfigurationError where no file can be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._file: IO[bytes] | None = None
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._opened()
        except OSError as error:
            raise ConfigurationError(f"no usage can be written to {path}: {error}") from error

    def append(self, lines: Sequence[bytes]) -> None:
        """Write each with a line's end. Raises OSError, after which some may have been written."""
        try:
            for line in lines:
                file = self._opened()
                if file.tell() and file.tell() + len(line) + 1 > self._max_bytes:
                    file = self._rotated()
                file.write(line + b"\n")
            self._opened().flush()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Nothing is open afterwards; another line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # what could not be flushed is written again by the caller
                log.error("a usage file could not be closed", extra={"error": str(error)})

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = file = self._path.open("a+b")
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a process was killed, or a disk full, within a line
                    file.write(b"\n")
        return self._file

    def _rotated(self) -> IO[bytes]:
        self.close()
        for number in range(self._kept, 0, -1):
            former = self._path if number == 1 else self._numbered(number - 1)
            if former.exists():
                former.replace(self._numbered(number))
        if self._kept == 0:
            self._path.unlink()
        return self._opened()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class UsageLog:
    """Brings records to their file, on a thread, in the order in which they came."""

    def __init__(self, file: UsageFile, prices: Mapping[str, Price], threads: Threads, lost: Counter) -> None:
        self._file = file
        self._prices = prices
        self._threads = threads
        self._lost = lost
        self._unwritten: deque[UsageRecord] = deque()
        self._news = asyncio.Event()

    def add(self, record: UsageRecord) -> None:
        """A request has ended. Never waits."""
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._unwritten.popleft()
            self._lost.inc()
        cost = cost_of(record, self._prices)
        self._unwritten.append(record if cost is None else msgspec.structs.replace(record, cost=cost))
        self._news.set()

    async def write(self) -> None:
        """For ever; what a full disk did not take is tried again."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.flush()
            except OSError as error:
                log.error("usage cannot be written", extra={"error": str(error), "waiting": len(self._unwritten)})
                self._news.set()
                await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Write all there is. Raises OSError; what was not written is kept."""
        while self._unwritten:
            batch = [self._unwritten.popleft() for _ in range(min(BATCH, len(self._unwritten)))]
            try:
                await self._threads.run(self._file.append, [msgspec.json.encode(record) for record in batch])
            except (OSError, asyncio.CancelledError):
                self._unwritten.extendleft(reversed(batch))  # a line that is there twice counts once
                raise

    async def stop(self) -> None:
        """Write what is left, once, and close the file."""
        try:
            await self.flush()
        except OSError as error:
            self._lost.inc(len(self._unwritten))
            log.error("usage is lost: it cannot be written", extra={"error": str(error)})
        await self._threads.run(self._file.close)
