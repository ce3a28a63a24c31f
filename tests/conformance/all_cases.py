"""Every case, in the order in which they are asked."""

from tests.conformance.adapter_cases import CASES as ADAPTER_CASES
from tests.conformance.case import Case
from tests.conformance.chat_cases import CASES as CHAT_CASES
from tests.conformance.completion_cases import CASES as COMPLETION_CASES
from tests.conformance.decision_cases import CASES as DECISION_CASES
from tests.conformance.image_cases import CASES as IMAGE_CASES
from tests.conformance.messages_cases import CASES as MESSAGES_CASES
from tests.conformance.other_cases import RESPONSES_CASES, SERVER_CASES, TOKENIZER_CASES
from tests.conformance.pooling_cases import CASES as POOLING_CASES
from tests.conformance.reasoning_cases import CASES as REASONING_CASES
from tests.conformance.rendering_cases import CASES as RENDERING_CASES
from tests.conformance.tokenizer_cases import CASES as TOKENIZER_FORMAT_CASES

CASES: list[Case] = [
    *CHAT_CASES,
    *COMPLETION_CASES,
    *RESPONSES_CASES,
    *MESSAGES_CASES,
    *TOKENIZER_CASES,
    *SERVER_CASES,
    *REASONING_CASES,
    *RENDERING_CASES,
    *TOKENIZER_FORMAT_CASES,
    *ADAPTER_CASES,
    *IMAGE_CASES,
    *DECISION_CASES,
    *POOLING_CASES,
]
