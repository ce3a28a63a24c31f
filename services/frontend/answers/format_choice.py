"""Which form an answer takes: that of the endpoint it was asked for at."""

from services.frontend.answers.chat_format import ChatFormat
from services.frontend.answers.completion_format import CompletionFormat
from services.frontend.answers.format import AnswerFormat, AnswerHeader
from services.frontend.api.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.plan import GenerationPlan


def answer_format(
    request: ChatCompletionRequest | CompletionRequest, header: AnswerHeader, plan: GenerationPlan
) -> AnswerFormat:
    """For the answers to `request`, which `plan` was made from."""
    choices = len(plan.prompts) * plan.n
    if isinstance(request, ChatCompletionRequest):
        return ChatFormat(header, choices)
    return CompletionFormat(header, [plan.prompts[choice // plan.n].echo for choice in range(choices)])
