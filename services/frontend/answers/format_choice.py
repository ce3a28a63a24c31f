"""Which form an answer takes: that of the endpoint it was asked for at."""

from services.frontend.answers.chat_format import ChatFormat
from services.frontend.answers.completion_format import CompletionFormat
from services.frontend.answers.formats import AnswerFormat, AnswerHeader
from services.frontend.requests.plan import GenerationPlan
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest


def answer_format(
    request: ChatCompletionRequest | CompletionRequest, header: AnswerHeader, plan: GenerationPlan
) -> AnswerFormat:
    """For the answers to `request`, which `plan` was made from."""
    choices = len(plan.prompts) * plan.n
    if isinstance(request, ChatCompletionRequest):
        return ChatFormat(header, choices)
    return CompletionFormat(header, [plan.prompts[choice // plan.n].echo for choice in range(choices)])
