"""A small perceptron that learns quantiles of one number, step by step, in NumPy: no torch where it serves."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LAYERS: Final = (96, 48)
"""Widths of the hidden layers."""
LEARNING_RATE: Final = 3e-3
WEIGHT_DECAY: Final = 1.0
"""Much: a thousand requests are few for a network, and their samples are alike."""
_BETA1: Final = 0.9
_BETA2: Final = 0.999
_EPSILON: Final = 1e-8
AVERAGED_STEPS: Final = 100
"""Over about as many steps the weights are averaged that answer: single steps are noisy (Polyak and Juditsky 1992)."""


@dataclass(slots=True)
class QuantileNetwork:
    """ReLU layers with one output for each quantile, trained by the pinball loss (Koenker and Bassett 1978) with AdamW
    (Loshchilov and Hutter 2019)."""

    quantiles: tuple[float, ...]
    parameters: list[Floats]
    """Weights (inputs x outputs) and biases in turn, from the first layer to the last."""
    averages: list[Floats]
    """The same, averaged over the last steps: these answer."""
    first_moments: list[Floats]
    second_moments: list[Floats]
    steps: int = 0

    @classmethod
    def fresh(cls, inputs: int, quantiles: tuple[float, ...], seed: int = 0) -> "QuantileNetwork":
        """He's initial weights (2015); the last layer starts at 0, so that nothing is added to what is known."""
        draw = np.random.default_rng(seed)
        parameters: list[Floats] = []
        widths = (inputs, *LAYERS, len(quantiles))
        for narrow, wide in pairwise(widths):
            scale = np.sqrt(2 / narrow) if wide != widths[-1] else 0.0
            parameters.append((scale * draw.standard_normal((narrow, wide))).astype(np.float32))
            parameters.append(np.zeros(wide, np.float32))
        zeros = [np.zeros_like(array) for array in parameters]
        return cls(quantiles, parameters, [a.copy() for a in parameters], zeros, [a.copy() for a in zeros])

    @property
    def inputs(self) -> int:
        """Numbers that a row has."""
        return len(self.parameters[0])

    def arrays(self) -> dict[str, list[Floats]]:
        """All state but the number of steps."""
        return {
            "parameters": self.parameters,
            "averages": self.averages,
            "first_moments": self.first_moments,
            "second_moments": self.second_moments,
        }

    def restore(self, arrays: dict[str, list[Floats]], steps: int) -> None:
        """Take over what `arrays` told. Raises ValueError for a network of another form."""
        for name, own in self.arrays().items():
            shapes, given = [array.shape for array in own], [array.shape for array in arrays[name]]
            if shapes != given:
                raise ValueError(f"a network of the shapes {shapes} cannot take {name} of {given}")
            own[:] = [np.array(array) for array in arrays[name]]
        self.steps = steps

    def predict(self, rows: Floats) -> Floats:
        """Quantiles of each row, shape (rows, quantiles), not sorted."""
        return _forward(self.averages, rows)[-1]

    def learn(self, rows: Floats, targets: Floats, offsets: Floats) -> None:
        """One step of gradient descent: quantiles of `targets`, of which `offsets` is known already; both (rows,)."""
        values = _forward(self.parameters, rows)
        errors = (targets - offsets)[:, None] - values[-1]
        quantiles = np.array(self.quantiles, np.float32)
        slope: Floats = np.where(errors > 0, -quantiles, 1 - quantiles).astype(np.float32) / np.float32(len(rows))
        gradients: list[Floats] = []
        for layer in range(len(values) - 2, -1, -1):
            gradients[:0] = [values[layer].T @ slope, slope.sum(axis=0)]
            if layer:
                slope = (slope @ self.parameters[2 * layer].T) * (values[layer] > 0)
        self.steps += 1
        self._descend(gradients)

    def _descend(self, gradients: list[Floats]) -> None:
        rate = LEARNING_RATE * np.sqrt(1 - _BETA2**self.steps) / (1 - _BETA1**self.steps)
        keep = min(self.steps / (self.steps + 9), 1 - 1 / AVERAGED_STEPS)
        for index, gradient in enumerate(gradients):
            first, second = self.first_moments[index], self.second_moments[index]
            first += (1 - _BETA1) * (gradient - first)
            second += (1 - _BETA2) * (gradient * gradient - second)
            parameter = self.parameters[index]
            if parameter.ndim == 2:
                parameter *= 1 - LEARNING_RATE * WEIGHT_DECAY
            parameter -= np.float32(rate) * first / (np.sqrt(second) + _EPSILON)
            self.averages[index] += np.float32(1 - keep) * (parameter - self.averages[index])


def _forward(parameters: list[Floats], rows: Floats) -> list[Floats]:
    """Inputs and outputs of each layer."""
    values = [rows]
    for layer in range(0, len(parameters) - 2, 2):
        values.append(np.maximum(values[-1] @ parameters[layer] + parameters[layer + 1], 0.0))
    values.append(values[-1] @ parameters[-2] + parameters[-1])
    return values
