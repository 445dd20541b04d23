"""What a notebook shows: live views of the library's values and runs."""

from workbench.widgets.charts import AccuracyChart as AccuracyChart
from workbench.widgets.charts import TimingChart as TimingChart
from workbench.widgets.dashboard import Dashboard as Dashboard
from workbench.widgets.editor import PlanEditor as PlanEditor
from workbench.widgets.explorers import MemoryMap as MemoryMap
from workbench.widgets.explorers import ScalingExplorer as ScalingExplorer
from workbench.widgets.explorers import StalenessExplorer as StalenessExplorer
from workbench.widgets.explorers import TimingExplorer as TimingExplorer
from workbench.widgets.explorers import TrafficMatrix as TrafficMatrix
from workbench.widgets.tables import ClusterView as ClusterView
from workbench.widgets.tables import JobTable as JobTable
