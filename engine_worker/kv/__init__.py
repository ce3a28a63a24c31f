"""KV blocks move directly from worker to worker, over UCX.

    target: agent.pull(peer, "m1", source_block_ids, target_block_ids, deadline_s)
    source: agent.export("m1", block_ids) before, await agent.withdraw("m1") after

`agent` is what an engine uses, `memory` is what it brings. Nothing here imports UCX before an agent starts.
"""
