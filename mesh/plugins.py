"""What installed packages add to Penstock's own policies, engines and judges.

A package names what it adds in its metadata, as an entry point of one of the groups `penstock.policies`,
`penstock.engines` and `penstock.judges`. Names are read from the metadata; a package is imported only when what it adds
is asked for, so a broken one costs nobody else anything. See docs/plugins.md.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)

OWN: Final = "penstock"
"""The source of what comes with Penstock itself."""

Plugin = TypeVar("Plugin")


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is installed and cannot be used."""

    name: str
    source: str
    """Name and version of the package."""
    reason: str


class PluginRegistry(Generic[Plugin]):
    """Penstock's own plugins of one kind, and those of installed packages. Each is loaded once in a process.

    Two of one name would leave it to chance which runs, so an installed plugin with the name of one of Penstock's own
    is not used, and of two installed ones with the same name neither is.
    """

    def __init__(
        self,
        group: str,
        noun: str,
        kind: type[Plugin],
        own: Mapping[str, Plugin],
        find: Callable[[str], Iterable[EntryPoint]] = lambda group: entry_points(group=group),
    ) -> None:
        """`noun` is what errors call a plugin of the `group`; `kind` is what its entry points must refer to."""
        self.group: Final = group
        self.noun: Final = noun
        self.own: Final = MappingProxyType(dict(own))
        self._kind = kind
        self._find = find
        self._loaded: dict[str, Plugin | PluginFailure] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Penstock's own, in their order, then the installed ones by name. Imports nothing."""
        return (*self.own, *sorted(self._installed.keys() - self.own.keys()))

    def get(self, name: str) -> Plugin:
        """Raises `ConfigurationError` for a name that there is not, or whose package cannot be used."""
        if name in self.own:
            return self.own[name]
        if name not in self._installed:
            raise ConfigurationError(f"there is no {self.noun} {name!r}; choose one of: {', '.join(self.names)}")
        loaded = self._load(name)
        if isinstance(loaded, PluginFailure):
            raise ConfigurationError(f"the {self.noun} {name!r} of {loaded.source} cannot be used: {loaded.reason}")
        return loaded

    def source(self, name: str) -> str:
        """Where the plugin comes from: `OWN`, or name and version of its package."""
        return OWN if name in self.own else _sources(self._installed[name])

    def usable(self) -> tuple[str, ...]:
        """The names of those that can be used. Imports every installed plugin; `failures` says which were left out."""
        return tuple(n for n in self.names if n in self.own or not isinstance(self._load(n), PluginFailure))

    def failures(self) -> tuple[PluginFailure, ...]:
        """Installed plugins that cannot be used, by name. Imports every one."""
        hidden = [
            PluginFailure(name, _sources(found), f"Penstock has a {self.noun} of that name; the package must rename it")
            for name, found in self._installed.items()
            if name in self.own
        ]
        loaded = [self._load(name) for name in self._installed if name not in self.own]
        failed = [*hidden, *(each for each in loaded if isinstance(each, PluginFailure))]
        return tuple(sorted(failed, key=lambda failure: failure.name))

    def report_failures(self) -> None:
        """Log each installed plugin that cannot be used. For roles, at their start."""
        for failure in self.failures():
            told = {"plugin": failure.name, "package": failure.source, "reason": failure.reason}
            log.error("a plugin cannot be used", extra={"group": self.group, **told})

    @cached_property
    def _installed(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for entry in self._find(self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    def _load(self, name: str) -> Plugin | PluginFailure:
        if name not in self._loaded:
            self._loaded[name] = self._import(name, self._installed[name])
        return self._loaded[name]

    def _import(self, name: str, found: list[EntryPoint]) -> Plugin | PluginFailure:
        source = _sources(found)
        if len(found) > 1:
            return PluginFailure(name, source, "several packages have one of that name; uninstall all but one")
        try:
            plugin = found[0].load()
        except (Exception, SystemExit) as error:
            log.warning("a plugin cannot be imported", extra={"plugin": name, "package": source}, exc_info=True)
            return PluginFailure(name, source, f"importing {found[0].value} raised {type(error).__name__}: {error}")
        if not isinstance(plugin, self._kind):
            reason = f"{found[0].value} is of type {type(plugin).__name__}, not {self._kind.__name__}"
            return PluginFailure(name, source, f"{reason}; see docs/plugins.md")
        return plugin


def _sources(found: list[EntryPoint]) -> str:
    return " and ".join(sorted(f"{e.dist.name} {e.dist.version}" if e.dist else "an unknown package" for e in found))
