"""What each client library is made to do against an endpoint. Runs in the clients' own environment, so it imports
nothing of the mesh: `python checks.py CLIENT URL MODEL [EMBEDDING_MODEL]` prints a JSON object for each check."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASKED = [{"role": "user", "content": "Add 4991 and 6299."}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {**SCHEMA, "title": "add"}},
}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Target:
    """The endpoint."""

    url: str
    model: str
    embedding_model: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


Check = Callable[[Target], None]
CHECKS: dict[str, list[tuple[str, Check]]] = {}


def check(client: str, what: str) -> Callable[[Check], Check]:
    """Register a check; it raises where the client does not get what it wants."""

    def register(function: Check) -> Check:
        CHECKS.setdefault(client, []).append((what, function))
        return function

    return register


def needs(condition: Any, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# ---- openai


def _openai(target: Target) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=target.v1, api_key="none", max_retries=0, timeout=TIMEOUT_S)


@check("openai", "models")
def _(target: Target) -> None:
    needs(target.model in [each.id for each in _openai(target).models.list()], "the model is not listed")


@check("openai", "chat")
def _(target: Target) -> None:
    answer = _openai(target).chat.completions.create(model=target.model, messages=ASKED, max_tokens=8)
    needs(answer.choices[0].message.content, "no text")
    needs(answer.usage.completion_tokens <= 8, "too many tokens")


@check("openai", "chat, streamed")
def _(target: Target) -> None:
    chunks = list(
        _openai(target).chat.completions.create(
            model=target.model, messages=ASKED, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    needs(chunks[-1].usage.total_tokens > 0, "no usage in the last chunk")
    needs([each for chunk in chunks for each in chunk.choices if each.finish_reason], "no finish reason")


@check("openai", "completion, logprobs")
def _(target: Target) -> None:
    answer = _openai(target).completions.create(model=target.model, prompt="Count from 7", max_tokens=4, logprobs=2)
    needs(len(answer.choices[0].logprobs.tokens) > 0, "no logprobs")


@check("openai", "JSON schema")
def _(target: Target) -> None:
    answer = _openai(target).chat.completions.create(
        model=target.model,
        messages=ASKED,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}},
    )
    needs("sum" in json.loads(answer.choices[0].message.content), "the answer is another object")


@check("openai", "tools")
def _(target: Target) -> None:
    answer = _openai(target).chat.completions.create(
        model=target.model, messages=ASKED, tools=[TOOL], tool_choice="required", max_tokens=512
    )
    (call, *_rest) = answer.choices[0].message.tool_calls
    needs(call.function.name == "add", "another tool is called")
    needs("sum" in json.loads(call.function.arguments), "the arguments do not fit")


@check("openai", "tools, if the model likes")
def _(target: Target) -> None:
    stream = _openai(target).chat.completions.create(
        model=target.model, messages=ASKED, tools=[TOOL], max_tokens=16, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    needs(any(delta.content or delta.tool_calls for delta in deltas), "neither text nor a call")


@check("openai", "embeddings")
def _(target: Target) -> None:
    answer = _openai(target).embeddings.create(model=target.embedding_model, input=["a", "b c"])
    needs(len(answer.data) == 2 and answer.data[0].embedding, "no vectors")


@check("openai", "responses")
def _(target: Target) -> None:
    client = _openai(target)
    first = client.responses.create(model=target.model, input="Add 4991 and 6299.", max_output_tokens=8)
    needs(first.output_text, "no text")
    second = client.responses.create(
        model=target.model, input="Again.", previous_response_id=first.id, max_output_tokens=8
    )
    needs(second.usage.input_tokens > first.usage.input_tokens, "the first answer was forgotten")


@check("openai", "responses, streamed")
def _(target: Target) -> None:
    stream = _openai(target).responses.create(model=target.model, input="Count.", max_output_tokens=8, stream=True)
    kinds = [event.type for event in stream]
    needs(kinds[0] == "response.created" and "response.output_text.delta" in kinds, f"events are {kinds}")
    needs(kinds[-1] in ("response.completed", "response.incomplete"), f"the last event is {kinds[-1]}")


@check("openai", "responses, in the background")
def _(target: Target) -> None:
    responses = _openai(target).responses
    made = responses.create(model=target.model, input="Count.", max_output_tokens=8, background=True)
    needs(made.status == "queued" and not made.output, f"it begins as {made.status}")
    while made.status in ("queued", "in_progress"):
        time.sleep(0.1)
        made = responses.retrieve(made.id)
    needs(made.output_text, f"it ends as {made.status}")
    long = responses.create(model=target.model, input="Count.", max_output_tokens=3000, background=True)
    needs(responses.cancel(long.id).status in ("cancelled", "completed"), "it cannot be cancelled")


@check("openai", "responses, a stream in the background")
def _(target: Target) -> None:
    responses, asked = _openai(target).responses, {"model": target.model, "input": "Count.", "max_output_tokens": 8}
    with responses.create(**asked, background=True, stream=True) as stream:
        seen = [next(stream) for _ in range(4)]  # the client goes, and comes back
    seen += responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    numbers = [event.sequence_number for event in seen]
    needs(numbers == list(range(len(seen))), f"the events have the numbers {numbers}")
    needs(seen[-1].type in ("response.completed", "response.incomplete"), f"the last event is {seen[-1].type}")


# ---- langchain


def _langchain(target: Target, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=target.model,
        base_url=target.v1,
        api_key="none",
        max_tokens=64,
        max_retries=0,
        timeout=TIMEOUT_S,
        **options,
    )


@check("langchain-openai", "invoke")
def _(target: Target) -> None:
    needs(_langchain(target).invoke("Add 4991 and 6299.").content, "no text")


@check("langchain-openai", "stream")
def _(target: Target) -> None:
    needs("".join(str(chunk.content) for chunk in _langchain(target).stream("Add 4991 and 6299.")), "no text")


@check("langchain-openai", "structured output")
def _(target: Target) -> None:
    schema = {"title": "sum", "description": "A sum.", **SCHEMA}
    answer = _langchain(target).with_structured_output(schema, method="json_schema").invoke("Add 4 and 6.")
    needs("sum" in answer, "the answer is another object")


@check("langchain-openai", "tools")
def _(target: Target) -> None:
    answer = _langchain(target).bind_tools([TOOL], tool_choice="add").invoke("Add 4 and 6.")
    needs(answer.tool_calls[0]["name"] == "add", "no call")


@check("langchain-openai", "embeddings")
def _(target: Target) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model=target.embedding_model, base_url=target.v1, api_key="none", check_embedding_ctx_length=False
    )
    needs(len(embeddings.embed_documents(["a", "b"])) == 2, "no vectors")


# ---- litellm


def _litellm(target: Target, **options: Any) -> Any:
    import litellm

    return litellm.completion(
        model=f"hosted_vllm/{target.model}",
        api_base=target.v1,
        api_key="none",
        messages=ASKED,
        timeout=TIMEOUT_S,
        **options,
    )


@check("litellm", "chat")
def _(target: Target) -> None:
    needs(_litellm(target, max_tokens=8).choices[0].message.content, "no text")


@check("litellm", "chat, streamed")
def _(target: Target) -> None:
    chunks = list(_litellm(target, max_tokens=8, stream=True))
    needs(any(chunk.choices[0].delta.content for chunk in chunks if chunk.choices), "no text")


@check("litellm", "tools")
def _(target: Target) -> None:
    answer = _litellm(target, max_tokens=512, tools=[TOOL], tool_choice="required")
    needs(answer.choices[0].message.tool_calls[0].function.name == "add", "no call")


@check("litellm", "embeddings")
def _(target: Target) -> None:
    import litellm

    answer = litellm.embedding(
        model=f"hosted_vllm/{target.embedding_model}", api_base=target.v1, api_key="none", input=["a", "b"]
    )
    needs(len(answer.data) == 2, "no vectors")


@check("litellm", "rerank")
def _(target: Target) -> None:
    import litellm

    answer = litellm.rerank(
        model=f"hosted_vllm/{target.embedding_model}",
        api_base=target.url,
        api_key="none",
        query="a b",
        documents=["c", "a b"],
    )
    needs(answer.results[0]["index"] == 1, "the other document comes first")


# ---- instructor, pydantic-ai


@check("instructor", "structured answer")
def _(target: Target) -> None:
    import instructor
    from pydantic import BaseModel, Field

    class Sum(BaseModel):
        sum: int = Field(ge=0, le=999)

    client = instructor.from_openai(_openai(target), mode=instructor.Mode.JSON_SCHEMA)
    answer = client.chat.completions.create(
        model=target.model, messages=ASKED, response_model=Sum, max_tokens=64, max_retries=0
    )
    needs(0 <= answer.sum <= 999, "out of bounds")


@check("instructor", "by a tool")
def _(target: Target) -> None:
    import instructor
    from pydantic import BaseModel, Field

    class Sum(BaseModel):
        sum: int = Field(ge=0, le=999)

    client = instructor.from_openai(_openai(target), mode=instructor.Mode.TOOLS)
    answer = client.chat.completions.create(
        model=target.model, messages=ASKED, response_model=Sum, max_tokens=512, max_retries=0
    )
    needs(0 <= answer.sum <= 999, "out of bounds")


def _agent(target: Target, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(target.model, provider=OpenAIProvider(base_url=target.v1, api_key="none"))
    return Agent(model, model_settings={"max_tokens": 512, "timeout": TIMEOUT_S}, retries=0, **options)


@check("pydantic-ai", "text")
def _(target: Target) -> None:
    needs(_agent(target).run_sync("Add 4991 and 6299.").output, "no text")


@check("pydantic-ai", "structured answer")
def _(target: Target) -> None:
    from pydantic import BaseModel, Field
    from pydantic_ai import NativeOutput

    class Sum(BaseModel):
        sum: int = Field(ge=0, le=999)

    answer = _agent(target, output_type=NativeOutput(Sum)).run_sync("Add 4 and 6.").output
    needs(0 <= answer.sum <= 999, "out of bounds")


# ---- anthropic


def _anthropic(target: Target) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=target.url, api_key="none", max_retries=0, timeout=TIMEOUT_S)


@check("anthropic", "messages")
def _(target: Target) -> None:
    answer = _anthropic(target).messages.create(model=target.model, max_tokens=8, messages=ASKED, system="Add.")
    needs(answer.content[0].text, "no text")
    needs(answer.stop_reason in ("end_turn", "max_tokens"), f"stop reason {answer.stop_reason}")


@check("anthropic", "messages, streamed")
def _(target: Target) -> None:
    with _anthropic(target).messages.stream(model=target.model, max_tokens=8, messages=ASKED) as stream:
        needs("".join(stream.text_stream), "no text")
        needs(stream.get_final_message().usage.output_tokens > 0, "no usage")


@check("anthropic", "tools")
def _(target: Target) -> None:
    answer = _anthropic(target).messages.create(
        model=target.model,
        max_tokens=512,
        messages=ASKED,
        tools=[{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
    )
    (call, *_rest) = [block for block in answer.content if block.type == "tool_use"]
    needs("sum" in call.input, "the arguments do not fit")


@check("anthropic", "counting tokens")
def _(target: Target) -> None:
    needs(_anthropic(target).messages.count_tokens(model=target.model, messages=ASKED).input_tokens > 0, "no tokens")


# ---- load generators and evaluations


def _run(*command: str, timeout_s: float = 300.0, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **environment}
    )
    needs(done.returncode == 0, f"exit status {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout + done.stderr


@check("guidellm", "benchmark")
def _(target: Target) -> None:
    tokenizer = os.environ["CLIENTS_TOKENIZER"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "benchmark.json"
        _run(
            str(Path(sys.executable).parent / "guidellm"),
            *("run", "--backend", f"kind=openai_http,target={target.url},model={target.model}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={output}", "--disable-console"),
            HF_HUB_OFFLINE="1",
        )
        report = json.loads(output.read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    needs(totals["successful"] >= 3 and not totals["errored"], f"requests: {totals}")


def _lm_eval(target: Target, task: dict[str, Any], kind: str, endpoint: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        data.write_text(
            "".join(json.dumps({"question": f"Add {n} and 1.", "answer": f" {n + 1}"}) + "\n" for n in range(3))
        )
        task = {
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **task,
        }
        (Path(folder) / "tiny.yaml").write_text(json.dumps(task))
        tokenizer = os.environ["CLIENTS_TOKENIZER"]
        arguments = f"model={target.model},base_url={target.v1}/{endpoint},tokenizer={tokenizer},num_concurrent=1"
        text = _run(
            str(Path(sys.executable).parent / "lm_eval"),
            *("--model", kind, "--model_args", arguments, "--tasks", "tiny", "--include_path", folder),
            HF_HUB_OFFLINE="1",
            HF_DATASETS_CACHE=folder,
        )
    needs("tiny" in text, f"no results: {text[-400:]}")


@check("lm-eval", "generation")
def _(target: Target) -> None:
    task = {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    _lm_eval(target, task, "local-completions", "completions")


@check("lm-eval", "log-likelihood")
def _(target: Target) -> None:
    task = {
        "output_type": "multiple_choice",
        "doc_to_choice": ["{{answer}}", " 0"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    _lm_eval(target, task, "local-completions", "completions")


@check("vllm bench serve", "benchmark")
def _(target: Target) -> None:
    tokenizer = os.environ["CLIENTS_TOKENIZER"]
    # The `vllm` command of the CPU build imports what its wheel does not need otherwise; this is what it calls.
    command = (
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
    )
    text = _run(
        *(sys.executable, "-c", command, "--backend", "openai", "--base-url", target.url, "--model", target.model),
        *("--tokenizer", tokenizer, "--dataset-name", "random", "--num-prompts", "4"),
        *("--random-input-len", "32", "--random-output-len", "8", "--endpoint", "/v1/completions"),
        HF_HUB_OFFLINE="1",
    )
    counts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in text.splitlines() if ":" in line}
    needs(counts.get("Successful requests") == "4", text[-600:])


def main() -> None:
    client, url, model, *rest = sys.argv[1:]
    target = Target(url, model, rest[0] if rest else "")
    for what, function in CHECKS[client]:
        started_s = time.monotonic()
        try:
            function(target)
            why = ""
        except Exception as error:  # noqa: BLE001  whatever a client raises is the result
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        took_s = round(time.monotonic() - started_s, 1)
        print(json.dumps({"client": client, "check": what, "failure": why, "seconds": took_s}), flush=True)


if __name__ == "__main__":
    main()
