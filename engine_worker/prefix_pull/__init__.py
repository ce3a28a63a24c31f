"""Carries out pulls of cached prefixes to this worker and from it. What is decided is decided by
`controlplane/protocols/prefix_pull`."""
