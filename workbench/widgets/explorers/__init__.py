"""Explorers: what the models say, under sliders."""

from workbench.widgets.explorers.timing import TimingExplorer as TimingExplorer
