"""API keys: a file of hashes, so that reading it gives nobody a key.

A line is `name:sha256hex[:requests_per_min[:concurrency]]`; empty lines and lines with # are skipped. Keys are
256 random bits, which no one guesses from a hash: a slow password hash would only cost CPU per request.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
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
