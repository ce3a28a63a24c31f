"""A whole mesh in one process, on virtual time, from one seed (FoundationDB's simulation and TigerBeetle's VOPR are the
models). `world` has the machine: event loop, network, disks. `nodes` boots the mesh's own roles on it, unchanged."""
