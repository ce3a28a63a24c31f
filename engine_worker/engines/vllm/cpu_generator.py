"""Random generators of seeded requests on a CPU."""

import torch


class CpuGenerator(torch.Generator):
    """Takes the rewinding that vLLM asks for, which torch's generator has on GPUs only.

    When the prompt of a seeded request is computed in chunks, vLLM 0.32 draws a token after each, throws it away and
    rewinds the generator by an offset. On a CPU that raises ("CPU Generator does not use offset") and ends the engine
    with all its requests. Here the draw stays drawn: such a request is as random as before, but draws other tokens
    than one whose prompt was computed at once.
    """

    def get_offset(self) -> int:
        """Always 0: torch's CPU generators have no offset, and vLLM asks for one."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Ignored, for the same reason."""


def use_cpu_generators() -> None:
    """For all generators that this process makes from now on."""
    torch.Generator = CpuGenerator
