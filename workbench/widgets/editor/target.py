"""What an editor offers, and what a plan is for: a machine, a cluster, or a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension.extension import extension_of, installed, name_of, named
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.layer_plan import LayerPlan, as_scheme
from workbench.plan.placement.schemes import BUILT_IN, Scheme, schemes_of
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.rule import BUILT_IN as RULES
from workbench.plan.plans.rule import GroupRule, Rule
from workbench.predict.search import MemoryLimitError, search
from workbench.predict.search.refusal import bytes_of
from workbench.predict.search.result import summary


class Offered:
    """The schemes and rules of one editor, by their names.

    Args:
        rules: the person's own rules: objects or classes that extend `Rule`, "module:attribute",
            or names of entry points of `workbench.rules`.

    Attributes:
        complaints: what is installed and cannot be offered, with the reason.

    Raises:
        PlanError: one of them is no scheme, or no rule.
    """

    def __init__(self, schemes: Sequence[object] = (), rules: Sequence[object] = ()) -> None:
        self.complaints: list[str] = []
        self._own: dict[str, Own] = {}
        self.rules: dict[str, Rule] = dict(RULES)
        for name, own in installed(Scheme.kind).items():
            self._try(f"scheme {name!r}", partial(self._add_scheme, own))
        for name, own in installed(Rule.kind).items():
            self._try(f"rule {name!r}", partial(self._add_rule, own))
        for one in schemes:
            self._add_scheme(as_scheme(one))
        for one in rules:
            self._add_rule(one)

    def take(self, plan: Plan) -> bool:
        """Offers the own schemes of a plan, too; whether there are new ones among them."""
        of_plan = {
            choice.name: choice.scheme
            for choice in plan.layers.values()
            if choice.is_own and choice.is_at_hand
        }
        changed = any(self._own.get(name) != own for name, own in of_plan.items())
        self._own |= of_plan
        return changed

    def of(self, graph: Graph, layer: Layer) -> list[str]:
        """The names of the schemes that a layer can have; none where it follows its input."""
        built_in = list(schemes_of(layer))
        if layer.name in graph.shares_weights:
            return built_in
        own = [name for name, scheme in self._own.items() if _takes(scheme, layer)]
        return [*built_in, *own] if built_in or not own else ["replicate", *own]

    def scheme(self, given: object) -> object:
        """The scheme that is meant by a name of the menu, or by what a person gives."""
        if isinstance(given, str) and given not in BUILT_IN and given in self._own:
            return self._own[given]
        return as_scheme(given)

    def menu(self) -> list[dict[str, Any]]:
        """The rules, as views have them."""
        return [
            {
                "name": name,
                "description": rule.description,
                "grouped": isinstance(rule, GroupRule),
            }
            for name, rule in self.rules.items()
        ]

    def _add_scheme(self, given: object) -> None:
        if not isinstance(given, Own):
            raise PlanError(f"schemes: {given!r} is no scheme of your own")
        _ = LayerPlan(given).meant  # raises where it cannot be loaded
        self._own[name_of(given)] = given

    def _add_rule(self, given: object) -> None:
        try:
            own = named(given, Rule.kind, ())
            if not isinstance(own, Own):
                raise PlanError(f"rules: {given!r} is no rule of your own")
            rule: Rule = extension_of(own, Rule.kind)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"rules: {error}") from error
        self.rules[rule.name] = rule

    def _try(self, what: str, add: Callable[[], None]) -> None:
        try:
            add()
        except (PlanError, OwnObjectError) as error:
            self.complaints.append(f"the installed {what} is not offered: {error}")


def _takes(scheme: Own, layer: Layer) -> bool:
    try:
        return LayerPlan(scheme).meant.takes(layer)
    except PlanError:  # its own code raised
        return False


RANKS = 4  # where nothing says how many there are

ADVICE = {
    "suggest": "Raise the memory limit, or take more ranks; the plan is as it was.",
    "verify": "print(editor.cluster) shows whether its engines are there; the plan is as it was.",
    "measure": "print(editor.cluster) shows whether its engines are there and free.",
    "apply": "The run goes on as it was, if it has not ended.",
    "load": "The plan is as it was.",
    "save": "Nothing was written.",
}
"""What to do about each of these that failed."""

_NO_MACHINE = (
    "time needs a machine: wb.PlanEditor(plan, wb.Machine.preset('h100-nvlink')), or "
    "editor.machine = cluster.calibrate()"
)
_NO_CLUSTER = "needs engines: wb.PlanEditor(plan, wb.Cluster(4)), or editor.cluster = cluster"
_NO_RUN = "needs a run: wb.PlanEditor(plan, run), or editor.run = cluster.train(experiment)"


@runtime_checkable
class Engines(Protocol):
    """What the editor needs of a cluster; `workbench.client.Cluster` has it, and more."""

    @property
    def devices(self) -> Sequence[Any]:
        """Have `memory_bytes` each."""

    def verify(self, plan: Plan, **options: Any) -> Any:
        """Holds the split model against the unsplit one; has `exact` and `worst`."""

    def calibrate(self, *what: Graph | Plan, **options: Any) -> Machine:
        """Measures the machine."""

    def __len__(self) -> int: ...


@runtime_checkable
class Running(Protocol):
    """What the editor needs of a run; `workbench.client.Run` has it, and more."""

    @property
    def experiment(self) -> Experiment:
        """What runs."""

    def replan(self, plan: Plan, machine: Machine | None = None) -> Any:
        """Goes on under another plan; the answer has `cost` and `wait`."""


@dataclass(frozen=True)
class Suggestion:
    """What a search found.

    Attributes:
        told: what a view shows of them: `text`, `points` (one for each plan) and `limit`.
    """

    plans: tuple[Plan, ...]
    told: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What there is to predict on, to verify on, or to go on under the plan."""

    machine: Machine | None = None
    cluster: Engines | None = None
    run: Running | None = None

    @classmethod
    def of(cls, given: object) -> "Target":
        """From what a user has at hand.

        Raises:
            TypeError: none of these.
        """
        if given is None:
            return cls()
        if isinstance(given, Machine):
            return cls(machine=given)
        if isinstance(given, Running):
            return cls(run=given)
        if isinstance(given, Engines):
            return cls(cluster=given)
        raise TypeError(
            f"a plan is edited for a Machine, a Cluster, a Run or None, got {type(given).__name__}"
        )

    def ranks(self, experiment: Experiment | None) -> int:
        """How many ranks a first plan is for."""
        if experiment is not None:
            return int(experiment.plan.world_size)
        if self.cluster is not None:
            return len(self.cluster)
        if self.machine is not None and len(self.machine.devices) > 1:
            return len(self.machine.devices)
        return RANKS

    @property
    def memory_bytes(self) -> int | None:
        """Of the smallest device; None: nobody knows."""
        if self.machine is not None:
            return min(device.memory_bytes for device in self.machine.devices)
        if self.cluster is not None:
            return min(device.memory_bytes for device in self.cluster.devices)
        return None

    @property
    def possible(self) -> dict[str, str]:
        """For each thing that can be asked "" where it can be had, or what it needs."""
        return {
            "suggest": "" if self.machine is not None else _NO_MACHINE,
            "verify": "" if self.cluster is not None else _NO_CLUSTER,
            "measure": "" if self.cluster is not None else _NO_CLUSTER,
            "apply": "" if self.run is not None else _NO_RUN,
        }

    def suggest(self, plan: Plan, experiment: Experiment, limit: str) -> Suggestion:
        """Searches the fastest plan that fits, and those that need less memory.

        Args:
            plan: the plan whose model and world size are searched for.
            experiment: what a step is.
            limit: the memory of a rank, such as "2GiB"; "": that of its device.

        Raises:
            ValueError: there is no machine.
            PlanError: the limit is none.
        """
        if self.machine is None:
            raise ValueError(_NO_MACHINE)
        most = limit or None
        try:
            found = search(plan, self.machine, experiment, memory_limit=most)
        except MemoryLimitError as error:
            point = {"step_s": None, "peak": error.needed, "plan": summary(error.plan)}
            least = None if most is None else bytes_of(most)
            told: dict[str, Any] = {"text": str(error), "points": [point], "limit": least}
            return Suggestion((error.plan,), told)
        points = [
            {"step_s": one.step_time, "peak": one.peak_bytes, "plan": summary(one.plan)}
            for one in found.pareto
        ]
        proven = "proven to be the best"
        best = f"at most {found.gap:.1%} above the best" if found.gap else proven
        text = f"{found.judged} plans predicted in {found.seconds:.1f} s; the fastest is {best}."
        told = {"text": text, "points": points, "limit": found.memory_limit}
        return Suggestion(tuple(one.plan for one in found.pareto), told)

    def verify(self, plan: Plan, module: Any) -> dict[str, Any]:
        """Holds the split model against the unsplit one on the cluster.

        Raises:
            ValueError: there is no cluster.
        """
        if self.cluster is None:
            raise ValueError(f"verify {_NO_CLUSTER}")
        found = self.cluster.verify(plan, **_given(module))
        worst = found.worst
        verdict = "Exact" if found.exact else "NOT exact"
        return {
            "good": bool(found.exact),
            "text": f"{verdict}: {len(found.differences)} tensors of {found.precision}, the worst "
            f"{worst.what} of {worst.name} on rank {worst.rank} is off by {worst.error:.1e} "
            f"(tolerance {found.tolerance(worst.what):.0e}).",
        }

    def measure(self, graph: Graph, module: Any) -> Machine:
        """Calibrates the cluster for a model, so that time can be predicted.

        Raises:
            ValueError: there is no cluster.
        """
        if self.cluster is None:
            raise ValueError(f"measure {_NO_CLUSTER}")
        return self.cluster.calibrate(graph, **_given(module))

    def apply(self, plan: Plan) -> dict[str, Any]:
        """Has the run go on under the plan after its current step.

        Raises:
            ValueError: there is no run.
        """
        if self.run is None:
            raise ValueError(f"apply {_NO_RUN}")
        request = self.run.replan(plan, self.machine)
        moved = max(request.cost.received_bytes) / 1e6
        request.wait()
        text = f"The run goes on under this plan; {moved:,.1f} MB at most came to a rank."
        return {"good": True, "text": text}


def _given(module: Any) -> dict[str, Any]:
    return {} if module is None else {"module": module}
