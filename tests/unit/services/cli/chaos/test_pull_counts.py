from services.cli.chaos.pull_counts import PullCounts


async def test_what_was_pulled_before_counts_nothing_and_a_killed_worker_keeps_its_count() -> None:
    counts = PullCounts(lambda: ())
    counts.heard("a", 5, 1)
    await counts.look()
    assert (counts.pulled, counts.computed) == (0, 0)
    counts.heard("a", 7, 1)
    counts.heard("a restarted", 2, 3)
    await counts.look()
    assert (counts.pulled, counts.computed) == (4, 3)
