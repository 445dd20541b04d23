"""A step as data: what each rank executes, made from a plan and an experiment."""

from workbench.program.step import Program as Program
from workbench.program.step import program as program
