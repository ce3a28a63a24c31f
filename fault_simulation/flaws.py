"""What is wrong with an answer, by what its client should have been sent."""

from collections.abc import Iterable, Sequence

from fault_simulation.workload import Asked, Attempt


def flaws(asked: Asked, attempt: Attempt, *, may_lack_logprobs: bool = False) -> list[str]:
    """What is wrong with what a client was sent. Of an answer that broke off, what came is to be the beginning.

    `may_lack_logprobs`: a worker may have been lost while it handed a request over. Tokens that are known from the
    account of the new owner alone have none.
    """
    answer, found = attempt.answer, []
    if answer.status != 200:
        return []
    is_whole, asked_for = not answer.error and not asked.has_left, asked.expected_as(answer)
    for index, choice in answer.choices.items():
        if index >= len(asked_for):
            found.append(f"choice {index} was not asked for")
            continue
        expected = asked_for[index]
        if choice.text != expected.text if is_whole else not expected.text.startswith(choice.text):
            found.append(f"choice {index}: {_difference(expected.text, choice.text)}")
        elif (is_whole or choice.finish) and choice.finish != expected.finish:
            found.append(f"choice {index} finished by {choice.finish or 'nothing'!r}, not {expected.finish!r}")
        elif not _in_order(choice.tokens, expected.spelled):
            found.append(f"choice {index}: logprobs of other tokens than those that it has")
        elif is_whole and not may_lack_logprobs and len(choice.tokens) != len(expected.spelled):
            found.append(f"choice {index}: logprobs of {len(choice.tokens)} tokens, not of {len(expected.spelled)}")
    if not is_whole:
        return found
    missing = set(range(len(asked_for))) - set(answer.choices)
    if missing:
        found.append(f"choices {sorted(missing)} are missing")
    tokens = sum(choice.tokens for choice in asked_for)
    if asked.tiers:  # all of them are counted that were asked
        return found if answer.tier in asked.tiers else [*found, f"{answer.tier or 'nobody'!r} has answered"]
    if answer.completion_tokens is not None and answer.completion_tokens != tokens and not found:
        found.append(f"{answer.completion_tokens} tokens are said to have come, not {tokens}")
    return found


def _difference(expected: str, received: str) -> str:
    same = next(
        (index for index, pair in enumerate(zip(expected, received, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(received)),
    )
    return (
        f"{len(received)} characters, not {len(expected)}; from character {same} on {received[same : same + 40]!r}, "
        f"not {expected[same : same + 40]!r}"
    )


def _in_order(some: Sequence[str], of: Iterable[str]) -> bool:
    """Whether `some` is what is left of `of` when others are left out."""
    rest = iter(of)
    return all(one in rest for one in some)
