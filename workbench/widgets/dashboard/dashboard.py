"""A live view of runs: how they learn, what each rank does and needs, and what can be done."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import traitlets

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.html import Markup
from workbench.plan.machine.machine import Machine
from workbench.widgets.base.widget import BackgroundTasks, Widget, failed
from workbench.widgets.dashboard import commands, still
from workbench.widgets.dashboard.message import DashboardState, Message, MessageMaker
from workbench.widgets.dashboard.runs import (
    LOOK_EVERY_S,
    Run,
    Status,
    WatchedRun,
    WatchedRuns,
    runs_of,
)
from workbench.widgets.dashboard.series import RankFigures
from workbench.widgets.dashboard.timeline import (
    Forecaster,
    RunForecast,
    StepTimeline,
    TimelineCache,
)

if TYPE_CHECKING:
    import pandas


class Dashboard(Widget):
    """Shows runs while they train, or after it; one of them in detail, and what can be done to it.

    Runs only *notify*: a thread of the dashboard's own then reads what is new, joins it and sends
    it, so a slow browser never holds up a run. Whatever the step rate, views get at most one
    message per `interval_s`, and always the last state.

    `runs`, `shown`, `machine` and `first_rank` are readable, assignable and observable; `state` is
    observable.

    Args:
        runs: a run in any state, of this process or attached to; or several, to be overlaid; or
            several by name.
        machine: the machine that time is predicted on; None: memory and traffic are predicted.
        interval_s: Least seconds between two messages.

    Attributes:
        runs: the runs, by the name that each is shown under.
        shown: the name of the run that is shown in detail.
        machine: the machine that time is predicted on, or None.
        first_rank: the first of the ranks in the timeline.
        state: the state of the run that is shown, as last read.

    Raises:
        TypeError: something else than runs.
        ValueError: there is no run.
    """

    script = "dashboard"

    runs = traitlets.Any()
    shown = traitlets.Unicode()
    machine = traitlets.Instance(Machine, allow_none=True)
    first_rank = traitlets.Int(0, min=0)
    state = traitlets.Unicode(read_only=True)

    # What a view without a kernel starts from. Set at the beginning and at the end of the runs;
    # in between, views get messages with only what is new, and a late one asks for everything.
    _content = traitlets.Dict().tag(sync=True)
    _numbers = traitlets.Bytes().tag(sync=True)

    _begun = False

    def __init__(
        self, runs: object, machine: Machine | None = None, *, interval_s: float = 0.1
    ) -> None:
        self.interval_s = interval_s
        self._reading, self._guard = threading.Lock(), threading.RLock()
        self._news, self._closing = threading.Event(), threading.Event()
        self._watched = WatchedRuns(self._guard, self._news.set)
        self._sender = MessageMaker()
        self._saved: tuple[object, ...] = ()
        self._forecast, self._timelines = RunForecast.none(), (StepTimeline(), StepTimeline())
        self._drawing = TimelineCache()
        self._outcome: dict[str, Any] = {}
        self._forecaster = Forecaster(self._predicted)
        self._tasks = BackgroundTasks(self._tell, commands.ADVICE)
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
        found = runs_of(runs)
        self._watched.watch(found)
        super().__init__(runs=found, shown=next(iter(found)), machine=machine)
        self._begun = True
        self.on_msg(self._receive)
        self._thread.start()

    @property
    def run(self) -> Run:
        """The run that is shown; another one may be assigned in its place."""
        return self._here.run

    @run.setter
    def run(self, run: Run) -> None:
        self.runs = {**self.runs, self.shown: run}

    @property
    def status(self) -> Status:
        """Where the run that is shown stands."""
        self._read()
        return self._here.status

    @property
    def series(self) -> dict[str, list[float]]:
        """What the line charts show: "step", "loss", "samples_per_s", "accuracy"; NaN is a gap.

        Where an experiment has metrics of its own, "accuracy" is the first of them.
        """
        self._read()
        with self._guard:
            return self._here.series.columns

    @property
    def ranks(self) -> list[RankFigures]:
        """What the bars show, for rank 0, 1, ..."""
        self._read()
        with self._guard:
            return self._here.series.ranks

    @property
    def events(self) -> list[str]:
        """What happened to it, the oldest first."""
        self._read()
        with self._guard:
            return [line.text for line in self._here.events.lines]

    @property
    def forecast(self) -> RunForecast:
        """What is predicted of it."""
        return self._forecast

    def do(self, name: str, **content: Any) -> None:
        """Does what a control does; what comes of it is among the events.

        Args:
            name: one of "stop", "pause", "resume", "checkpoint", "lr", "kill", "halt", "release",
                "slow".
            content: the `value` of a learning rate; the `rank` of a fault, and the `factor` to slow
                it by.

        Raises:
            ValueError: there is no such control.
        """
        work, run, shown = commands.work_of(name), self.run, self.shown

        def task() -> Mapping[str, Any]:
            return {"text": work(run, content), "run": shown}

        self._tasks.start(name, task, commands.DOING[name])

    def settle(self, timeout: float = 60.0) -> bool:
        """Waits until what was asked for is done and predicted; whether that was in time."""
        return self._tasks.wait(timeout) and self._forecaster.settle(timeout)

    def open(self) -> None:
        """Opens the way to views, which have something to show from the start."""
        self._read()
        self._fill()
        super().open()

    def close(self) -> None:
        """Ends the view; the runs go on."""
        if self._begun and not self._closing.is_set():
            self._closing.set()
            self._news.set()
            self._watched.close()
            self._forecaster.close()
            self._tasks.close()
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()  # it may be sending, and a closed widget cannot
        super().close()

    def to_frame(self) -> "pandas.DataFrame":
        """The metrics of the run that is shown."""
        return self.run.rows.to_frame()

    def pictures(self) -> Sequence[Markup]:
        """The charts, as one picture."""
        self._read()
        with self._guard:
            return [still.picture(self._watched, self.shown, self._forecast, self._timelines)]

    def still(self) -> Markup:
        """Charts and tables, as they are now."""
        self._read()
        with self._guard:
            return still.html(self._watched, self.shown, self._forecast, self._timelines)

    def __repr__(self) -> str:
        return f"<Dashboard: {self.status}>"

    @property
    def _here(self) -> WatchedRun:
        return self._watched[self.shown]

    @traitlets.validate("runs")
    def _are_runs(self, proposal: Mapping[str, Any]) -> dict[str, Run]:
        return runs_of(proposal["value"])

    @traitlets.validate("shown")
    def _is_there(self, proposal: Mapping[str, str]) -> str:
        name = proposal["value"]
        if name not in self._watched:
            raise traitlets.TraitError(f"there is no run {name!r}; there are {[*self._watched]}")
        return name

    @traitlets.observe("runs")
    def _runs_changed(self, change: Mapping[str, Any]) -> None:
        if not self._begun:
            return
        with self._reading, self._guard:
            self._watched.watch(self.runs)
            if self.shown not in self._watched:
                self.shown = next(iter(self._watched))
            self._sender.forget()
        self._news.set()

    @traitlets.observe("shown", "machine", "first_rank")
    def _setting_changed(self, change: Mapping[str, Any]) -> None:
        if self._begun:
            self._sender.forget()
            self._news.set()

    def _follow(self) -> None:
        while not self._closing.is_set():
            self._news.clear()
            try:
                self._read()
            except Exception as error:  # else the picture would stand still, and nobody know why
                self._tell("dashboard", failed(f"The run cannot be read: {error!r}"))
            self._post(whole=False)
            every = list(self._watched.values())
            has_ended = all(each.status.ended for each in every)
            if has_ended:
                self._save()  # and wait: they may be resumed
            if self._closing.wait(self.interval_s):
                return
            is_lost = any(each.is_lost for each in every)
            self._news.wait(None if has_ended and not is_lost else LOOK_EVERY_S)

    def _read(self) -> None:
        with self._reading:
            every = dict(self._watched)
            for each in every.values():
                each.read()
            shown = self._here
        self.set_trait("state", shown.status.state)
        for name, each in every.items():
            if each.is_lost and (found := each.successor()) is not None:
                self.runs = {**self.runs, name: found}
        experiment = shown.run.experiment
        if isinstance(experiment, Experiment):
            self._forecaster.ask(experiment, self.machine)
        timelines = self._drawing.of(shown, self._forecast, self.first_rank)
        with self._guard:
            self._timelines = timelines

    def _predicted(self, forecast: RunForecast) -> None:
        with self._guard:
            self._forecast = forecast
        self._news.set()

    def _tell(self, name: str, state: Mapping[str, Any]) -> None:
        """How a control's task stands."""
        with self._guard:
            self._outcome = {"last": name, "of": {**self._outcome.get("of", {}), name: {**state}}}
            watched = self._watched.get(state.get("run", self.shown), self._here)
            if state["state"] == "failed":
                watched.events.add(str(state["text"]), "error")
            elif state["state"] == "done" and name in commands.FAULTS:  # the run notes all else
                watched.events.add(str(state["text"]))
        self._news.set()

    def _post(self, *, whole: bool) -> None:
        with self._guard:  # messages go in the order in which they were made
            message = self._message(whole=whole)
            if not message.is_empty:
                self.send(message.content, buffers=[message.buffer])

    def _message(self, *, whole: bool) -> Message:
        with self._guard:
            state = DashboardState(
                self._watched, self.shown, self._forecast, self._timelines, self._outcome
            )
            return self._sender.message(state, whole=whole)

    def _receive(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        """What a view asks for. It may come on several threads at once."""
        kind = content.get("type")
        with suppress(traitlets.TraitError):  # a run that was there when the view asked
            if kind == "do":
                self._carry_out(content)
            elif kind == "show":
                self.shown = content.get("name", self.shown)
            elif kind == "ranks":
                self.first_rank = int(content.get("first", 0))
        if kind == "hello":
            self._post(whole=True)
        else:
            self.send({"type": "heard"})  # a view that hears nothing says so

    def _carry_out(self, content: Mapping[str, Any]) -> None:
        given = {k: v for k, v in content.items() if k in ("value", "rank", "factor")}
        try:
            self.do(str(content.get("name")), **given)
        except ValueError as error:
            self._tell(str(content.get("name")), failed(str(error)))

    def _save(self) -> None:
        """Keeps what saved notebooks hold: traits, and a picture for where there are no widgets."""
        every = [(each.run, each.status, each.events.version) for each in self._watched.values()]
        stamp = (*every, self.shown, self._forecast, self._outcome)
        if stamp == self._saved:
            return
        self._saved = stamp
        self._fill()
        self.keep()

    def _fill(self) -> None:
        message = self._message(whole=True)
        with self.hold_sync():  # a view that opens finds both of one moment
            self._content, self._numbers = message.content, message.buffer
