"""Images and the like on the wire."""

from collections.abc import Iterable, Sequence

from controlplane.model.media import ExpandedPrompt, Media, MediaSpan, PromptMedia
from penstock.v1 import request_pb2, worker_pb2


def prompt_media_message(media: PromptMedia) -> request_pb2.PromptMedia:
    """With all contents."""
    return request_pb2.PromptMedia(
        items=[
            request_pb2.Media(modality=item.modality, content=item.content, media_hash=item.media_hash)
            for item in media.items
        ],
        template_token_ids=media.template_token_ids,
        spans=span_messages(media.spans),
    )


def prompt_media(message: request_pb2.PromptMedia) -> PromptMedia:
    """Nothing is checked here (see `engine_worker.admission`)."""
    items = tuple(Media(item.modality, item.content, item.media_hash) for item in message.items)
    return PromptMedia(items, tuple(message.template_token_ids), media_spans(message.spans))


def expanded_message(prompt: ExpandedPrompt) -> worker_pb2.ExpandMediaResponse:
    """A worker's answer."""
    return worker_pb2.ExpandMediaResponse(prompt_token_ids=prompt.token_ids, spans=span_messages(prompt.spans))


def media_spans(messages: Iterable[request_pb2.MediaSpan]) -> tuple[MediaSpan, ...]:
    """In their order."""
    return tuple(MediaSpan(span.media_hash, span.offset, span.length) for span in messages)


def span_messages(spans: Sequence[MediaSpan]) -> list[request_pb2.MediaSpan]:
    """In their order."""
    return [request_pb2.MediaSpan(media_hash=span.media_hash, offset=span.offset, length=span.length) for span in spans]
