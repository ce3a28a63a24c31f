"""What a request asks of its cascade."""

from dataclasses import replace

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.terms import CascadeTerms, WithoutJudge, thresholds_for
from mesh.errors import ConfigurationError
from services.frontend.cascade.latency_estimates import TierLatencyEstimates
from services.frontend.errors import bad_request, unavailable
from services.frontend.requests.schema import CascadeHints, ChatCompletionRequest, CompletionRequest
from services.frontend.requests.unsupported import PROMPT_TOKENS

_OF_ONE_MODEL = (
    *("return_token_ids", "prompt_logprobs", "allowed_token_ids", "logprob_token_ids", "use_beam_search"),
    "thinking_token_budget",
)
"""Parameters in or about token ids, which tiers do not share, about a prompt, which each tier reads by itself, and
about reasoning, which not every tier does."""


def terms_in_force(record: CascadeRecord) -> CascadeTerms:
    """What holds for a request without hints, from the record in the state store."""
    unknown_s = (0.0,) * len(record.tiers)
    return CascadeTerms(
        record.thresholds, unknown_s, without_judge=WithoutJudge(record.without_judge), speculate_from=record.speculate
    )


def terms_of(
    request: ChatCompletionRequest | CompletionRequest,
    record: CascadeRecord,
    latencies: TierLatencyEstimates,
    arrived_s: float,
) -> CascadeTerms:
    """Raises ApiError (400) for hints that this cascade cannot follow, and for several answers."""
    hints = request.penstock or CascadeHints()
    if (request.n or 1) > 1 or (isinstance(request, CompletionRequest) and _prompts(request) > 1):
        raise bad_request(f"`{record.name}` is a cascade, which gives one answer to one prompt.", "n")
    for name in _OF_ONE_MODEL:
        if getattr(request, name, None) not in (None, False):
            raise bad_request(f"`{record.name}` is a cascade of models: `{name}` can only be asked of one.", name)
    if (request.kv_transfer_params or {}).get(PROMPT_TOKENS) is not None:
        param = f"kv_transfer_params.{PROMPT_TOKENS}"
        raise bad_request(f"`{record.name}` is a cascade of models: `{param}` can only be asked of one.", param)
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request(f"`{record.name}` is a cascade of models: logprobs of its prompts are not known.", "echo")
    max_tier = None
    if hints.max_tier is not None:
        if hints.max_tier not in record.tiers:
            raise bad_request(
                f"`{hints.max_tier}` is no tier of `{record.name}`; its tiers are {', '.join(record.tiers)}.",
                "penstock.max_tier",
            )
        max_tier = record.tiers.index(hints.max_tier)
    try:
        terms = replace(
            terms_in_force(record),
            thresholds=thresholds_for(record.thresholds, hints.quality),
            deadline_s=None if hints.latency_s is None else arrived_s + hints.latency_s,
            max_tier=max_tier,
            # What was learnt of answers is learnt under the record's thresholds.
            speculate_from=record.speculate if hints.quality is None else 0.0,
        )
        return replace(terms, expected_s=latencies.expected_s(record, terms, arrived_s))
    except ConfigurationError as error:
        raise unavailable(f"The cascade `{record.name}` cannot be served: {error}.") from error


def _prompts(request: CompletionRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt) else 1
