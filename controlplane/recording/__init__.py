"""What a scheduler saw and what it decided, as lines that can be run through again.

Recorded are the events of the cluster table and the requests, not the snapshots that follow from them: whoever runs
them through the same table and the same policies must come to the same snapshots, of which each decision bears a
digest, and to the same decisions. The simulator places by the same functions over the same table.
"""
