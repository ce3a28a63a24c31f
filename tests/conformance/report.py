"""What came of all cases, as a page for people and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.case import Case
from tests.conformance.compare import Difference
from tests.conformance.deliberate import DELIBERATE, explanation

LONGEST = 110


@dataclass(frozen=True)
class Outcome:
    """A case and what differs in it."""

    case: Case
    differences: Sequence[Difference] = field(default_factory=tuple)

    @property
    def open(self) -> list[Difference]:
        """Those that nothing explains."""
        return [each for each in self.differences if explanation(self.case, each) is None]

    def as_json(self) -> Mapping[str, Any]:
        return {
            "case": self.case.name,
            "differences": [
                {"place": each.place, "stock": each.stock, "mesh": each.mesh, "deliberate": each not in self.open}
                for each in self.differences
            ],
        }


def page(outcomes: Sequence[Outcome]) -> str:
    """As Markdown: a table by subject, what differs on purpose, and what differs otherwise."""
    cases, same, deliberate = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        subject = outcome.case.subject
        cases[subject] += 1
        same[subject] += not outcome.differences
        deliberate[subject] += bool(outcome.differences) and not outcome.open
    lines = ["| asked | cases | the same | on purpose | differ |", "|---|---|---|---|---|"]
    for subject in cases:
        lines.append(_counts(subject, cases[subject], same[subject], deliberate[subject]))
    lines.append(_counts("all", cases.total(), same.total(), deliberate.total()))
    lines += ["", "On purpose:", "", "| what | why | cases |", "|---|---|---|"]
    for each in DELIBERATE:
        shows = sum(any(explanation(one.case, it) is each for it in one.differences) for one in outcomes)
        lines.append(f"| {each.what} | {each.reason} | {shows} |")
    still_open = [outcome for outcome in outcomes if outcome.open]
    if still_open:
        lines += ["", "Not yet the same:", "", "| case | where | vLLM | the mesh |", "|---|---|---|---|"]
        lines += [_row(outcome) for outcome in still_open]
    return "\n".join(lines)


def _counts(subject: str, cases: int, same: int, deliberate: int) -> str:
    return f"| {subject} | {cases} | {same} | {deliberate} | {cases - same - deliberate} |"


def _row(outcome: Outcome) -> str:
    """The first difference stands for all of a case; `+3` counts the others."""
    first, *others = outcome.open
    more = f" +{len(others)}" if others else ""
    cells = (outcome.case.name, f"`{first.kind}`{more}", first.stock, first.mesh)
    return f"| {' | '.join(_cell(each) for each in cells)} |"


def _cell(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.replace("|", "\\|").replace("<", "&lt;")
