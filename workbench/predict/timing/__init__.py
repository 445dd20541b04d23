"""Timing models of step strategies in closed form, and the constants that they are made of."""

from workbench.predict.timing.exchanges import (
    FLAT,
    direct,
    halving_doubling,
    hierarchical,
    parameter_server,
    recursive_doubling,
    ring,
)
from workbench.predict.timing.fit import Fit, Measurement, fit
from workbench.predict.timing.iterations import (
    Compute,
    gain_bound,
    pipelined_s,
    pipelined_total_s,
    ratio_r,
    synchronous_s,
    unlimited_s,
)
from workbench.predict.timing.model import ONCE, TimingModel
from workbench.predict.timing.terms import Coding, Network, Terms
from workbench.predict.timing.where import Range, fastest, where_fastest

__all__ = [
    "FLAT",
    "ONCE",
    "Coding",
    "Compute",
    "Fit",
    "Measurement",
    "Network",
    "Range",
    "Terms",
    "TimingModel",
    "direct",
    "fastest",
    "fit",
    "gain_bound",
    "halving_doubling",
    "hierarchical",
    "parameter_server",
    "pipelined_s",
    "pipelined_total_s",
    "ratio_r",
    "recursive_doubling",
    "ring",
    "synchronous_s",
    "unlimited_s",
    "where_fastest",
]
