"""Profiles a mesh that has just started, before anybody uses it (Arrow, section 5.3)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.errors import PenstockError
from mesh.membership import Directory
from mesh.store.interface import StateStore
from services.cli.profiling.plan import Configuration, ProfileBounds
from services.cli.profiling.profile_file import store_profile
from services.cli.profiling.run import find_instance, profile_instance

BOUNDS = ProfileBounds(longest_tokens=4096, largest_batch=16, seconds=0.5)
"""Shorter than what `penstock profile` does when it is asked: the mesh waits for it."""


async def profile_models(store: StateStore, models: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
    """Measure one instance of each model and store what was found. A model that cannot be profiled is told of and
    left out: it is served by the policy's defaults."""
    directory = Directory(store)
    await directory.start()
    try:
        for model in models:
            samples_path = folder / f"{model.replace('/', '-')}.samples.jsonl"
            samples_path.unlink(missing_ok=True)
            try:
                member = find_instance(directory, None, model)
                say(f"profiling {member.member_id}")
                profile = await profile_instance(member, BOUNDS, samples_path, _silently)
                await store_profile(store, profile)
                prefill_ms = profile.ttft.prefill_ms(1000)
                say(f"profiled {member.member_id}: {prefill_ms:.0f} ms for 1000 tokens; kept at {profile.key}")
            except PenstockError as error:
                say(f"{model} could not be profiled and is served without: {error}")
    finally:
        await directory.stop()


def _silently(configuration: Configuration | None, done: int, total: int) -> None:
    """No progress: it takes seconds."""
