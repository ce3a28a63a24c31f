"""A validation case: a measured number beside the simulated one."""

import msgspec


class Case(msgspec.Struct, frozen=True):
    """`error` is simulated / measured - 1: negative where the simulator is too fast or too low."""

    name: str
    metric: str
    measured: float
    simulated: float
    error: float

    @staticmethod
    def of(name: str, metric: str, measured: float, simulated: float) -> "Case":
        """A measured and a simulated value with their relative error."""
        return Case(name, metric, measured, simulated, simulated / measured - 1)
