"""The hosts that engines run on: this one, others, and emulated ones."""

from workbench.hosts.emulated.hosts import Hosts as Hosts
