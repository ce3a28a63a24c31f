"""An instance's decoding requests on the wire, the same for the worker that reports and the scheduler that listens."""

import numpy as np

from controlplane.policies.rescheduling.decode_load import DecodeLoad
from controlplane.policies.rescheduling.parameters import Horizon
from mesh.errors import ProtocolViolation
from penstock.v1 import monitor_pb2


def decode_message(load: DecodeLoad) -> monitor_pb2.DecodeReport:
    """The load, for a report."""
    return monitor_pb2.DecodeReport(
        request_ids=load.request_ids,
        context_tokens=load.context_tokens.tolist(),
        remaining_tokens=load.remaining_tokens.tolist(),
        stride_tokens=load.horizon.stride_tokens,
        future_tokens=load.future_tokens.tolist(),
        frontend_ids=load.frontends,
        low_tokens=[] if load.band_tokens is None else load.band_tokens[0].tolist(),
        high_tokens=[] if load.band_tokens is None else load.band_tokens[1].tolist(),
    )


def decode_load_of(message: monitor_pb2.DecodeReport) -> DecodeLoad:
    """The way back. Raises `ProtocolViolation` for lists that do not belong together."""
    counts = {len(message.request_ids), len(message.context_tokens), len(message.remaining_tokens)}
    if message.frontend_ids:
        counts.add(len(message.frontend_ids))
    has_band = bool(message.low_tokens or message.high_tokens)
    if has_band:
        counts |= {len(message.low_tokens), len(message.high_tokens)}
    if len(counts) != 1 or not message.future_tokens or not message.stride_tokens:
        raise ProtocolViolation(
            f"a decode report of {len(message.request_ids)} requests has {len(message.context_tokens)} contexts, "
            f"{len(message.remaining_tokens)} remaining lengths and {len(message.future_tokens)} points of "
            f"{message.stride_tokens} tokens; it needs as many of each, and at least the present"
        )
    return DecodeLoad(
        tuple(message.request_ids),
        np.array(message.context_tokens, dtype=np.int64),
        np.array(message.remaining_tokens, dtype=np.int64),
        Horizon(len(message.future_tokens) - 1, message.stride_tokens),
        np.array(message.future_tokens, dtype=np.int64),
        tuple(message.frontend_ids),
        np.array([message.low_tokens, message.high_tokens], dtype=np.int64) if has_band else None,
    )
