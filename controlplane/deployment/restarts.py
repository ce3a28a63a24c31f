"""When a process that ended is started again, and when it is given up. Pure; time is an argument.

    STARTING --started--> RUNNING --ended--> WAITING --pause over--> STARTING
        |                    |
        |                    '--ended, drained--> DRAINED
        '--not started--> WAITING, or, as after any end, GIVEN_UP

Whatever its state, a process that is asked to stop is STOPPING from then on.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

from mesh.backoff import pause_after
from mesh.errors import IllegalTransition
from mesh.exit_status import ExitStatus
from mesh.invariants import invariants

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 10.0
WINDOW_S: Final = 120.0
MAX_RESTARTS_IN_WINDOW: Final = 8

ASKED_TO_END: Final[Mapping[int, str]] = MappingProxyType(
    {
        ExitStatus.STOPPED: "by a signal that was not the supervisor's",
        ExitStatus.RESTART: "as `penstock restart` asked",
    }
)
"""By somebody else than the supervisor, who would not start it again."""


@dataclass(slots=True)
class RestartHistory:
    """The recent restarts of one process.

    A process comes back after half a second, then after twice as long each time, and no more once it has ended
    too often within the window: a worker that cannot start would otherwise burn a core for ever.
    """

    restarts_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RESTARTS_IN_WINDOW))

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before starting again, counted as a restart; None: give up."""
        while self.restarts_s and now_s - self.restarts_s[0] > WINDOW_S:
            self.restarts_s.popleft()
        if len(self.restarts_s) == MAX_RESTARTS_IN_WINDOW:
            return None
        delay_s = pause_after(len(self.restarts_s) + 1, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self.restarts_s.append(now_s)
        return delay_s


# -- what happens


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs."""


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The machine could not start it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process has ended."""

    status: int
    """One of `ExitStatus`, or another one, negative for a signal."""
    reason: str = ""
    """The last that it said of why."""


@dataclass(frozen=True, slots=True)
class PauseOver:
    """A `Pause` is over."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The process is to end, and to stay away."""


ProcessEvent: TypeAlias = Started | NotStarted | Ended | PauseOver | StopAsked


# -- what is to be done


@dataclass(frozen=True, slots=True)
class Say:
    """Tell whoever started the supervisor."""

    text: str


@dataclass(frozen=True, slots=True)
class AwaitEnd:
    """Wait for the process, and tell `Ended`."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, and tell `PauseOver`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the process again, and tell `Started` or `NotStarted`."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process at once: it started in the moment when it was to stop."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It is not started again, though nobody asked it to end."""


@dataclass(frozen=True, slots=True)
class Forget:
    """It is not started again, as somebody asked: its name is free."""


ProcessInstruction: TypeAlias = Say | AwaitEnd | Pause | Launch | Kill | GiveUp | Forget


class ProcessState(Enum):
    """What a process that is kept running does now."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """For its next start."""
    GIVEN_UP = "given up"
    DRAINED = "drained"
    STOPPING = "stopping"


EXPECTED_IN: Final[Mapping[type, ProcessState]] = MappingProxyType(
    {
        Started: ProcessState.STARTING,
        NotStarted: ProcessState.STARTING,
        Ended: ProcessState.RUNNING,
        PauseOver: ProcessState.WAITING,
    }
)


class RestartManager:
    """Of one process that is to be kept running. It begins STARTING: whoever adds a process has it launched first, and
    hears of a failure himself.

    Raises `IllegalTransition` for events that only a bug can bring.
    """

    def __init__(self, name: str, log_path: str) -> None:
        """`log_path`: where the user is told to look."""
        self.state = ProcessState.STARTING
        self.given_up = ""
        """Why it is not started again; "" where it is."""
        self._name = name
        self._log_path = log_path
        self._history = RestartHistory()

    def handle(self, event: ProcessEvent, now_s: float) -> tuple[ProcessInstruction, ...]:
        """What is to be done about `event`, in order; at most the last one waits for something."""
        if isinstance(event, StopAsked):
            self.state = ProcessState.STOPPING
            return ()
        if self.state is ProcessState.STOPPING:
            return (Kill(),) if isinstance(event, Started) else ()
        if self.state is not EXPECTED_IN[type(event)]:
            raise IllegalTransition(f"{self._name} is {self.state.value}: {event}; this is a bug of the supervisor")
        return tuple(self._handle(event, now_s))

    @property
    def is_stopping(self) -> bool:
        """Whether its end was asked for."""
        return self.state is ProcessState.STOPPING

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        if not self.is_stopping:
            assert bool(self.given_up) == (self.state is ProcessState.GIVEN_UP), "it is given up for a reason"
        assert len(self._history.restarts_s) <= MAX_RESTARTS_IN_WINDOW, "restarts are bounded"

    def _handle(self, event: ProcessEvent, now_s: float) -> Iterator[ProcessInstruction]:
        match event:
            case Started():
                self.state = ProcessState.RUNNING
                yield AwaitEnd()
            case PauseOver():
                self.state = ProcessState.STARTING
                yield Launch()
            case Ended(ExitStatus.DRAINED):
                self.state = ProcessState.DRAINED
                yield Say(f"{self._name} was drained and has ended; it is not started again")
                yield Forget()
            case Ended(status) if status in ASKED_TO_END:
                # No failure, so neither a pause nor a step towards being given up.
                self.state = ProcessState.WAITING
                yield Say(f"{self._name} ended, {ASKED_TO_END[status]}; starting it again")
                yield Pause(0.0)
            case Ended(ExitStatus.SUPERSEDED):
                other = "another process of the mesh has taken its name"
                yield from self._give_up(other, f"has ended: {other}")
            case Ended(status, reason):
                why = f"status {status}: {reason}" if reason else f"status {status}"
                if status == ExitStatus.WRONG_SETTINGS and not self._history.restarts_s:
                    wrong = f"cannot run with its settings ({why})"
                    yield from self._give_up(f"it {wrong}", f"{wrong} and is given up")
                else:
                    yield from self._try_again(why, now_s)
            case NotStarted(reason):
                yield from self._try_again(f"it cannot be started: {reason}", now_s)

    def _try_again(self, why: str, now_s: float) -> Iterator[ProcessInstruction]:
        delay_s = self._history.next_delay_s(now_s)
        if delay_s is None:
            yield from self._give_up(f"it kept ending ({why})", f"keeps ending ({why}) and is given up")
            return
        self.state = ProcessState.WAITING
        yield Say(f"{self._name} ended ({why}); starting it again in {delay_s:g} s")
        yield Pause(delay_s)

    def _give_up(self, why: str, said: str) -> Iterator[ProcessInstruction]:
        self.state = ProcessState.GIVEN_UP
        self.given_up = f"{why}; see {self._log_path}"
        yield Say(f"{self._name} {said}; see {self._log_path}")
        yield GiveUp()
