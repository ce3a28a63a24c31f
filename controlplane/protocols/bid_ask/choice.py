"""Which bid wins (CascadeInfer, section 4.4)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offer:
    """A bid, as the sender holds it."""

    instance_id: str
    load_tokens: int
    earliest_start_ms: float


def choose(offers: Sequence[Offer], earliest: int) -> Offer | None:
    """The winner of bids in the order of their arrival; None without any.

    Of n bids the n // 2 with the higher loads go (of one, none), then all but the `earliest` ones; of the rest the
    one that came first wins. Equal loads and starts are told apart by their arrival.
    """
    arrival = {offer.instance_id: number for number, offer in enumerate(offers)}
    light = sorted(offers, key=lambda offer: (offer.load_tokens, arrival[offer.instance_id]))
    light = light[: len(light) - len(light) // 2]
    early = sorted(light, key=lambda offer: (offer.earliest_start_ms, arrival[offer.instance_id]))[:earliest]
    return min(early, key=lambda offer: arrival[offer.instance_id], default=None)
