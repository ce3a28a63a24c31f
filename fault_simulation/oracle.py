"""What a request must be answered, whatever happens to the mesh.

The simulated engine's tokens are a function of prompt, position and seed (`simulator.instance.script`), so the answer
is known before the request is sent: the frontend's own parser, tokenizer and detokenizer, with nothing in between.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from controlplane.model.request import FinishReason
from controlplane.protocols.cascade.confidence import RunningConfidence
from engine_worker import wire
from engine_worker.engine_choice import simulated_settings
from engine_worker.settings import WorkerSettings
from engine_worker.vocabulary import read_vocabulary
from mesh.runtime import Arguments, Result, ThreadPool
from penstock.v1 import request_pb2
from services.frontend.answers.choice import ChoiceText, choice_text
from services.frontend.http.body import decode_body
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import Prompt, plan_request
from services.frontend.requests.schema import ChatCompletionRequest, CompletionRequest
from services.frontend.text.model_text import ModelText
from services.frontend.workers.token_mailbox import Piece
from simulator.instance.config import InstanceConfig
from simulator.instance.script import Script

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

_FINISHES = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """One choice of an answer."""

    text: str
    finish: str
    tokens: int
    confidence: float = 100.0
    """The score that the judge `confidence` gives it, where it has log-probabilities."""
    spelled: tuple[str, ...] = ()
    """Where logprobs are asked for: the text of each token that has some."""


class Oracle:
    """Knows the answers of one model, as served by instances of one configuration."""

    def __init__(self, name: str, model_path: Path, config: InstanceConfig) -> None:
        """`config`: of its instances, but for the vocabulary, which is that of the model."""
        self.name = name
        vocabulary = read_vocabulary(model_path)
        assert vocabulary is not None, f"{model_path} has no tokenizer"
        self._output = replace(
            config.output,
            vocabulary_tokens=vocabulary.size_tokens,
            first_token_id=vocabulary.first_token_id,
            last_token_id=vocabulary.last_token_id,
            eos_token_id=vocabulary.eos_token_id,
            byte_token_ids=vocabulary.byte_token_ids,
            word_token_ids=vocabulary.word_token_ids,
        )
        text = ModelText.load(model_path, lambda: 0.0)
        self._model = ServedModel(name, text, config.block_tokens, config.max_model_len_tokens, 0)

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """Of the workers that are told so, engine options included."""
        config = simulated_settings(settings).instance
        made = cls(settings.model, Path(settings.model_path), config)
        made._output = config.output
        return made

    def answer(self, path: str, body: Mapping[str, Any], adapter_digest: str = "") -> tuple[ExpectedChoice, ...]:
        """Its choices, in order; under a LoRA adapter, if one is given."""
        kind = ChatCompletionRequest if path == CHAT_PATH else CompletionRequest
        request = decode_body(msgspec.json.encode(body), kind)
        assert isinstance(request, (ChatCompletionRequest, CompletionRequest))
        plan = _run(plan_request(request, "expected", self._model, 128, _InPlace()))
        choices = []
        for index in range(len(plan.prompts) * plan.n):
            prompt = plan.prompts[index // plan.n]
            script = self._script(prompt.token_ids, plan.sampling_of(index), adapter_digest)
            text = choice_text(request, plan, index)
            choices.append(self._spell(script, text, prompt))
        return tuple(choices)

    def _script(self, prompt_token_ids: list[int], sampling: request_pb2.SamplingParams, adapter_digest: str) -> Script:
        message = request_pb2.GenerateRequest(request_id="expected", sampling=sampling)
        params = wire.engine_request(message).sampling
        prompt = np.array(prompt_token_ids, np.uint32)
        return Script(prompt, (), params, self._model.max_model_len_tokens, self._output, adapter_digest=adapter_digest)

    def _spell(self, script: Script, text: ChoiceText, prompt: Prompt) -> ExpectedChoice:
        token_ids, has_logprobs = script.token_ids(0, script.total_tokens), prompt.sampling.HasField("logprobs")
        shown, tokens, confidence = [prompt.echo], [], RunningConfidence()
        for position, token_id in enumerate(token_ids):
            is_last = position == len(token_ids) - 1
            reason = _FINISHES[script.finish_reason] if is_last else request_pb2.FINISH_REASON_UNSPECIFIED
            logprobs = (_logprobs(script, position),) if has_logprobs else ()
            piece = text.push(Piece(0, [token_id], logprobs, reason, None))
            if piece is not None:
                shown.append(piece.text)
                for decided in piece.positions:
                    confidence.add(decided.logprobs.chosen.logprob)
                    tokens.append(self._model.text.token_text(decided.logprobs.chosen.token_id)[0])
        assert text.finish is not None, "an answer that was pushed to its end has one"
        confidence.end()
        return ExpectedChoice("".join(shown), text.finish, text.tokens, confidence.score, tuple(tokens))


def _logprobs(script: Script, position: int) -> request_pb2.PositionLogprobs:
    chosen = script.logprobs(position).chosen
    return request_pb2.PositionLogprobs(
        chosen=request_pb2.TokenLogprob(token_id=chosen.token_id, logprob=chosen.logprob)
    )


def _run(work: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("planning a request waits for threads only, and here there are none to wait for")


class _InPlace:
    """Threads that are none."""

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        return function(*args, **kwargs)

    def pool(self, threads: int, name: str) -> ThreadPool:
        raise NotImplementedError
