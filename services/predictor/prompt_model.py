"""A small model of its own that reads the prompt: what the works before STAR predict lengths with (its section 2.3).

The counts of the prompt's tokens go through the same kind of network as the predictor's, trained on whole lengths. It
stands in for the fine-tuned BERT and OPT of the paper's comparison, which are larger than the demo models themselves.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_samples import LengthSamples
from services.predictor.network import Network
from services.predictor.training import TrainingSettings, train_network


class PromptReader:
    """The `LengthBaseline` that predicts the whole length once, from the prompt's hidden state, and takes off what has
    been generated since."""

    def __init__(
        self,
        train: LengthSamples,
        validation: LengthSamples,
        prompts: Mapping[int, tuple[int, ...]],
        settings: TrainingSettings,
        device: str,
    ) -> None:
        self._prompts = prompts
        self._vocabulary = 1 + max(max(prompt) for prompt in prompts.values())
        self._network: Network = train_network(
            self._requests(train), self._requests(validation), settings, lambda _: None, device
        )

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        numbers, row_of_sample = np.unique(samples.requests, return_inverse=True)
        totals = self._network.remaining_tokens(self._inputs(numbers)).astype(np.float64)
        return np.maximum(1.0, totals[row_of_sample] - samples.generated_tokens)

    def _requests(self, samples: LengthSamples) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        numbers, first = np.unique(samples.requests, return_index=True)
        return self._inputs(numbers), samples.generated_tokens[first] + samples.remaining_tokens[first]

    def _inputs(self, numbers: NDArray[np.int32]) -> NDArray[np.float32]:
        """Counts of each token, and the length."""
        rows = np.zeros((len(numbers), self._vocabulary + 1), np.float32)
        for row, number in enumerate(numbers.tolist()):
            prompt = self._prompts[number]
            np.add.at(rows[row], list(prompt), 1.0)
            rows[row, -1] = len(prompt)
        return rows
