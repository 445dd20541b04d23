"""The plan editor: the plan that it shows is the one that runs."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.question import required_plan, usual
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.io.html import Markup
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import Prediction
from workbench.predict.search.result import summary
from workbench.widgets.base.widget import BackgroundTasks, Widget
from workbench.widgets.editor import edits, still
from workbench.widgets.editor.forecast import Figures, PlanForecaster, Question
from workbench.widgets.editor.state import EditorModel
from workbench.widgets.editor.target import ADVICE, Offered, Target

if TYPE_CHECKING:
    import pandas

Refusals = (PlanError, ExperimentError, MachineError)


class PlanEditor(Widget):
    """Shows every layer of a plan and what it costs; edits lead to other plans, one after another.

    `plan` is readable, assignable and observable, as are `experiment` and `machine`; what is
    assigned is shown, and what is edited is assigned. `traitlets.link((a, "plan"), (b, "plan"))`
    makes two editors show one plan. An edit that cannot be is refused where it was made, with the
    reason, and the plan stays as it is.

    Args:
        plan: a plan; or a graph, which begins as data parallel; or an experiment, whose own plan is
            meant.
        target: a machine to predict time on; or a cluster, to verify the plan and measure the
            machine on; or a run, to go on under the plan; None: memory and traffic are predicted.
        experiment: batch, optimizer, precision and strategy that predictions are for; None: a step
            of momentum SGD with 32 samples for each rank.
        world_size: number of ranks of a graph's first plan; None: as many as the target has, or 4.
        module: the user's own module, where the model was traced from one, for `verify`.
        schemes: schemes of your own that the menu offers besides the built-in ones, those of the
            plan, and installed ones (entry points of `workbench.schemes`).
        rules: plan rules of your own that the menu offers besides the built-in and installed ones
            (entry points of `workbench.rules`).

    Attributes:
        plan: the plan as it is.
        experiment: what predictions are for; its own plan is put aside.
        machine: the machine that time is predicted on, or None.
        prediction: the prediction of the plan, once it is known; None before.
        cluster: the engines that verify the plan, or None.
        run: the run that the plan can be applied to, or None.

    Raises:
        TypeError: no graph, plan or experiment, or a target that is none.
        PlanError: what was given as a scheme or a rule is none.
    """

    script = "editor"

    plan = traitlets.Instance(Plan)
    experiment = traitlets.Instance(Experiment)
    machine = traitlets.Instance(Machine, allow_none=True)
    cluster = traitlets.Any()
    run = traitlets.Any()
    prediction = traitlets.Instance(Prediction, allow_none=True, read_only=True)

    # What a view begins with; from then on it gets patches. The view keeps it up to date, so
    # that a saved notebook holds what was last seen.
    _state = traitlets.Dict().tag(sync=True)

    # One lock for all editors: linked ones edit each other, and with a lock for each, two edits
    # at once would wait for each other forever.
    _edits = threading.RLock()
    _begun = False

    def __init__(
        self,
        plan: Graph | Plan | Experiment,
        target: object = None,
        experiment: Experiment | None = None,
        *,
        world_size: int | None = None,
        module: Any = None,
        schemes: Sequence[object] = (),
        rules: Sequence[object] = (),
    ) -> None:
        if not isinstance(plan, Graph | Plan | Experiment):
            raise TypeError(
                f"PlanEditor takes an Experiment, a Graph or a Plan, got {type(plan).__name__}"
            )
        goal = Target.of(target)
        if isinstance(plan, Experiment):
            experiment = experiment or plan
            plan = required_plan("PlanEditor", plan)
        if goal.run is not None:
            experiment = experiment or goal.run.experiment
        if isinstance(plan, Graph):
            plan = Plan.data_parallel(plan, world_size or goal.ranks(experiment))
        self.module = module
        self._rank: int | None = None
        self._suggested: tuple[Plan, ...] = ()
        self._label: tuple[str, tuple[str, ...]] = ("", ())
        self._offered = Offered(schemes, rules)
        self._model = EditorModel(plan, experiment or usual(plan), self._offered)
        self._forecaster = PlanForecaster(self._predicted, self._unpredicted, self.keep)
        self._tasks = BackgroundTasks(self._tell, ADVICE)
        with self._edits:
            self._note_target(goal)
            state = self._model.state()
            super().__init__(
                plan=plan, experiment=self._model.experiment, **vars(goal), _state=state
            )
            self._model.patch()
            self._begun = True
            self.on_msg(self._receive)
            self._ask()

    @property
    def errors(self) -> Mapping[str, str]:
        """What was refused last: by "INDEX:FIELD" of a cell, or FIELD of the plan, the reason."""
        return dict(self._model.values["errors"])

    def undo(self) -> Plan:
        """Takes the last edit back."""
        with self._edits:
            self.plan = self._model.undo()
            return self.plan

    def redo(self) -> Plan:
        """Makes the last edit again that was undone."""
        with self._edits:
            self.plan = self._model.redo()
            return self.plan

    def edit(self, layers: str | Iterable[str], field: str, value: Any) -> Plan:
        """What a person does in the table: gives layers another value in one field.

        Args:
            layers: a layer's name, or several.
            field: one of "scheme", "group", "shares" or "recompute".
            value: the value as the table shows it: "shard_out", 4, "3 1", True; or a scheme of your
                own.

        Raises:
            PlanError: it cannot be; the cells are marked, and the plan stays as it is.
        """
        names = [layers] if isinstance(layers, str) else list(layers)
        with self._edits:
            places = [f"{self._model.index(n)}:{field}" for n in names if n in self._model.names]
            self._try(places, lambda: self._edited(names, field, value))
            return self.plan

    def edit_plan(self, field: str, value: Any) -> Plan:
        """Gives the whole plan another "world_size", "rounds", "batch_norm", "rows" or "tokens".

        Raises:
            PlanError: it cannot be; the field is marked, and the plan stays as it is.
        """
        with self._edits:
            self._try([field], lambda: edits.whole(self.plan, field, value))
            return self.plan

    def preset(self, name: str, group_size: int | None = None) -> Plan:
        """Goes on with a plan by a rule: "data parallel", "hybrid", "filters" or another on offer.

        Raises:
            PlanError: no such rule, a group size that does not divide the world, or a rule of your
                own that made no plan; the plan stays as it is.
        """
        with self._edits:
            graph, world = self.plan.graph, self.plan.world_size
            rules = self._offered.rules
            self._try(["preset"], lambda: edits.preset(graph, world, rules, name, group_size))
            return self.plan

    def go_on(self, plan: Plan, what: str, notes: tuple[str, ...] = ()) -> None:
        """Assigns a plan, and says what led to it.

        Args:
            plan: the next plan.
            what: the edit in a few words, as undo and redo name it.
            notes: what else should be known of it.
        """
        with self._edits:
            self._model.clear_errors()
            if plan == self.plan:
                self._push()
                return
            self._label = (what, notes)
            self.plan = plan

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until everything that was asked for is known; whether that was in time."""
        return self._tasks.wait(timeout) and self._forecaster.settle(timeout)

    def close(self) -> None:
        """Ends the view and its thread; the plan stays readable."""
        if self._begun:
            self._forecaster.close()
            self._tasks.close()
        super().close()

    def to_frame(self) -> "pandas.DataFrame":
        """The table of the plan as it is."""
        return self.plan.to_frame()

    def pictures(self) -> Sequence[Markup]:
        """What each rank holds."""
        return [still.devices_svg(self.plan)]

    def still(self) -> Markup:
        """The table, the totals and the picture of devices, as HTML without scripts."""
        with self._edits:
            return still.html(self.plan, self._model.columns, self._model.values)

    def __repr__(self) -> str:
        predicted = "" if self.prediction is None else f", {self.prediction!r}"
        return f"<PlanEditor: {self.plan!r}{predicted}>"

    def _edited(self, names: list[str], field: str, value: Any) -> edits.Edited:
        value = self._offered.scheme(value) if field == "scheme" else value
        return edits.edited(self.plan, names, field, value)

    def _try(self, places: Iterable[str], make: Callable[[], edits.Edited]) -> None:
        """Makes an edit, or marks where it was refused."""
        try:
            found = make()
        except Refusals as error:
            self._model.refuse(places, str(error))
            self._push()
            raise
        self.go_on(found.plan, found.what, found.notes)

    @traitlets.observe("plan")
    def _plan_changed(self, change: Mapping[str, Any]) -> None:
        if not self._begun:
            return
        with self._edits:
            (what, notes), self._label = self._label, ("", ())
            if self.plan.graph == self._model.plan.graph:
                self._model.take(self.plan, what or "assigned", notes)
                if self._model.offer(self.plan):  # of which no view has heard
                    self._model.patch()
                    self.send({"type": "state", "state": self._model.state()})
                self._refresh()
                return
            # Another model: a view begins anew.
            self._model = EditorModel(self.plan, self.experiment, self._offered)
            self._note_target(self._target)
            self._suggested, self._rank = (), None
            self._model.patch()
            self.send({"type": "state", "state": self._model.state()})
            self._ask()

    @traitlets.observe("experiment", "machine")
    def _setting_changed(self, change: Mapping[str, Any]) -> None:
        if not self._begun:
            return
        with self._edits:
            self._note_target(self._target)
            self._model.run_with(self.experiment)
            self._refresh()

    @traitlets.observe("cluster", "run")
    def _target_changed(self, change: Mapping[str, Any]) -> None:
        if self._begun:
            with self._edits:
                self._note_target(self._target)
                self._refresh()

    @property
    def _target(self) -> Target:
        return Target(self.machine, self.cluster, self.run)

    def _note_target(self, target: Target) -> None:
        self._limit = target.memory_bytes
        name = "" if target.machine is None else target.machine.name
        self._model.say(machine=name, can=target.possible)

    def _refresh(self) -> None:
        self._push()
        self._ask()

    def _push(self) -> None:
        """Tells the views what changed."""
        with self._edits:
            if patch := self._model.patch():
                self.send({"type": "patch", **patch})

    def _ask(self) -> None:
        self.set_trait("prediction", None)
        question = Question(self.plan, self.machine, self.experiment, self._rank, self._limit)
        self._forecaster.ask(question)

    def _predicted(self, question: Question, prediction: Prediction, figures: Figures) -> None:
        with self._edits:
            if question.plan is self.plan:
                self.set_trait("prediction", prediction)
            self._model.predicted(question.plan, figures)
            self._push()

    def _unpredicted(self, question: Question, reason: str) -> None:
        with self._edits:
            self._model.cannot_predict(question.plan, reason)
            self._push()

    def _tell(self, name: str, state: Mapping[str, Any]) -> None:
        with self._edits:
            self._model.task(name, state)
            self._push()

    def _receive(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        """What a view asks for. It may come on several threads at once."""
        with self._edits:
            try:
                self._carry_out(content)
            except Refusals:
                pass  # the cell is marked
            except Exception as error:  # a click in vain must not be lost in a log
                self._tell("editor", {"state": "failed", "text": f"{error}", "advice": ""})
            self.send({"type": "heard"})  # a view that hears nothing says so

    def _carry_out(self, content: Mapping[str, Any]) -> None:
        match content["type"]:
            case "hello":
                self.send({"type": "state", "state": self._model.state()})
            case "edit":
                layers = self.plan.graph.layers
                names = [layers[index].name for index in content["layers"]]
                self.edit(names, content["field"], content["value"])
            case "plan":
                self.edit_plan(content["field"], content["value"])
            case "preset":
                self.preset(content["name"], content["group"])
            case "undo":
                self.undo()
            case "redo":
                self.redo()
            case "rank":
                self._rank = content["rank"]
                self._ask()
            case "batch_size":
                self._set_batch(content["value"])
            case "take":
                plan = self._suggested[content["index"]]
                self.go_on(plan, f"suggested: {summary(plan)}")
            case "save" | "load" as name:
                path = str(content.get("path") or "").strip()
                self._tasks.at_once(name, partial(getattr(self, f"_{name}"), path))
            case "suggest":
                self._suggest(str(content.get("limit") or "").strip())
            case "verify":
                work = partial(self._target.verify, self.plan, self.module)
                text = "The split model runs against the unsplit one …"
                self._tasks.start("verify", work, text)
            case "measure":
                work = partial(self._measure, self._target, self.plan.graph)
                text = "Engines measure layers and links; about a minute …"
                self._tasks.start("measure", work, text)
            case "apply":
                work = partial(self._target.apply, self.plan)
                text = "The run changes its plan after the current step …"
                self._tasks.start("apply", work, text)
            case other:
                raise ValueError(f"an editor cannot do {other!r}")

    def _set_batch(self, size: Any) -> None:
        try:
            self.experiment = self.experiment.replace(batch_size=size)
        except ExperimentError as error:
            self._model.refuse(["batch_size"], str(error))
        else:
            self._model.clear_errors()
        self._push()

    def _suggest(self, limit: str) -> None:
        target, plan, experiment = self._target, self.plan, self.experiment

        def work() -> Mapping[str, Any]:
            found = target.suggest(plan, experiment, limit)
            self._suggested = found.plans
            return found.told

        text = f"Searching plans for {plan.world_size} ranks …"
        self._tasks.start("suggest", work, text)

    def _measure(self, target: Target, graph: Graph) -> dict[str, Any]:
        self.machine = target.measure(graph, self.module)
        return {"text": f"Measured: {self.machine.name}."}

    def _save(self, path: str) -> Mapping[str, Any]:
        self.plan.save(_named(path))
        return {"text": f"Saved {Path(path).resolve()}."}

    def _load(self, path: str) -> Mapping[str, Any]:
        found = Plan.load(_named(path), self.plan.graph)
        _ = found.flow  # refuses a plan whose schemes were not imported
        self.go_on(found, f"loaded {Path(path).name}")
        return {"text": f"Loaded {Path(path).resolve()}."}


def _named(path: str) -> Path:
    if not path:
        raise ValueError("no file was named; write a path such as plan.toml")
    return Path(path).expanduser()
