"""A cost model that adds up measured kernel times."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.cost.fitted.interpolation import Curve
from simulator.cost.fitted.operators import OperatorTables
from simulator.cost.fitted.unevenness import Unevenness
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.cost.roofline.lengths import DecodeLengths, Numbers

_ELEMENT_BYTES = 2.0
_GRAPH_STEP_TOKENS = 8
_REMEMBERED = 1 << 14


class TableCost(CostModel):
    """Tables are measured on batches of equal lengths; `unevenness` says how much more a real batch takes: as measured
    on the card, or else by a tile model of the kernel. None: no more."""

    def __init__(
        self,
        tables: OperatorTables,
        unevenness: Unevenness | None = None,
        *,
        step_ms: float = 0.0,
        graph_tokens: int = 0,
    ) -> None:
        """`step_ms`: of the host, that the device waits for. `graph_tokens`: vLLM runs steps of up to so many
        tokens as captured graphs, whose sizes are multiples of eight."""
        self.tables = tables
        self._unevenness = unevenness
        self._host_ms = step_ms
        self._graph_tokens = graph_tokens
        self._rest: dict[tuple[int, int], float] = {}
        self._decode_rows: dict[int, Curve] = {}

    def step_ms(self, batch: BatchShape) -> float:
        sequences = batch.decode_requests + len(batch.prefill)
        return self._rest_ms(_tokens(batch), sequences) + self._attention_ms(batch)

    def lockstep_ms(self, batches: Sequence[BatchShape | None]) -> float:
        """A step that engines with divided experts take together: the slowest one's. None: one without work."""
        tokens = [1 if batch is None else _tokens(batch) for batch in batches]
        padded = [self._padded(count) for count in tokens]
        if all(count <= self._graph_tokens for count in tokens):
            padded = [max(padded)] * len(padded)  # one graph size for all
        slowest_ms = 0.0
        for batch, count in zip(batches, padded, strict=True):
            if batch is not None:
                head_ms = self._host_ms + self.tables.sequence.at(batch.decode_requests + len(batch.prefill))
                forward_ms = self._forward_ms(count, sum(padded) - count)
                slowest_ms = max(slowest_ms, head_ms + forward_ms + self._attention_ms(batch))
        return slowest_ms

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        """Durations of consecutive decode steps, by the same operations."""
        requests = batch.decode_requests
        lengths = DecodeLengths.of_step(batch.decode_context_tokens, batch.decode_context_tokens_sum).run(steps)
        decode_ms = self._decode_row(requests).at_all(lengths.total / requests)
        rest_ms = self._rest_ms(requests, requests)
        run_ms: NDArray[np.float64] = rest_ms + self.tables.layers * (decode_ms * self._stretch(lengths))
        return run_ms

    def _attention_ms(self, batch: BatchShape) -> float:
        layers, requests = self.tables.layers, batch.decode_requests
        if not requests:
            return layers * self._prefill_ms(batch.prefill)
        mean = batch.decode_context_tokens_sum / requests
        decode_ms = self._decode_row(requests).at(mean)
        lengths = DecodeLengths.of_step(batch.decode_context_tokens, batch.decode_context_tokens_sum)
        if not batch.prefill:
            return float(layers * (decode_ms * self._stretch(lengths)))
        extra_ms = self._unevenness.beside_prompt_ms(lengths, decode_ms) if self._unevenness else 0.0
        return float(layers * (self._mixed_ms(batch.prefill, requests, mean, decode_ms) + extra_ms))

    def _prefill_ms(self, chunks: Sequence[PrefillChunk]) -> float:
        """One kernel for all chunks: what each takes, less the launches of all but one."""
        grid = self.tables.attention.prefill
        launch_ms = grid.values[0]
        return launch_ms + sum(grid.at(chunk.new_tokens, chunk.context_tokens) - launch_ms for chunk in chunks)

    def _mixed_ms(self, chunks: Sequence[PrefillChunk], requests: int, mean: float, decode_ms: float) -> float:
        mixed = self.tables.attention.mixed
        if mixed is None:
            return decode_ms + self._prefill_ms(chunks)
        heaviest = max(chunks, key=lambda chunk: chunk.new_tokens * (chunk.context_tokens + chunk.new_tokens))
        others = [chunk for chunk in chunks if chunk is not heaviest]
        others_ms = self._prefill_ms(others) - self.tables.attention.prefill.values[0] if others else 0.0
        return mixed.at(heaviest.new_tokens, heaviest.context_tokens, requests, mean) + others_ms

    def _decode_row(self, requests: int) -> Curve:
        row = self._decode_rows.get(requests)
        if row is None:
            row = self._decode_rows[requests] = self.tables.attention.decode.row(requests)
        return row

    def _stretch(self, lengths: DecodeLengths) -> Numbers:
        return 1.0 if self._unevenness is None else self._unevenness.stretch(lengths)

    def _rest_ms(self, tokens: int, sequences: int) -> float:
        found = self._rest.get((tokens, sequences))
        if found is None:
            found = self._host_ms + self.tables.sequence.at(sequences) + self._forward_ms(self._padded(tokens))
            if len(self._rest) < _REMEMBERED:
                self._rest[tokens, sequences] = found
        return found

    def _padded(self, tokens: int) -> int:
        if tokens > self._graph_tokens:
            return tokens
        if tokens <= _GRAPH_STEP_TOKENS // 2:
            return 1 << (tokens - 1).bit_length()
        return -(-tokens // _GRAPH_STEP_TOKENS) * _GRAPH_STEP_TOKENS

    def _forward_ms(self, tokens: int, tokens_elsewhere: int = 0) -> float:
        """Everything but attention and head."""
        tables = self.tables
        layer_ms = tables.layer.at(tokens)
        if tables.experts:
            layer_ms += tables.experts.layer_ms(tokens, tokens_elsewhere)
        if tables.tensor_links:
            layer_ms += 2 * tables.tensor_links.all_reduce_ms(_ELEMENT_BYTES * tokens * tables.hidden_size)
        return tables.step.at(tokens) + tables.layers * layer_ms


def _tokens(batch: BatchShape) -> int:
    return batch.decode_requests + sum(chunk.new_tokens for chunk in batch.prefill)
