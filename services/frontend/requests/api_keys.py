"""API keys, and what each of them may ask for: a file of hashes, so that reading it gives nobody a key.

A line is `name:sha256hex[:requests_per_min[:concurrency]]`; empty lines and lines with # are skipped. Keys are
256 random bits, which no one guesses from a hash: a slow password hash would only cost CPU per request.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mesh.errors import ConfigurationError

KEY_PREFIX: Final = "sk-penstock-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SECRET_BYTES: Final = 32
_LOOKUP_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who a key belongs to and what it allows."""

    name: str
    digest: bytes
    requests_per_min: float | None = None
    concurrency: int | None = None


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self._by_start: dict[bytes, ApiKey] = {key.digest[:_LOOKUP_BYTES]: key for key in keys}

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Raises ConfigurationError naming the file and line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the API key file {path} cannot be read: {error}") from error
        keys = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if _holds_key(line)]
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"{path}: two keys have one name; limits are counted by name")
        return cls(keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key, or None. Found by the start of its hash, which says nothing about the key itself, then compared
        in constant time."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        key = self._by_start.get(digest[:_LOOKUP_BYTES])
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def new_key_line(
    name: str, secret: bytes, requests_per_min: float | None = None, concurrency: int | None = None
) -> tuple[str, str]:
    """A fresh key of `secret`, which holds SECRET_BYTES random bytes, shown once to its owner, and the line for the
    file. Raises ConfigurationError for a name with other characters than letters, digits, dot, dash and underscore."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no key name; use letters, digits, dot, dash, underscore, 64 at most")
    key = KEY_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    fields = [name, hashlib.sha256(key.encode()).hexdigest()]
    if requests_per_min is not None or concurrency is not None:
        fields.append("" if requests_per_min is None else f"{requests_per_min:g}")
    if concurrency is not None:
        fields.append(str(concurrency))
    line = ":".join(fields)
    _parse(line, "new key")
    return key, line


def _holds_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse(line: str, where: str) -> ApiKey:
    fields = line.strip().split(":")
    if not 2 <= len(fields) <= 4:
        raise ConfigurationError(f"{where}: expected name:sha256hex[:requests_per_min[:concurrency]]")
    name, digest, rate, concurrency = (*fields, "", "")[:4]
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where}: {name!r} is no key name; use letters, digits, dot, dash, underscore")
    if not _SHA256.fullmatch(digest):
        raise ConfigurationError(f"{where}: the second field must be the key's SHA-256 in lower-case hex")
    return ApiKey(name, bytes.fromhex(digest), _positive(rate, where), _whole(concurrency, where))


def _positive(text: str, where: str) -> float | None:
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or float(text) <= 0:
        raise ConfigurationError(f"{where}: requests_per_min must be a positive number, not {text!r}")
    return float(text)


def _whole(text: str, where: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise ConfigurationError(f"{where}: concurrency must be a positive whole number, not {text!r}")
    return int(text)


@dataclass(slots=True)
class TokenBucket:
    """Allows `per_min` events a minute, in bursts of up to as many as ten seconds bring (at least one)."""

    per_min: float
    _level: float = field(init=False)
    _filled_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._level = self.burst

    @property
    def burst(self) -> float:
        """Events that may come at once after a pause."""
        return max(1.0, self.per_min / 6)

    def take(self, now_s: float) -> float:
        """0 if an event may happen now, which it then has; otherwise the seconds until one may."""
        elapsed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._level = min(self.burst, self._level + elapsed_s * self.per_min / 60)
        # Refills add up with rounding errors: a wait of exactly the announced time must suffice.
        if self._level >= 1 - 1e-9:
            self._level -= 1
            return 0.0
        return (1 - self._level) * 60 / self.per_min


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit of the key forbids the request now."""

    limit: str
    """In words, for the client."""
    retry_after_s: float


class KeyLimits:
    """Rate and concurrency of every key; one entry for each key of the file."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._running: dict[str, int] = {}

    def enter(self, key: ApiKey, now_s: float) -> LimitReached | None:
        """A request begins, unless a limit is reached. Each one that begins must `leave`."""
        running = self._running.get(key.name, 0)
        if key.concurrency is not None and running >= key.concurrency:
            return LimitReached(f"{key.concurrency} concurrent requests", 1.0)
        if key.requests_per_min is not None:
            bucket = self._buckets.setdefault(key.name, TokenBucket(key.requests_per_min))
            wait_s = bucket.take(now_s)
            if wait_s > 0:
                return LimitReached(f"{key.requests_per_min:g} requests per minute", wait_s)
        self._running[key.name] = running + 1
        return None

    def leave(self, key: ApiKey) -> None:
        """A request that `enter` let in is over."""
        self._running[key.name] -= 1
