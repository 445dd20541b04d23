"""Explorers: what the models say, under sliders."""

from workbench.widgets.explorers.memory_map import MemoryMap as MemoryMap
from workbench.widgets.explorers.scaling import ScalingExplorer as ScalingExplorer
from workbench.widgets.explorers.staleness import StalenessExplorer as StalenessExplorer
from workbench.widgets.explorers.timing import TimingExplorer as TimingExplorer
from workbench.widgets.explorers.traffic_matrix import TrafficMatrix as TrafficMatrix
