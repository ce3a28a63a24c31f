"""API keys, and what each of them may ask for: a file of hashes, so that reading it gives nobody a key.

A line is `name:sha256hex` and what the key is bounded by, each behind a colon: `requests_per_min=60`, `concurrency=8`,
`tokens_per_min=100000`, `tokens_per_day=1000000`, `tokens_per_month=20000000`, `expires=2027-12-31`,
`models=chat,small`, `lowest_priority=0`, `share=2`, `operator`. The first two may stand without names:
`name:sha256hex[:requests_per_min[:concurrency[:operator]]]`. Empty lines and lines with # are skipped. Keys are 256
random bits, which no one guesses from a hash: a slow password hash would only cost CPU per request.
"""

import base64
import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from controlplane.model.request import NO_TENANT, Tenant
from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)

KEY_PREFIX: Final = "sk-penstock-"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
SECRET_BYTES: Final = 32
_LOOKUP_BYTES: Final = 8
OPERATOR: Final = "operator"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who a key belongs to and what it allows."""

    name: str
    digest: bytes
    requests_per_min: float | None = None
    concurrency: int | None = None
    is_operator: bool = False
    """May change what the mesh serves, too."""
    tokens_per_min: float | None = None
    """Of prompts and answers together, as they are counted when a request has ended."""
    expires: date | None = None
    """The last day, in UTC, on which it opens anything."""
    models: frozenset[str] = frozenset()
    """It may ask for these models and cascades; empty: for all."""
    lowest_priority: int | None = None
    """Lower numbers go first everywhere in the mesh, and this is the lowest that a request with this key may have."""

    tokens_per_day: float | None = None
    """Its budget of a day in UTC, and of a month (`KeyBudgets`); counted as those of `tokens_per_min`."""
    tokens_per_month: float | None = None

    share: float = 1.0
    """Of what is to be had where keys compete: one of 2 is served twice the tokens of one of 1."""

    @property
    def tenant(self) -> Tenant:
        """On whose account its requests are served."""
        return Tenant(self.name, self.share)

    def has_expired(self, unix_s: float) -> bool:
        """Whether its last day is over."""
        return self.expires is not None and datetime.fromtimestamp(unix_s, UTC).date() > self.expires

    def may_ask(self, model: str) -> bool:
        """Whether a model, or a cascade, is among those that it is for."""
        return not self.models or model in self.models


def tenant_of(key: ApiKey | None) -> Tenant:
    """On whose account a request with this key is served."""
    return NO_TENANT if key is None else key.tenant


class KeyFile:
    """A file of keys that may change while the frontend serves."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError naming the file and line."""
        self.path = path
        self._seen = self._stamp()
        self.ring = KeyRing.load(path)

    def look(self) -> "KeyRing | None":
        """The keys of a file that has changed and is good; None otherwise. A bad one is logged, and the former keys
        stay: it may be half written."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            self.ring = KeyRing.load(self.path)
        except ConfigurationError as error:
            log.error("the changed key file is not used; the former keys stay", extra={"error": str(error)})
            return None
        log.info("new API keys are in use", extra={"file": str(self.path), "keys": len(self.ring)})
        return self.ring

    def _stamp(self) -> tuple[int, int, int] | None:
        """What changes with the content, also where a link is turned to another file, as Kubernetes does with
        secrets."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


