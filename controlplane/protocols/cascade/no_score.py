"""How a cascade router that is well says that no judge gave a score."""

from typing import Final

NO_SCORE: Final = ("penstock-no-score", "1")
"""In the trailing metadata of its UNAVAILABLE: another router would ask the same judges. Without it the router itself
cannot be reached, and another one may be."""
