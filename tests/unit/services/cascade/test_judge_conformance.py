"""Every judge of Penstock's own does what `penstock.testing` asks of one."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from demo.tasks import generate
from penstock.testing.judge import LOGPROBS, JudgeConformance
from services.cascade.judges.interface import JudgeContext, JudgedAnswer

pytestmark = pytest.mark.live

TASKS = generate(2, 1)


class TestConfidence(JudgeConformance):
    judge = "confidence"


class TestExact(JudgeConformance):
    judge = "exact"
    answers = tuple(JudgedAnswer(task.prompt, task.answer, "small", LOGPROBS) for task in TASKS)


async def _grade(request: Request) -> JSONResponse:
    top = [{"token": "7", "logprob": -0.1}, {"token": "8", "logprob": -3.0}]
    return JSONResponse({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})


class TestModel(JudgeConformance):
    judge = "model:large"

    def context(self) -> JudgeContext:
        app = Starlette(routes=[Route("/v1/chat/completions", _grade, methods=["POST"])])
        return JudgeContext(lambda: "http://frontend/v1", deadline_s=10.0, http=httpx.ASGITransport(app))


class TestEndpoint(TestModel):
    judge = "endpoint:big@http://elsewhere/v1"
