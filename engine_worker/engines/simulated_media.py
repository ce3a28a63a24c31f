"""Images and the like for the simulated engine: as many tokens as their size asks for; nobody looks at them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.model.media import ExpandedPrompt, Media, MediaSpan, PromptMedia
from controlplane.model.media_facts import MediaFacts
from mesh.errors import RequestRefused

_FEWEST_TOKENS = 5
_MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SimulatedMedia:
    """What a simulated model takes besides text."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    """The placeholder's token by modality; it stands for the medium after expansion too, several times."""
    most: int = 8

    @property
    def facts(self) -> dict[str, MediaFacts]:
        """See `MediaEngine.media`."""
        return {modality: MediaFacts(self.most, f"<{modality}>") for modality in self.tokens}

    def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """See `MediaEngine.expand`: media of one size have the same tokens."""
        waiting = {modality: [each for each in media.items if each.modality == modality] for modality in self.tokens}
        modality_of = {token: modality for modality, token in self.tokens.items()}
        if len(media.items) != sum(map(len, waiting.values())) or any(
            len(each) > self.most for each in waiting.values()
        ):
            raise RequestRefused(
                f"this model takes at most {self.most} of each of {', '.join(self.tokens) or 'nothing'}"
            )
        token_ids: list[int] = []
        spans: list[MediaSpan] = []
        for token_id in media.template_token_ids:
            items = waiting.get(modality_of.get(token_id, ""), [])
            if not items:
                token_ids.append(token_id)
                continue
            item = items.pop(0)
            spans.append(MediaSpan(item.media_hash, len(token_ids), _tokens_of(item)))
            token_ids += [token_id] * _tokens_of(item)
        if any(waiting.values()):
            raise RequestRefused("there are fewer placeholders in the prompt than images, recordings and films")
        return ExpandedPrompt(tuple(token_ids), tuple(spans))


TEXT_ONLY: Final = SimulatedMedia()


def _tokens_of(item: Media) -> int:
    return _FEWEST_TOKENS + len(item.content) % (_MOST_TOKENS - _FEWEST_TOKENS)
