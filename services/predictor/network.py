"""The predictor's network as it serves: a multilayer perceptron in NumPy. It needs no torch, and a batch of a worker's
requests is a few small matrix products."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Network:
    """STAR, equation (2), with biases: y = w4 relu(W3 relu(W2 relu(W1 h))). Scales of inputs and output are part of the
    first and the last layer."""

    weights: tuple[NDArray[np.float32], ...]
    """One matrix per layer, outputs x inputs."""
    biases: tuple[NDArray[np.float32], ...]

    @property
    def input_width(self) -> int:
        """Numbers that a request is described by."""
        return int(self.weights[0].shape[1])

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(array.size for array in (*self.weights, *self.biases))

    def remaining_tokens(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Predictions for requests x `input_width` numbers; a running request has at least one token to come."""
        values = inputs
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            values = np.maximum(values @ weight.T + bias, 0.0, dtype=np.float32)
        last: NDArray[np.float32] = values @ self.weights[-1].T + self.biases[-1]
        return np.maximum(last[:, 0], 1.0, dtype=np.float32)
