"""What every process of a mesh stands on: the directory, RPC, identities, time."""

import os
from typing import Final

FORK_VARIABLE: Final = "GRPC_ENABLE_FORK_SUPPORT"
"""Read by gRPC as it is imported, so that this package has to come first."""

# For processes that fork and go on with gRPC it takes handlers, by which a process that only starts another program
# loses calls and streams that are under way, or its life (grpcio 1.85: 60 starts under uvloop, between calls over new
# channels, end in a failed check of its own). A frontend that started vLLM's parts never heard of a worker so.
os.environ.setdefault(FORK_VARIABLE, "false")
