"""What serving a request to a cascade needs."""

from dataclasses import dataclass

from services.frontend.cascade.cascades import Cascades
from services.frontend.cascade.judging import JudgeClient
from services.frontend.requests.service import FrontendService


@dataclass(frozen=True, slots=True)
class CascadeService:
    """The parts that only cascades use, beside those of every request."""

    frontend: FrontendService
    cascades: Cascades
    judging: JudgeClient
