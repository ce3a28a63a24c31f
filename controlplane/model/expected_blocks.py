"""Blocks that instances are going to have: those of prompts that were placed there and are not computed yet.

KV events tell of a block once it is computed. A request that comes before then, and shares its prefix with one placed
a moment ago (the siblings of a fan-out), would take the prefix for uncached everywhere. With eight siblings 15 ms apart
that share 8192 tokens, on 16 instances that could serve half of them, 12 % of the requests met their SLO, and 98 % once
the prefix counted as cached where the first was placed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from mesh.invariants import invariants

MARK_TOKENS: Final = 128
"""A prompt is known by the last block of every so many tokens, and by its last one: each block of it cost 100
microseconds more a placement, most of them waits for memory, and a prefix is not worth waiting for if it is shorter.
Without the last one, whoever goes on from a whole prompt, as the next turn of a conversation does, finds 64 tokens less
of it in the mean: near saturation conversations took 6 to 9 % longer end to end."""

_NOTHING: Final = (0, 0.0)


def mark_spacing(block_tokens: int) -> int:
    """How many blocks apart marks are."""
    return max(1, MARK_TOKENS // block_tokens)


def marks_of(chain: Sequence[int], block_tokens: int, cached_tokens: int = 0) -> Sequence[int]:
    """The blocks that a prompt's chain is known by, behind those that are cached; none of one that is shorter than
    `MARK_TOKENS`."""
    spacing = mark_spacing(block_tokens)
    cached_marks = cached_tokens // (block_tokens * spacing)
    marks = chain[(cached_marks + 1) * spacing - 1 :: spacing]
    if len(chain) > spacing and len(chain) % spacing and len(chain) * block_tokens > cached_tokens:
        return (*marks, chain[-1])
    return marks


class _Prompt:
    """A placed prompt, with those of its marks that nobody was expected to have before."""

    __slots__ = ("computed_s", "instance_id", "is_over", "marks", "placed_s", "request_id")

    def __init__(self, request_id: str, instance_id: str, marks: list[int], placed_s: float, computed_s: float) -> None:
        self.request_id = request_id
        self.instance_id = instance_id
        self.marks = marks
        self.placed_s = placed_s
        self.computed_s = computed_s
        self.is_over = False


class ExpectedBlocks:
    """Placed prompts by request, oldest first, and the first of them to compute each marked block.

    A mark stands with one prompt only. Whoever computes a block computes all that come before it in its chain, so a
    prompt's last mark in somebody's chain says how much of that chain its instance is going to have.

    A prompt is forgotten when its instance has stored its last mark, at the first report after the request's end, when
    the request is placed anew, with its instance, by age, and, oldest first, beyond `max_marks` (of some 150 bytes).
    """

    def __init__(self, max_marks: int) -> None:
        self._max_marks = max_marks
        self._prompts: dict[str, _Prompt] = {}
        self._first: dict[int, _Prompt] = {}
        """By mark."""
        self._last_marks: dict[int, _Prompt] = {}
        """By the last of its own marks."""
        self._over: dict[str, list[str]] = {}
        """Requests that have ended since the last report of their instance, by it."""

    def __len__(self) -> int:
        return len(self._first)

    def instance_ids(self) -> set[str]:
        """Those that something is expected of."""
        return {prompt.instance_id for prompt in self._prompts.values()}

    def take_over(self, former: "ExpectedBlocks", is_kept: Callable[[str], bool]) -> None:
        """Expect what another one does, of each instance that `is_kept`."""
        for each in tuple(former._prompts.values()):
            if is_kept(each.instance_id):
                self.add(each.request_id, each.instance_id, each.marks, each.placed_s, each.computed_s)

    def add(self, request_id: str, instance_id: str, marks: Sequence[int], placed_s: float, computed_s: float) -> None:
        """A prompt was placed, and is thought to be computed by `computed_s`; `marks` are those that the instance does
        not have."""
        self.forget(request_id)
        first = self._first
        is_fresh = first.keys().isdisjoint(marks)  # as nearly always: no Python code runs for each
        fresh = list(marks) if is_fresh else [mark for mark in marks if mark not in first]
        if not fresh or len(fresh) > self._max_marks:
            return
        prompt = self._prompts[request_id] = _Prompt(request_id, instance_id, fresh, placed_s, computed_s)
        first.update(dict.fromkeys(fresh, prompt))
        self._last_marks[fresh[-1]] = prompt
        while len(first) > self._max_marks:
            self.forget(next(iter(self._prompts)))

    def leading(self, chain: Sequence[int], spacing: int, held_blocks: int = 0) -> dict[str, tuple[int, float]]:
        """How many of a chain's leading blocks each instance is going to have: to the last mark (`mark_spacing`), and
        exactly where a prompt ends less than `spacing` blocks behind the last of all of them. Empty where nobody is
        going to have more than `held_blocks`, which somebody has; otherwise some may be to have fewer than that. With
        each, by when they are thought to be computed."""
        first = self._first
        if first.keys().isdisjoint(chain[held_blocks : held_blocks + spacing]):
            return {}
        # The last place of each prompt among the marks, in one pass of C.
        marked = range(spacing, len(chain) + 1, spacing)
        places = dict(zip(map(first.get, chain[spacing - 1 :: spacing]), marked, strict=True))
        places.pop(None, None)
        last = max(held_blocks, *places.values(), 0)
        for place, block in enumerate(chain[last : last + spacing], last + 1):
            places[first.get(block)] = place
        places.pop(None, None)
        leading: dict[str, tuple[int, float]] = {}
        for prompt, place in places.items():
            if prompt is not None and leading.get(prompt.instance_id, _NOTHING)[0] < place:
                leading[prompt.instance_id] = place, prompt.computed_s
        return leading

    def stored(self, instance_id: str, blocks: Iterable[int]) -> None:
        """The instance has these now."""
        last_marks = self._last_marks
        # Long contexts have thousands of blocks: no Python code runs for each.
        for block in last_marks.keys() & blocks if last_marks else ():
            prompt = last_marks[block]
            if prompt.instance_id == instance_id:
                self.forget(prompt.request_id)

    def ended(self, request_id: str, instance_id: str | None = None) -> None:
        """The request is over (there, where an instance is named): what it has had computed comes with its instance's
        next report, or never."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and not prompt.is_over and instance_id in (None, prompt.instance_id):
            prompt.is_over = True
            self._over.setdefault(prompt.instance_id, []).append(request_id)

    def reported(self, instance_id: str) -> None:
        """The instance has told of all that it has computed by now."""
        if instance_id in self._over:
            for request_id in self._over.pop(instance_id):
                prompt = self._prompts.get(request_id)
                if prompt is not None and prompt.is_over:
                    self.forget(request_id)

    def lost(self, instance_id: str) -> None:
        """The instance is gone, or will not compute what was placed there."""
        for prompt in [each for each in self._prompts.values() if each.instance_id == instance_id]:
            self.forget(prompt.request_id)
        self._over.pop(instance_id, None)

    def forget_older(self, placed_before_s: float) -> None:
        """Forget prompts that were placed before then."""
        while self._prompts:
            oldest = next(iter(self._prompts.values()))
            if oldest.placed_s >= placed_before_s:
                break
            self.forget(oldest.request_id)

    def forget(self, request_id: str) -> None:
        """The request's prompt is not to be computed where it was placed."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            for mark in prompt.marks:
                del self._first[mark]
            del self._last_marks[prompt.marks[-1]]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._first) <= self._max_marks, "what is expected is bounded"
        standing = {mark: prompt for prompt in self._prompts.values() for mark in prompt.marks}
        assert standing == self._first, "each mark stands with the prompt that computes it"
        assert sum(len(prompt.marks) for prompt in self._prompts.values()) == len(standing), "and with one only"
        last = {prompt.marks[-1]: prompt for prompt in self._prompts.values()}
        assert last == self._last_marks, "prompts are found by their last mark"
