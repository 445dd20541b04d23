"""What a view asks for: edits and errands, by the type of its message."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.plan.errors import ExperimentError
from workbench.widgets.editor import services

if TYPE_CHECKING:
    from workbench.widgets.editor.editor import PlanEditor

Content = Mapping[str, Any]


def carry_out(editor: "PlanEditor", content: Content) -> None:
    """Does what a message says.

    Raises:
        PlanError: an edit that cannot be; its cell is marked already.
        KeyError: a message of no known type, or without what it needs.
    """
    handlers: dict[str, Callable[[Content], object]] = {
        "hello": lambda _: editor.send({"type": "state", "state": editor._model.state()}),
        "edit": partial(_edit, editor),
        "plan": lambda c: editor.edit_plan(c["field"], c["value"]),
        "preset": lambda c: editor.preset(c["name"], c["group"]),
        "undo": lambda _: editor.undo(),
        "redo": lambda _: editor.redo(),
        "rank": partial(_look_at, editor),
        "batch_size": partial(_set_batch, editor),
        **{name: partial(getattr(services, name), editor) for name in services.NAMES},
    }
    handlers[content["type"]](content)


def _edit(editor: "PlanEditor", content: Content) -> None:
    layers = editor.plan.graph.layers
    names = [layers[index].name for index in content["layers"]]
    editor.edit(names, content["field"], content["value"])


def _look_at(editor: "PlanEditor", content: Content) -> None:
    editor._rank = content["rank"]
    editor._ask()


def _set_batch(editor: "PlanEditor", content: Content) -> None:
    try:
        editor.experiment = editor.experiment.replace(batch_size=content["value"])
    except ExperimentError as error:
        editor._model.refuse(["batch_size"], str(error))
    else:
        editor._model.clear_errors()
    editor._push()
