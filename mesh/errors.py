"""Every error that Penstock raises on purpose.

PenstockError
+-- ConfigurationError      a setting is missing or contradicts another
+-- StoreError              the state store
|   +-- StoreUnavailable    no answer within the deadline
|   +-- StoreConflict       someone else wrote first
|   +-- StoreRefused        not for this process to read or write
+-- RpcError                another process of the mesh
|   +-- PeerUnavailable     not reachable, or gone while we were talking
|   +-- DeadlineExceeded    no answer within the deadline
|   +-- ProtocolViolation   the peer broke the agreed order of messages
|   +-- StaleLeader         an order of a leader that has been replaced
|   +-- KvTransferRefused   KV blocks will not be moved, and none was
|   +-- KvTransferFailed    moving KV blocks was given up midway
|   +-- JudgeUnavailable    no judge of the cascade gave a score
+-- EngineError             the engine inside a worker
|   +-- EngineFailed        it cannot start, or died
|   +-- RequestRefused      this one request cannot be served here
|   |   +-- QueueFull       not now: too many others wait
|   |   +-- AdapterUnavailable    its LoRA adapter cannot be loaded here
|   |       +-- AdapterNotFound   because it is not there
|   +-- HostTierUnavailable the host's store of KV blocks cannot be used, for now or at all
|   +-- KvBlockCorrupt      a transferred KV block does not hold what its tokens say
+-- PlacementError          no instance can take a request
|   +-- UnknownModel        nobody serves the model
|   +-- NoInstance          the model is known, but no instance of it is ready
+-- PlanInfeasible          no plan meets what was asked; the one in force stays
+-- TraceError              a trace of requests cannot be read
+-- ClusterError            the API server of a Kubernetes cluster refused something, or gave no answer
+-- DockerError             a Docker engine refused something, or gave no answer
+-- RayError                a Ray cluster refused something, or gave no answer
+-- IllegalTransition       a state machine was asked for a step it does not have (a bug; tells the story)
+-- InvariantBroken         what must always hold of an object does not (a bug; tells its state)
"""


class PenstockError(Exception):
    """Root of the tree: says what was wrong and what to do."""


class ConfigurationError(PenstockError):
    """A setting is missing or contradicts another."""


class StoreError(PenstockError):
    """Anything that the state store refuses or cannot do."""


class StoreUnavailable(StoreError):
    """The state store did not answer within the deadline."""


class StoreConflict(StoreError):
    """A compare-and-swap lost: the key has been written since it was read. Read again, then decide anew."""


class StoreRefused(StoreError):
    """This process may not read or write what it asked for."""


class StoreCompacted(StoreError):
    """The history asked for is not there; list again."""


class LeaseLost(StoreError):
    """The lease has expired or was revoked; grant a new one."""


class RpcError(PenstockError):
    """A call to another process of the mesh failed."""


class PeerUnavailable(RpcError):
    """The other process cannot be reached, or went away during the call."""


class DeadlineExceeded(RpcError):
    """The other process did not answer within the deadline."""


class ProtocolViolation(RpcError):
    """The peer broke the agreed order of messages."""


class StaleLeader(RpcError):
    """An order of a leader that has been replaced."""


class KvTransferRefused(RpcError):
    """KV blocks will not be moved, and none was."""


class KvTransferFailed(RpcError):
    """Moving KV blocks was given up midway."""


class JudgeUnavailable(RpcError):
    """No judge of the cascade gave a score."""


class EngineError(PenstockError):
    """An engine cannot do what it was asked for."""


class EngineFailed(EngineError):
    """The engine cannot start, or has died; the worker ends with it."""


class RequestRefused(EngineError):
    """This one request cannot be served here."""


class QueueFull(RequestRefused):
    """Not now: as many requests wait as may. Another instance may take it."""


class AdapterUnavailable(RequestRefused):
    """This instance cannot load the LoRA adapter of a request. Another one may."""


class AdapterNotFound(AdapterUnavailable):
    """There is no adapter at its path, as seen from this instance."""


class HostTierUnavailable(EngineError):
    """The host's store of KV blocks cannot be used, for now or at all; its blocks count as not there."""


class KvBlockCorrupt(EngineError):
    """A transferred KV block does not hold what its tokens say."""


class PlacementError(PenstockError):
    """No instance can take a request."""


class UnknownModel(PlacementError):
    """No instance in the mesh serves the model that was asked for."""


class NoInstance(PlacementError):
    """The model is known, but no instance of it is ready."""


class PlanInfeasible(PenstockError):
    """No plan meets the target; the plan in force stays."""


class TraceError(PenstockError):
    """A trace of requests cannot be read; the message names file and line."""


class ClusterError(PenstockError):
    """The API server of a Kubernetes cluster refused something, or gave no answer."""


class DockerError(PenstockError):
    """A Docker engine refused something, or gave no answer."""


class RayError(PenstockError):
    """A Ray cluster refused something, or gave no answer."""


class IllegalTransition(PenstockError):
    """A state machine was asked for a step it does not have (a bug; tells the story)."""


class InvariantBroken(PenstockError):
    """What must always hold of an object does not (a bug; tells its state)."""
