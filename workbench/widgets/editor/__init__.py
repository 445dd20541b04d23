"""The plan editor: every layer of a model, how it is split, and what that costs."""

from workbench.widgets.editor.editor import PlanEditor as PlanEditor
