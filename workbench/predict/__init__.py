"""Memory, traffic and time of a plan, computed before it runs: pure functions, without torch."""

from workbench.predict.balance import Balanced, balanced
from workbench.predict.closed_form import Compute, Network, TimingModel
from workbench.predict.memory.memory import Memory, RankMemory
from workbench.predict.prediction import Prediction, predict
from workbench.predict.traffic.traffic import Collective, Traffic

__all__ = [
    "Balanced",
    "Collective",
    "Compute",
    "Memory",
    "Network",
    "Prediction",
    "RankMemory",
    "TimingModel",
    "Traffic",
    "balanced",
    "predict",
]
