"""Machines known from data sheets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from workbench.plan.device import Device
from workbench.plan.link import Link

_H100 = Device(
    name="NVIDIA H100 SXM",
    kind="cuda",
    memory_bytes=80 * 10**9,
    bandwidth=0.8 * 3.35e12,
    flops={"fp32": 0.6 * 67e12, "bf16": 0.5 * 989e12, "fp64": 0.6 * 67e12},
    call_s=8e-6,
)
_CPU = Device(
    name="CPU node",
    kind="cpu",
    memory_bytes=64 * 2**30,
    bandwidth=50e9,
    flops={"fp32": 500e9, "bf16": 500e9, "fp64": 250e9},
    call_s=5e-6,
)
_NVLINK = Link(
    name="NVLink 4",
    latency_s=5e-6,
    bandwidth=0.8 * 450e9,
    reduction_s_per_byte=3 / (0.8 * 3.35e12),
    busy=0.1,
)
_INFINIBAND = Link(
    name="InfiniBand NDR 400",
    latency_s=10e-6,
    bandwidth=0.8 * 50e9,
    reduction_s_per_byte=3 / (0.8 * 3.35e12),
    busy=0.1,
)
_TEN_GIGABIT = Link(
    name="10 GbE", latency_s=50e-6, bandwidth=0.9 * 1.25e9, reduction_s_per_byte=1e-10, busy=0.3
)

KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "h100-nvlink": {"devices": (_H100,), "within": _NVLINK},
        "h100-infiniband": {
            "devices": (_H100,),
            "within": _NVLINK,
            "across": _INFINIBAND,
            "ranks_per_host": 8,
        },
        "cpu-10gbe": {
            "devices": (_CPU,),
            "within": _TEN_GIGABIT,
            "across": _TEN_GIGABIT,
            "ranks_per_host": 1,
        },
    }
)
