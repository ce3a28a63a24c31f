"""Profiles in files, in the state store and in tables."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from controlplane.planning.instance_profile import VERSION, InstanceProfile
from mesh.errors import ConfigurationError
from mesh.store.interface import StateStore


async def store_profile(store: StateStore, profile: InstanceProfile) -> None:
    """Put it where planners look. Raises `StoreError`."""
    await store.put(profile.key, msgspec.json.encode(profile))


def decode_profile(encoded: bytes, where: str) -> InstanceProfile:
    """Raises `ConfigurationError` for what is no profile."""
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
    """As files hold it."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def read_profile(path: Path) -> InstanceProfile:
    """Raises `ConfigurationError`."""
    try:
        return decode_profile(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read the profile {path}: {error}") from error


def profile_rows(profiles: Sequence[InstanceProfile]) -> list[tuple[str, ...]]:
    """What `penstock profile show` says of each."""
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
        )
        for profile in profiles
    ]
