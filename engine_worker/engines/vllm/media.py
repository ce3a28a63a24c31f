"""Images, recordings and films for vLLM: read as its own server reads them, expanded by its own processor.

vLLM's server renders, processes and submits in one go. Here a prompt is expanded before it is known which instance
serves it, and what goes on elsewhere has emitted tokens behind its prompt. So the processor always gets the prompt as
it was rendered, and emitted tokens are put behind what comes out: a model that says a placeholder gets no image for it,
and a processor that adds something at the prompt's end (PaliGemma) does so once.

The processor's cache that is used is the one without a counterpart in the engine core (vLLM's own is for `/tokenize`):
that of vLLM's server relies on each prompt being submitted in the order in which it was processed.
Imports vLLM.
"""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from vllm.inputs import TokensPrompt, tokens_input
from vllm.multimodal.media import MediaConnector
from vllm.v1.engine.async_llm import AsyncLLM

from controlplane.model.media import MODALITIES, ExpandedPrompt, Media, MediaSpan, PromptMedia
from controlplane.model.media_facts import MediaFacts
from engine_worker.engines.media import other_tokens
from mesh.errors import RequestRefused


def media_facts(llm: AsyncLLM) -> dict[str, MediaFacts]:
    """What the model takes besides text; nothing where its prompts cannot be expanded before they are placed."""
    config, renderer = llm.vllm_config.model_config, llm.renderer
    if not config.is_multimodal_model or config.is_encoder_decoder or renderer.tokenizer is None:
        return {}
    from vllm.model_executor.model_loader import get_model_cls

    model = get_model_cls(config)
    limits = renderer.get_mm_processor().info.allowed_mm_limits
    return {name: MediaFacts(limits[name], _placeholder(model, name)) for name in MODALITIES if limits.get(name)}


def _placeholder(model: Any, modality: str) -> str:
    """As vLLM numbers them."""
    try:
        first, second = (model.get_placeholder_str(modality, number) for number in (1, 2))
    except ValueError:  # the model's word for: it has none
        return ""
    if first is None or first == second:
        return first or ""
    return str(first).replace("1", "{i}")


class MediaProcessor:
    """The processor of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._renderer = llm.renderer
        config = llm.vllm_config.model_config.multimodal_config
        self._connector = MediaConnector(media_io_kwargs=None if config is None else config.media_io_kwargs)

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """The prompt's tokens, and where they stand for a medium. Raises what vLLM and transformers raise."""
        engine_input = await self._process(media)
        hashes, places = engine_input["mm_hashes"], engine_input["mm_placeholders"]
        spans = [
            MediaSpan(media_hash, place.offset, place.length)
            for modality, ranges in places.items()
            for media_hash, place in zip(hashes[modality], ranges, strict=True)
        ]
        if sorted(span.media_hash for span in spans) != sorted(item.media_hash for item in media.items):
            raise RequestRefused("vLLM does not name these images, recordings or films as it was told to")
        return ExpandedPrompt(
            tuple(engine_input["prompt_token_ids"]), tuple(sorted(spans, key=lambda span: span.offset))
        )

    async def engine_input(self, media: PromptMedia, token_ids: Sequence[int], cache_salt: str) -> Any:
        """What vLLM takes of a request whose expanded prompt and emitted tokens are `token_ids`, or of a carrier of the
        first ones of them."""
        engine_input = dict(await self._process(media))
        del engine_input["arrival_time"]
        made = engine_input["prompt_token_ids"]
        if made[: len(token_ids)] != list(token_ids[: len(made)]):
            raise other_tokens(len(made), len(token_ids))
        engine_input["prompt_token_ids"] = list(token_ids)
        if cache_salt:
            engine_input["cache_salt"] = cache_salt
        for modality, places in engine_input["mm_placeholders"].items():
            # A carrier may end before an image, or within it; the hashes of its blocks need those that it reaches.
            reached = sum(place.offset < len(token_ids) for place in places)
            for name in ("mm_kwargs", "mm_hashes", "mm_placeholders"):
                engine_input[name] = {**engine_input[name], modality: engine_input[name][modality][:reached]}
        if not any(engine_input["mm_placeholders"].values()):
            return tokens_input(list(token_ids), cache_salt=cache_salt or None)
        return engine_input

    async def _process(self, media: PromptMedia) -> Any:
        read = await asyncio.gather(*(self._read(item) for item in media.items))
        data: dict[str, list[Any]] = {}
        uuids: dict[str, list[str | None]] = {}
        for item, content in zip(media.items, read, strict=True):
            data.setdefault(item.modality, []).append(content)
            uuids.setdefault(item.modality, []).append(item.media_hash)
        prompt = TokensPrompt(
            prompt_token_ids=list(media.template_token_ids), multi_modal_data=data, multi_modal_uuids=uuids
        )
        return await self._renderer.process_for_engine_async(prompt, 0.0, skip_mm_cache=True)

    async def _read(self, item: Media) -> Any:
        # vLLM's way in for what is at hand is a data URL; its settings (image_mode, num_frames ...) apply there.
        url = f"data:{item.modality}/*;base64,{b64encode(item.content).decode()}"
        match item.modality:
            case "image":
                return await self._connector.fetch_image_async(url)
            case "audio":
                return await self._connector.fetch_audio_async(url)
            case _:
                return await self._connector.fetch_video_async(url)
