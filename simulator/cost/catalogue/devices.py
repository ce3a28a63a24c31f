"""Devices by name, from the vendor's datasheets and architecture papers.

Rates are dense ones. GeForce cards halve the rate that accumulates in fp32, which is what inference uses. Links:
half of the bidirectional figure that datasheets advertise.
"""

from simulator.cost.spec.device import DeviceSpec, SplitRule

_TERA, _GIGA = 1e12, 1e9


def _device(
    name: str,
    teraflops: dict[str, float],
    memory_gb: float,
    memory_gb_per_s: float,
    multiprocessors: int,
    link_gb_per_s: float,
    *,
    attention_tiles: int = 2,
    split_rule: SplitRule = SplitRule.BALANCED,
    nvlink: bool = True,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        flops_per_s={dtype: rate * _TERA for dtype, rate in teraflops.items()},
        memory_bytes=memory_gb * _GIGA,
        memory_bytes_per_s=memory_gb_per_s * _GIGA,
        multiprocessors=multiprocessors,
        link_bytes_per_s=link_gb_per_s * _GIGA,
        nvlink=nvlink,
        attention_tiles=attention_tiles,
        split_rule=split_rule,
    )


def _workstation(
    name: str,
    teraflops: dict[str, float],
    memory_gb: float,
    memory_gb_per_s: float,
    multiprocessors: int,
    link_gb_per_s: float,
) -> DeviceSpec:
    """100 KB of shared memory, no NVLink, FlashAttention-2."""
    return _device(
        name,
        teraflops,
        memory_gb,
        memory_gb_per_s,
        multiprocessors,
        link_gb_per_s,
        attention_tiles=1,
        split_rule=SplitRule.EQUAL,
        nvlink=False,
    )


_HOPPER = {"bf16": 989.4, "fp8": 1978.9}

# Memory as the devices report it: 80 GB of HBM are close to 80 x 2^30 bytes.
_DEVICES = (
    _device("A100-80G", {"bf16": 312.0}, 85.0, 2039, 108, 300, split_rule=SplitRule.EQUAL),
    _device("H100", _HOPPER, 85.0, 3352, 132, 450),
    _device("H800", _HOPPER, 85.0, 3352, 132, 200),
    _device("H200", _HOPPER, 150.0, 4800, 132, 450),
    _device("H20", {"bf16": 148.0, "fp8": 296.0}, 102.0, 4000, 78, 450),
    _device("B200", {"bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}, 192.0, 7700, 148, 900),
    _device("GB200", {"bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0}, 198.0, 8000, 148, 900),
    _workstation("L40S", {"bf16": 362.0, "fp8": 733.0}, 48.3, 864, 142, 32),
    _workstation("RTX-4090", {"bf16": 165.2, "fp8": 330.3}, 25.4, 1008, 128, 32),
    _workstation("RTX-4090D", {"bf16": 147.1, "fp8": 294.2}, 25.4, 1008, 114, 32),
    _workstation("RTX-PRO-6000", {"bf16": 503.8, "fp8": 1007.6, "fp4": 2015.2}, 102.6, 1792, 188, 64),
)

DEVICES = {device.name: device for device in _DEVICES}