class KeyRing:
    """The keys of a file."""

    def __init__(self, keys: list[ApiKey]) -> None:
        self._by_start: dict[bytes, ApiKey] = {key.digest[:_LOOKUP_BYTES]: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_start)

    def differences(self, former: "KeyRing") -> dict[str, str]:
        """The names of keys that are new, other than before, or gone, with commas between them."""
        was, now = ({key.name: key for key in ring._by_start.values()} for ring in (former, self))
        found = {
            "added": now.keys() - was.keys(),
            "changed": {name for name in now.keys() & was.keys() if now[name] != was[name]},
            "removed": was.keys() - now.keys(),
        }
        return {change: ",".join(sorted(names)) for change, names in found.items() if names}

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Raises ConfigurationError naming the file and line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the API key file {path} cannot be read: {error}") from error
        keys = [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if _holds_key(line)]
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"{path}: two keys have one name; limits are counted by name")
        return cls(keys)

    def named(self, name: str) -> ApiKey | None:
        """The key of that name, or None."""
        return next((key for key in self._by_start.values() if key.name == name), None)

    def find(self, presented: str) -> ApiKey | None:
        """The key, or None. Found by the start of its hash, which says nothing about the key itself, then compared
        in constant time."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        key = self._by_start.get(digest[:_LOOKUP_BYTES])
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def new_key_line(name: str, secret: bytes, **bounds: Any) -> tuple[str, str]:
    """A fresh key of `secret`, which holds SECRET_BYTES random bytes, shown once to its owner, and the line for the
    file. `bounds`: fields of `ApiKey` by their names; None stands for none. Raises ConfigurationError for a name with
    other characters than letters, digits, dot, dash and underscore, and for bounds that are none."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no key name; use letters, digits, dot, dash, underscore, 64 at most")
    key = KEY_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    fields = [name, hashlib.sha256(key.encode()).hexdigest()]
    fields += [OPERATOR] if bounds.pop("is_operator", False) else []
    for bound, value in bounds.items():
        if isinstance(value, float):
            fields.append(f"{bound}={value:.12g}")
        elif isinstance(value, frozenset | tuple | list):
            fields += [f"{bound}={','.join(sorted(value))}"] if value else []
        elif value is not None:
            fields.append(f"{bound}={value}")
    line = ":".join(fields)
    parse_line(line, "new key")
    return key, line


def _holds_key(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def parse_line(line: str, where: str) -> ApiKey:
    """`where` names the line for an error. Raises ConfigurationError."""
    name, digest, *fields = (*line.strip().split(":"), "")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where}: {name!r} is no key name; use letters, digits, dot, dash, underscore")
    if not _SHA256.fullmatch(digest):
        raise ConfigurationError(f"{where}: the second field must be the key's SHA-256 in lower-case hex")
    read: dict[str, Any] = {}
    first_named = next((place for place, text in enumerate(fields) if "=" in text), len(fields))
    for place, text in enumerate(fields[:-1]):
        bound, is_named, value = text.partition("=")
        if not is_named:
            # Behind a named one it might be the rest of its value.
            unnamed = _UNNAMED[place] if place < min(len(_UNNAMED), first_named) else text
            bound, value = "is_operator" if text == OPERATOR else unnamed, text
        if not is_named and not value:
            continue  # left out, in front of others without names
        if bound in read or (bound not in _BOUNDS and text != OPERATOR):
            raise ConfigurationError(
                f"{where}: {text!r} is no bound of a key, or stands twice; there are {', '.join(_BOUNDS)}, each with "
                f"=VALUE, and {OPERATOR}"
            )
        read[bound] = True if text == OPERATOR else _value(bound, value, where)
    return ApiKey(name, bytes.fromhex(digest), **read)


def _value(bound: str, text: str, where: str) -> Any:
    """Raises ConfigurationError."""
    parse, wanted = _BOUNDS[bound]
    try:
        return parse(text)
    except ValueError:
        raise ConfigurationError(f"{where}: {bound} must be {wanted}, not {text!r}") from None


def _positive(text: str) -> float:
    if not re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text) or float(text) <= 0:
        raise ValueError(text)
    return float(text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise ValueError(text)
    return int(text)


def _models(text: str) -> frozenset[str]:
    models = frozenset(text.split(","))
    if "" in models:
        raise ValueError(text)
    return models


def _number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text):
        raise ValueError(text)
    return int(text)


_UNNAMED: Final = ("requests_per_min", "concurrency")
_BOUNDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "requests_per_min": (_positive, "a positive number"),
    "concurrency": (_whole, "a positive whole number"),
    "tokens_per_min": (_positive, "a positive number"),
    "tokens_per_day": (_positive, "a positive number"),
    "tokens_per_month": (_positive, "a positive number"),
    "expires": (date.fromisoformat, "a date such as 2027-12-31"),
    "models": (_models, "names of models with commas between them"),
    "lowest_priority": (_number, "a whole number"),
    "share": (_positive, "a positive number"),
}
"""How each bound is read, and what it must be."""
