"""What the mesh answers otherwise than a stock server on purpose."""

import re
from dataclasses import dataclass

from tests.conformance.case import Case
from tests.conformance.compare import Difference


@dataclass(frozen=True)
class Deliberate:
    """A difference that stays, with the reason that people read."""

    what: str
    reason: str
    where: tuple[tuple[str, str], ...]
    """Pairs: what matches the names of cases, and what the places in them, with or without what stands there
    (`body.done: True | False`)."""

    def explains(self, case: Case, difference: Difference) -> bool:
        """Whether `difference` is of this kind."""
        told = f"{difference.kind}: {difference.stock} | {difference.mesh}"
        return any(
            re.fullmatch(cases, case.name) and re.fullmatch(rf"(?:{places})(?:: .*)?", told, re.DOTALL)
            for cases, places in self.where
        )


DELIBERATE = (
    Deliberate(
        "`type` and `code` of errors",
        "are OpenAI's words (`invalid_request_error`, `context_length_exceeded`), by which its clients go; vLLM says "
        "the status again. Errors of unknown paths have that form, too, and those of Messages Anthropic's. Media that "
        "cannot be had are the client's fault (400; vLLM says 500 or 501, or waits)",
        (
            (r".*", r"body\.error\.(type|code)"),
            (r"messages: .*", r"body\.type"),
            (r"chat: GET|server: GET /nowhere|tokenizer: GET /tokenizer_info", r"body\.(detail|error)"),
            (r"chat: images, (no kind|a file|a host that is away)", r"status: (500 .*|501 .*|0) \| 400 .*"),
        ),
    ),
    Deliberate(
        "`param` of errors",
        "names what is wrong as the client wrote it (`messages[0].role`); vLLM gives null or a path of its own classes",
        ((r".*", r"body\.error\.param"),),
    ),
    Deliberate(
        "what is taken",
        "several answers of a greedy request, `max_tokens: 0` (the prompt is computed), beams as a stream, a message "
        "without a model where there is one, a body of another content type, arguments of an earlier call as an object "
        "or not at all: clients of OpenAI's send them. In /invocations the `model`, in whose place vLLM takes the one "
        "that it was started with, more than 20 labels of an item, and decisions of every kind of model that has a "
        "token for each label (vLLM: 501). Of pooling models texts beside tokens, several chats, documents in other "
        "servers' forms, and all that a model can do",
        (
            (
                r"(chat|completions): n(, streamed| and prompts| of greedy)?|completions: beam search, streamed|"
                r"completions: max_tokens 0|messages: model missing|chat: a text's content type|"
                r"chat: an earlier call, (of an object|without arguments|with null)",
                r"status: 400 .* \| 200",
            ),
            (r"scores: generative, many labels|chat: images, a flat url", r"status: 400 .* \| 200"),
            (r"decisions: another kind of model", r"status: 501 .* \| 200"),
            (r"server: adapters, invocations", r"body\.(model|choices\[\]\.message\.content)"),
            (
                r"(embeddings|pooling): (texts and tokens|encoding_format null)|(pooling|classes): several chats|"
                r"pooling: of .*, task .*|pooling: task .*|scores: .*, (parts|documents of (texts|parts))",
                r"status: 400 .* \| 200",
            ),
            (r"completions: max_tokens 0, .*", r"body\.usage\.(total|completion)_tokens"),
        ),
    ),
    Deliberate(
        "what is told besides",
        "tokens of the prefix cache under beams, of batches, of scores and at a message's start, `store`, `error` and "
        "`stop_sequence`, which are OpenAI's and Anthropic's own, facts of a model under `penstock`, an adapter's "
        "`max_model_len`, that an answer in words is a text, and in logprobs "
        "the bytes of every token: vLLM has none of a part of a character, and of rivals named by id those of the name",
        (
            (
                r"chat: (logprob_token_ids( by id|, 128)|images, .*|(tekken|tiktoken), logprobs)",
                r"body\.choices\[\]\.logprobs\.content\[\](\.top_logprobs\[\])?\.(bytes.*|token:  \| \ufffd)|"
                r"body\.prompt_logprobs\[\]\.\d+\.decoded_token:  \| \ufffd",
            ),
            (
                r"(chat|completions): .*beam search.*|server: .*batch of chats.*|scores: generative, .*",
                r".*\.prompt_tokens_details.*",
            ),
            (r"responses: .*", r"body(\.events\.response\..*\.response)?\.(store|error)"),
            (r"messages: .*", r"body\.stop_sequence|body\.events\.message_start\..*cache_(creation|read)_input_tokens"),
            (r"server: GET /v1/models/?(, .*)?", r"body\.data\[\]\.penstock"),
            (r"server: GET /v1/models, .* adapters?", r"body\.data\[\]\.max_model_len"),
            (r"server: adapters, .*", r"content_type"),
        ),
    ),
    Deliberate(
        "paths",
        "are the same whatever a model does: one that it cannot serve says so (400; vLLM has no such path, 404). "
        "`/v1/models/MODEL` answers, and `/health` has a body. Those of vLLM's own scale-out, which a stock server "
        "refuses, too (403), are unknown: the mesh scales out",
        (
            (r"server: GET /v1/models/(demo-large|poet, .*)", r"status: 404 \| 200"),
            (r"server: render .*|server: adapters, a prompt", r"status: 403 .* \| 404 .*"),
            (
                r"server: (embeddings|score) of a model that generates|embeddings: adapters, a vector",
                r"status: 404 \| 400 .*",
            ),
            (
                r"pooling: (a chat's answer|a completion)|classes: (of a model without|vectors of none)|"
                r"scores: (of a model with several classes|generative, a pooling model)",
                r"status: 404 \| 400 .*",
            ),
            (r"server: (GET|POST) /(health|ping)", r"body|content_type"),
        ),
    ),
    Deliberate(
        "a call that `tool_choice` makes sure of",
        "is nothing but JSON that fits the tool's schema; vLLM 0.32 leaves its form to the model's parser, and loses "
        "calls or writes arguments that fit nothing",
        (
            (
                r"(chat|responses|messages): (tools (required|named|any|strict|and response_format).*|"
                r"tools (of a namespace, named|custom, (named|required)).*|"
                r"no place for tools, (required|named|any|one).*)",
                r"body\.(choices|output|content|usage|events|order|stop_reason|status|incomplete_details).*",
            ),
        ),
    ),
    Deliberate(
        "a response's prompt",
        "begins once: vLLM 0.32 puts the token that begins a sequence before a chat template that has it already. "
        "Calls in its input are told to the template as those of a chat, arguments first",
        (
            (
                r"responses: (of a tokenizer that marks|(reasoning|written by vLLM|no place for tools|adapters), .*|"
                r"images, .*)",
                r".*\.usage\.(input|total)_tokens|body\.input_messages\[\].*",
            ),
            (
                r"responses: (input of (calls|a turn that .*|a call in .*|a custom call)|images, .*)",
                r".*(\.text|\.delta|\.output_tokens|\.total_tokens|\.status|\.incomplete_details)",
            ),
        ),
    ),
    Deliberate(
        "a response that is cut",
        "ends with OpenAI's `response.incomplete`, and its message is `incomplete`; vLLM says `completed`",
        (
            (
                r"responses: .*",
                r"body\.order\[\]: response\.completed \| response\.incomplete|"
                r"body\.events\.response\.(completed: .* \| absent|incomplete: absent \| .*)|"
                r"body\.(output\[\]|events\.response\.output_item\.done\.all\.item)\.status: completed \| incomplete",
            ),
        ),
    ),
    Deliberate(
        "names and versions",
        "are the mesh's: `owned_by`, `root` (a model's name, not a path on some machine), `/version`",
        ((r"server: GET /v.*", r"body\.(data\[\]\.(owned_by|root)|version)"),),
    ),
    Deliberate(
        "metrics",
        "have `member_id`, since one page has all instances and frontends; what vLLM's web framework counts "
        "(`http_*`), `penstock_frontend_requests` has by model, path and status. Not told: guesses of a GPU's work, "
        "sleep states, caches of images, rejections by the engine's own queue, what a connector was asked for, how "
        "often a single request was preempted, and how a parser fared",
        (
            (
                r"server: GET /metrics",
                r"body\.vllm:.*\.member_id: absent \| label|body\.vllm:cache_config_info\..*|body\.http_.*|"
                r"body\.vllm:(estimated_.*_per_gpu|engine_sleep_state|external_prefix_cache_(hits|queries)|"
                r"mm_cache_(hits|queries)|admission_rejections|request_num_preemptions|"
                r"tool_call_parser_invocations): .* \| absent",
            ),
        ),
    ),
)
MOST = 10
"""So few that people read them all."""


def explanation(case: Case, difference: Difference) -> Deliberate | None:
    """Why a difference is there on purpose; None: it is not."""
    return next((each for each in DELIBERATE if each.explains(case, difference)), None)
