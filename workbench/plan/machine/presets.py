"""Machines from data sheets, for predictions before anything is measured.

A data sheet gives peaks. The figures here are the part of them that large products, copies and
collectives commonly attain, which each `source` states; overheads of calls and latencies are
assumed. Layers on such a machine follow the roofline, with its large error: `cluster.calibrate()`
measures a real machine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from workbench.plan.machine.device import Device, Link

_GB = 10**9
_PRODUCTS, _COPIES, _LINKS = 0.7, 0.8, 0.8
_ATTAINED = (
    f"data sheet's peaks, of which products attain {_PRODUCTS:.0%}, memory {_COPIES:.0%} and "
    f"links {_LINKS:.0%}; overheads assumed; "
)


def _device(
    name: str,
    kind: Literal["cpu", "cuda"],
    source: str,
    *,
    memory: float,
    bandwidth: float,
    fp32: float,
    bf16: float,
    fp16: float,
    fp64: float,
    loading: float,
    call_s: float,
) -> Device:
    """Sizes in GB, rates in GB/s and GFLOP/s; a fused update moves its operands once."""
    moved = bandwidth * _GB * _COPIES
    return Device(
        name=name,
        kind=kind,
        memory_bytes=int(memory * _GB),
        bandwidth=moved,
        flops={
            precision: rate * _GB * _PRODUCTS
            for precision, rate in (("fp32", fp32), ("bf16", bf16), ("fp16", fp16), ("fp64", fp64))
        },
        call_s=call_s,
        update_s_per_byte={"sgd": 5 / moved, "adam": 7 / moved, "adamw": 7 / moved},
        load_s_per_byte=1 / (loading * _GB * _LINKS),
        source=_ATTAINED + source,
    )


def _link(
    name: str, source: str, *, rate: float, latency_s: float, summing: Device, busy: float
) -> Link:
    """Rate in GB/s, each way; a sum reads two numbers and writes one."""
    return Link(
        name=name,
        latency_s=latency_s,
        bandwidth=rate * _GB * _LINKS,
        reduction_s_per_byte=3 / summing.bandwidth,
        busy=busy,
        source=_ATTAINED + source,
    )


_H100 = _device(
    "NVIDIA H100 SXM 80 GB",
    "cuda",
    "https://glennklockwood.com/garden/processors/h100",
    memory=80,
    bandwidth=3350,
    fp32=66_900,
    bf16=989_400,
    fp16=989_400,
    fp64=66_900,
    loading=64,  # PCIe 5, each way
    call_s=8e-6,
)
_A100 = _device(
    "NVIDIA A100 SXM 80 GB",
    "cuda",
    "https://glennklockwood.com/garden/processors/A100",
    memory=80,
    bandwidth=2039,
    fp32=19_500,
    bf16=312_000,
    fp16=312_000,
    fp64=19_500,
    loading=32,
    call_s=8e-6,
)
_T4 = _device(
    "NVIDIA T4",
    "cuda",
    "https://sysrqmts.com/en/gpus/nvidia/tesla/t4; fp16: NVIDIA's data sheet of the T4; bf16 is "
    "computed in fp32",
    memory=16,
    bandwidth=320,
    fp32=8_141,
    bf16=8_141,
    fp16=65_000,
    fp64=254,
    loading=15.75,  # PCIe 3, each way
    call_s=8e-6,
)
_RTX_4090 = _device(
    "NVIDIA GeForce RTX 4090",
    "cuda",
    "https://waredb.com/processor/nvidia-geforce-rtx-4090; fp16 with sums in fp32: NVIDIA's white "
    "paper of the Ada architecture",
    memory=24,
    bandwidth=1008,
    fp32=82_580,
    bf16=165_150,
    fp16=165_150,
    fp64=1_290,
    loading=31.5,  # PCIe 4, each way
    call_s=8e-6,
)
_EPYC = _device(
    "AMD EPYC 7763, 64 cores",
    "cpu",
    "64 cores of 2.45 GHz with two 256-bit fused multiply-add units, eight channels of "
    "DDR4-3200: https://techgage.com/article/amd-epyc-milan-launch-performance/ and "
    "https://www.microway.com/knowledge-center-articles/"
    "detailed-specifications-of-the-amd-epyc-rome-cpus/; bf16 and fp16 are computed in fp32",
    memory=256,
    bandwidth=204.8,
    fp32=64 * 2.45 * 32,
    bf16=64 * 2.45 * 32,
    fp16=64 * 2.45 * 32,
    fp64=64 * 2.45 * 16,
    loading=10,
    call_s=3e-6,
)

_NVLINK_4 = _link(
    "NVLink 4, all to all",
    "900 GB/s both ways: https://glennklockwood.com/garden/processors/h100",
    rate=450,
    latency_s=4e-6,
    summing=_H100,
    busy=0.1,
)
_NVLINK_3 = _link(
    "NVLink 3, all to all",
    "300 + 300 GB/s: https://glennklockwood.com/garden/processors/A100; NCCL attains 230 to 250: "
    "https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests",
    rate=300,
    latency_s=4e-6,
    summing=_A100,
    busy=0.1,
)
_NDR = _link(
    "InfiniBand NDR, 400 Gbit/s for each GPU",
    "the link's rate of 400 Gbit/s",
    rate=50,
    latency_s=8e-6,
    summing=_H100,
    busy=0.1,
)
_HDR = _link(
    "InfiniBand HDR, 200 Gbit/s for each GPU",
    "the link's rate of 200 Gbit/s",
    rate=25,
    latency_s=8e-6,
    summing=_A100,
    busy=0.1,
)
_PCIE_3 = _link(
    "PCIe 3, through the host",
    "15.75 GB/s each way, of which half, since every byte goes in and out of the host's memory",
    rate=15.75 / 2,
    latency_s=15e-6,
    summing=_T4,
    busy=0.1,
)
_PCIE_4 = _link(
    "PCIe 4, through the host",
    "31.5 GB/s each way, of which half, since every byte goes in and out of the host's memory",
    rate=31.5 / 2,
    latency_s=15e-6,
    summing=_RTX_4090,
    busy=0.1,
)


def _ethernet(gigabits: float) -> Link:
    return _link(
        f"Ethernet, {gigabits:g} Gbit/s",
        "the link's rate; TCP through the system's kernel",
        rate=gigabits / 8,
        latency_s=5e-5,
        summing=_EPYC,
        busy=0.3,
    )


def _hosts(device: Device, ranks_per_host: int, within: Link, across: Link) -> Mapping[str, Any]:
    return {
        "devices": (device,),
        "within": within,
        "across": across,
        "ranks_per_host": ranks_per_host,
    }


KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "h100-nvlink": {"devices": (_H100,), "within": _NVLINK_4},
        "h100-infiniband": _hosts(_H100, 8, _NVLINK_4, _NDR),
        "a100-nvlink": {"devices": (_A100,), "within": _NVLINK_3},
        "a100-infiniband": _hosts(_A100, 8, _NVLINK_3, _HDR),
        "t4-pcie": {"devices": (_T4,), "within": _PCIE_3},
        "t4-10gbe": _hosts(_T4, 1, _PCIE_3, _ethernet(10)),
        "rtx-4090-pcie": {"devices": (_RTX_4090,), "within": _PCIE_4},
        "cpu-10gbe": _hosts(_EPYC, 1, _ethernet(10), _ethernet(10)),
        "cpu-1gbe": _hosts(_EPYC, 1, _ethernet(1), _ethernet(1)),
    }
)
