"""Profiles in files, in the state store and in tables."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from controlplane.planning.instance_profile import VERSION, InstanceProfile
from mesh.errors import ConfigurationError
from mesh.store.interface import StateStore


async def store_profile(store: StateStore, profile: InstanceProfile) -> None:
    """Write the profile to the state store, where planners look for it. Raises `StoreError`."""
    await store.put(profile.key, msgspec.json.encode(profile))


def decode_profile(encoded: bytes, where: str) -> InstanceProfile:
    """Parse a profile; `where` names its source in errors. Raises `ConfigurationError` for anything but a profile of
    this version."""
    try:
        profile = msgspec.json.decode(encoded, type=InstanceProfile)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{where} holds no profile: {error}") from error
    if profile.version != VERSION:
        raise ConfigurationError(
            f"{where} is a profile of version {profile.version}, {VERSION} is needed: make a new one"
        )
    return profile


def encode_profile(profile: InstanceProfile) -> bytes:
    """The profile as indented JSON, the form of profile files."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def read_profile(path: Path) -> InstanceProfile:
    """Read a profile file. Raises `ConfigurationError` if it cannot be read or holds no profile of this version."""
    try:
        return decode_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read the profile {path}: {error}") from error


def profile_rows(profiles: Sequence[InstanceProfile]) -> list[tuple[str, ...]]:
    """One row of cells for each profile, for the table of `penstock profile show`."""
    return [
        (
            profile.engine,
            profile.model,
            profile.device,
            f"{profile.shape.gpus} ({profile.shape})" if profile.shape.gpus > 1 else "1",
            f"{profile.step.relative_error:.1%}",
            f"{profile.qoe.relative_error:.1%} (static {profile.qoe.static_relative_error:.1%})",
            f"{profile.ttft.prefill_ms(1000):,.1f}",
            f"{profile.decode_points[0].step_ms:,.2f}" if profile.decode_points else "-",
            _unevenness(profile),
        )
        for profile in profiles
    ]


def _unevenness(profile: InstanceProfile) -> str:
    """Of the largest batch."""
    if not profile.unevenness:
        return "-"
    point = profile.unevenness[-1]
    more = point.uneven_ms / point.level_ms - 1
    return f"{more:+.1%} +- {point.error_ms / point.level_ms:.1%} at {point.requests}"
