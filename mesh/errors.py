"""Every error that Penstock raises on purpose.

PenstockError
+-- ConfigurationError      a setting is missing or contradicts another
+-- StoreError              the state store
|   +-- StoreUnavailable    no answer within the deadline
|   +-- StoreConflict       someone else wrote first
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
|   +-- KvBlockCorrupt      a transferred KV block does not hold what its tokens say
+-- PlacementError          no instance can take a request
|   +-- UnknownModel        nobody serves the model
|   +-- NoInstance          the model is known, but no instance of it is ready
+-- PlanInfeasible          no plan meets what was asked; the one in force stays
+-- TraceError              a trace of requests cannot be read
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


class IllegalTransition(PenstockError):
    """A state machine was asked for a step it does not have (a bug; tells the story)."""


class InvariantBroken(PenstockError):
    """What must always hold of an object does not (a bug; tells its state)."""
