"""Train a demo model: `python -m demo.train --size small`.

Each step's batch depends on the seed and the step's number alone, so a run that was stopped goes on from its last
snapshot (under build/demo/) as if it had not been. At the end the checkpoint and the log of the training are
written to demo/models/demo-SIZE/.

The loss covers the answers only. Tasks start easy and get harder. The matrices of the layers are trained by Muon
(https://kellerjordan.github.io/posts/muon/), everything else by AdamW.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo.batches import Batch, Example, encode, pack, take
from demo.checkpoint import save_checkpoint
from demo.model import SHAPES, Llama
from demo.tasks import Task, generate, stream
from demo.tokenizer import MODELS_DIR, load_tokenizer

SNAPSHOT_DIR: Final = Path(__file__).parent.parent / "build" / "demo"
MAX_STEPS: Final = 1_000_000
WARMUP_STEPS: Final = 50
LOG_EVERY_STEPS: Final = 50
CALIBRATION_EVERY_STEPS: Final = 100
CALIBRATION_TASKS: Final = 640
CALIBRATION_SEED: Final = 7
GRADIENT_NORM: Final = 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one size is trained.

    `hardest` is the hardest difficulty that it gets to see, from the moment on when `curriculum_share` of the steps
    are done; before that, tasks get harder by and by. Where they did so too fast, a model never learned to stop
    counting.
    """

    hardest: int
    curriculum_share: float
    steps: int
    step_tokens: int
    muon_rate: float
    adamw_rate: float
    seed: int = 1


RECIPES: Final[dict[str, Recipe]] = {
    "small": Recipe(4, 0.4, steps=800, step_tokens=8192, muon_rate=0.02, adamw_rate=3e-3),
    "medium": Recipe(6, 0.6, steps=700, step_tokens=6144, muon_rate=0.02, adamw_rate=3e-3),
    "large": Recipe(8, 0.4, steps=2000, step_tokens=4096, muon_rate=0.02, adamw_rate=2e-3),
}


def hardest_difficulty(step: int, recipe: Recipe) -> int:
    """The hardest difficulty in a step's batch: 2 at first, the recipe's once the curriculum is through."""
    risen = int((recipe.hardest - 1) * step / (recipe.steps * recipe.curriculum_share))
    return min(recipe.hardest, 2 + risen)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def step_examples(recipe: Recipe, step: int, tokenizer: Tokenizer) -> list[Example]:
    """The examples of one step, a function of the recipe and the step's number."""
    difficulties = range(1, hardest_difficulty(step, recipe) + 1)
    tasks: Iterator[Task] = stream(recipe.seed * MAX_STEPS + step, "train", difficulties=difficulties)
    examples: Iterable[Example] = (encode(tokenizer, task) for task in tasks)
    return take(examples, recipe.step_tokens)


def answer_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies of answer tokens."""
    return (F.cross_entropy(logits.float(), targets, reduction="none") * weights).sum()


def example_weights(examples: Sequence[Example]) -> Tensor:
    """The weight of each example's answer tokens: 1/sqrt(number of them), scaled so that all weights add up to 1.

    Halfway between a mean over tokens, in which short answers hardly count, and a mean over answers.
    """
    lengths = torch.tensor([float(len(example.ids) - example.prompt_tokens) for example in examples])
    return lengths.rsqrt() / lengths.sqrt().sum()


def forward_answers(model: Llama, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and example numbers of the batch's answer tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(batch.ids, batch.positions, batch.visible)
        chosen = batch.targets >= 0
        return model.logits(hidden[chosen]), batch.targets[chosen], batch.example[chosen]


def solved(model: Llama, examples: Sequence[Example]) -> list[bool]:
    """For each example, whether greedy decoding would give exactly its answer.

    It does if, and only if, each token of the answer is the likeliest one after those before it, so one forward
    pass tells.
    """
    wrong = torch.zeros(len(examples), dtype=torch.long)
    with torch.no_grad():
        for batch in pack(examples):
            logits, targets, example = forward_answers(model, batch)
            wrong.index_add_(0, example, (logits.argmax(-1) != targets).long())
    return [bool(count == 0) for count in wrong.tolist()]


class Trainer:
    """A model in training, its optimisers and its log."""

    def __init__(self, size: str, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.size = size
        self.recipe = recipe
        self.tokenizer = load_tokenizer()
        self.model = Llama(SHAPES[size])
        self.step = 0
        self.log: list[dict[str, object]] = []
        matrices = [p for p in self.model.model.layers.parameters() if p.dim() == 2]
        rest = [p for p in self.model.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=recipe.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._rates = (recipe.muon_rate, recipe.adamw_rate)

    def train_step(self) -> float:
        """Take one step and return its loss."""
        examples = step_examples(self.recipe, self.step, self.tokenizer)
        weights = example_weights(examples)
        total = 0.0
        for batch in pack(examples):
            logits, targets, example = forward_answers(self.model, batch)
            loss = answer_loss(logits, targets, weights[example])
            loss.backward()
            total += float(loss.item())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        factor = learning_rate_factor(self.step, self.recipe.steps)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def calibrate(self) -> dict[str, float]:
        """Shares solved of the calibration tasks: in all, by kind and by difficulty."""
        tasks = generate(CALIBRATION_SEED, CALIBRATION_TASKS, split="calibration")
        verdicts = solved(self.model, [encode(self.tokenizer, task) for task in tasks])
        groups: dict[str, list[bool]] = {}
        for task, verdict in zip(tasks, verdicts, strict=True):
            for group in ("accuracy", task.kind, f"difficulty {task.difficulty}"):
                groups.setdefault(group, []).append(verdict)
        return {group: round(sum(v) / len(v), 3) for group, v in sorted(groups.items())}

    def snapshot(self, path: Path) -> None:
        """Write everything that going on from here needs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "log": self.log,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a snapshot, as if the run had never stopped."""
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.log = state["log"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(size: str, recipe: Recipe, snapshot_path: Path, model_dir: Path) -> None:
    """Train one model to the end of its recipe, from its snapshot if there is one, and write its checkpoint."""
    trainer = Trainer(size, recipe)
    if snapshot_path.exists():
        trainer.resume(snapshot_path)
    started, losses = time.monotonic(), []
    while trainer.step < recipe.steps:
        losses.append(trainer.train_step())
        if trainer.step % LOG_EVERY_STEPS == 0:
            record: dict[str, object] = {
                "step": trainer.step,
                "loss": round(sum(losses) / len(losses), 4),
                "seconds": round(time.monotonic() - started, 1),
            }
            if trainer.step % CALIBRATION_EVERY_STEPS == 0:
                record |= trainer.calibrate()
            losses = []
            trainer.log.append(record)
            print(json.dumps(record), flush=True)
            if trainer.step % CALIBRATION_EVERY_STEPS == 0:
                trainer.snapshot(snapshot_path)
    save_checkpoint(trainer.model, model_dir)
    (model_dir / "training.jsonl").write_text("".join(json.dumps(record) + "\n" for record in trainer.log))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train a demo model.")
    parser.add_argument("--size", choices=sorted(SHAPES), required=True)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size: str = arguments.size
    train(size, RECIPES[size], SNAPSHOT_DIR / f"{size}.pt", MODELS_DIR / f"demo-{size}")


if __name__ == "__main__":
    main()
