"""Why layers got their schemes: what the best plan with each other choice would take."""

from collections.abc import Mapping

import numpy as np

from workbench.plan.choice import LayerPlan
from workbench.plan.plan import Plan
from workbench.predict.search.bounds.relaxation import Priced
from workbench.predict.search.question import Question
from workbench.predict.search.result import Option, Reason
from workbench.predict.search.space.trellis import Trellis


def reasons_of(
    question: Question, trellis: Trellis, priced: Priced, plan: Plan
) -> Mapping[str, Reason]:
    """For each layer that can be split, its options by the cheapest plan through each.

    Args:
        question: that was asked.
        trellis: of all plans.
        priced: at what price they are compared.
        plan: that was found.
    """
    through = priced.paths.through()
    found = {}
    for layer, stage, costs in zip(trellis.layers, trellis.stages, through, strict=True):
        choices = trellis.options.get(layer.name)
        if choices is None:
            continue
        least = np.full(len(choices), np.inf)
        np.minimum.at(least, stage.choice, costs)
        order = np.argsort(least, kind="stable")
        options = tuple(
            Option(choices[index], float(least[index] - priced.paths.cheapest)) for index in order
        )
        chosen = plan.layers.get(layer.name, LayerPlan())
        found[layer.name] = Reason(layer.name, chosen, layer.name in question.pinned, options)
    return found
