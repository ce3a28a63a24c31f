"""An answer that is sure to be the client's, sent while it is being written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from services.frontend.answers.choice import ChoicePiece
from services.frontend.answers.formats import AnswerFormat
from services.frontend.answers.schema import CascadeFacts, Usage
from services.frontend.answers.sender import AnswerSender
from services.frontend.cascade.keep_alives import KeepAlives
from services.frontend.cascade.tier_answer import TierReader
from services.frontend.requests.plan import GenerationPlan

FormOf: TypeAlias = Callable[[GenerationPlan, CascadeFacts | msgspec.UnsetType], AnswerFormat]
"""The form of an answer whose chunks carry these facts, or none."""


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What is being written, and what can be said of it."""

    reader: TierReader
    so_far: CascadeFacts
    complete: Callable[[], CascadeFacts]
    """Says how the answer was come to, once its last token is here."""
    usage: Callable[[], Usage]
    """Of all tiers that were asked, this one included."""


class LiveStream:
    """A streaming client's end. One answer can be shown on it, and once a token of it was sent, no other."""

    def __init__(
        self,
        sender: AnswerSender,
        keep_alives: KeepAlives,
        form: FormOf,
        announce: Callable[[CascadeFacts, str, str], None],
        include_usage: bool,
    ) -> None:
        """`announce` is called with what is known, the instance and the policy, before the first token is sent."""
        self._sender = sender
        self._keep_alives = keep_alives
        self._form = form
        self._announce = announce
        self._include_usage = include_usage
        self.began = False
        """Whether the client has got some of an answer, which is now the only one."""

    async def show(self, answer: LiveAnswer) -> None:
        """Raises ApiError if the tier fails; while nothing has begun, another one may answer."""
        reader = answer.reader
        await reader.begin()
        await self._keep_alives.stop()
        self.began = True
        self._announce(answer.so_far, reader.instance_id, reader.policy)
        form = _LiveFormat(lambda facts: self._form(reader.plan, facts), answer)
        await self._sender.stream(reader, form, answer.usage if self._include_usage else None)


class _LiveFormat:
    """A `StreamFormat`. The first chunk says whose answer it is, those from the last token on how it came about; those
    between carry no facts."""

    def __init__(self, form: Callable[[CascadeFacts | msgspec.UnsetType], AnswerFormat], answer: LiveAnswer) -> None:
        self._form = form
        self._complete = answer.complete
        self._plain = form(msgspec.UNSET)
        self._now = form(answer.so_far)
        self._now.go_on(self._plain)

    def first_events(self) -> bytes:
        events = self._now.first_events()
        if events:
            self._now = self._plain
        return events

    def event(self, piece: ChoicePiece) -> bytes:
        if piece.finish is not None:
            self._now = self._form(self._complete())
            self._now.go_on(self._plain)
            return self._now.event(piece)
        form, self._now = self._now, self._plain
        return form.event(piece)

    def usage_event(self, usage: Usage) -> bytes:
        return self._now.usage_event(usage)
