"""Arrow's evaluation (sections 7.2 to 7.4) on modelled instances."""

from simulator.reproductions.arrow.reproduction import reproduce

__all__ = ["reproduce"]
