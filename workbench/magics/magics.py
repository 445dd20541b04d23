"""`%wb` and `%%ranks`: what `%load_ext workbench` adds to a notebook."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from workbench.client.cluster import Cluster
from workbench.client.ranks import CellOutput, Ranks
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan


class CellFailed(RuntimeError):
    """A cell did not end well on all ranks.

    Attributes:
        output: what it came to, with tracebacks.
    """

    def __init__(self, output: CellOutput) -> None:
        self.output = output
        failed = output.failed
        if failed:
            told = f"rank {failed[0].rank} raised {failed[0].error}"
            told += f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        else:
            told = "the cell was interrupted"
        super().__init__(told)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the ranks' own tracebacks are above."""
        return [f"CellFailed: {self}"]


T = TypeVar("T")


def named(names: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """Values of a kind, by the names that the notebook gave them; IPython's own left out."""
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, kind) and not name.startswith("_")
    }


def the_only(names: Mapping[str, Any], kind: type[T], what: str, remedy: str) -> T:
    """The one value of a kind.

    Raises:
        LookupError: there is none, or several.
    """
    found = named(names, kind)
    different = {id(value): name for name, value in found.items()}
    if len(different) == 1:
        return next(iter(found.values()))
    if not found:
        raise LookupError(f"this notebook has no {what}: {remedy}")
    several = ", ".join(sorted(found))
    raise LookupError(f"this notebook has more than one {what} ({several}): keep one, by del")


OPEN_FIRST = "open some with %wb open PLAN, or ranks = cluster.ranks(plan)"
CLUSTER_FIRST = "cluster = wb.Cluster(4), or wb.Cluster.attach(name)"


@magics_class
class WorkbenchMagics(Magics):
    """The magics of one notebook; what they are about are its own variables."""

    @line_magic
    def wb(self, line: str) -> None:
        """Shows and steers what goes on.

        %wb status        engines, and what uses them
        %wb jobs          all that was submitted
        %wb open PLAN     has engines cut a plan's model and wait for %%ranks; an experiment will
                          do, too. They are the variable `ranks` from then on
        %wb close         gives those engines back

        What follows a # is a comment.

        Raises:
            UsageError: there is no such word, or not the one cluster or plan that it needs.
        """
        word, _, rest = _without_comment(line).partition(" ")
        words: dict[str, Callable[[str], None]] = {
            "status": self._status,
            "jobs": self._jobs,
            "open": self._open,
            "close": self._close,
        }
        if word not in words:
            raise UsageError(f"%wb {' | '.join(words)}; got {word!r}")
        try:
            words[word](rest.strip())
        except LookupError as error:
            raise UsageError(str(error)) from None

    @magic_arguments()
    @argument("--ranks", default=None, help="that run it, such as 0,2 or 1-3; else all of them")
    @argument("--quiet", action="store_true", help="show nothing; `ranks.last` has all")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Runs the cell on ranks that hold a plan's model.

        In reach there: `model` (this rank's part), `plan`, `experiment`, `state`, `rank`,
        `world_size`, `world`, `group` (all ranks), `groups`, `device`, `wb`, `comm`, `torch`,
        `dist`, and what cells before it made. Ranks that say the same are shown together.

        Raises:
            UsageError: not one group of ranks is open, or `--ranks` is no list of numbers.
            CellFailed: the cell raised on a rank, or did not end there.
        """
        chosen = parse_argstring(self.ranks, _without_comment(line))
        try:
            here = the_only(self._open_ranks(), Ranks, "open Ranks", OPEN_FIRST)
            numbers = None if chosen.ranks is None else _numbers(chosen.ranks)
        except (LookupError, ValueError) as error:
            raise UsageError(str(error)) from None
        shown = None if chosen.quiet else display(display_id=True)
        progress: Callable[[CellOutput], None] | None = None if shown is None else shown.update
        found = here.run(cell, numbers, progress)
        if shown is not None:
            shown.update(found)
        if any(each.state != "done" for each in found.ranks):
            raise CellFailed(found)

    @property
    def _names(self) -> dict[str, Any]:
        """The notebook's variables."""
        assert self.shell is not None
        return self.shell.user_ns

    def _status(self, _rest: str) -> None:
        for cluster in _each(self._names, Cluster, "cluster", CLUSTER_FIRST):
            display(cluster)

    def _jobs(self, _rest: str) -> None:
        for cluster in _each(self._names, Cluster, "cluster", CLUSTER_FIRST):
            display(cluster.jobs.table())

    def _open(self, name: str) -> None:
        names = self._names
        known: dict[str, Plan | Experiment] = dict(named(names, Plan))
        known |= named(names, Experiment)
        if name not in known:
            offered = ", ".join(sorted(known)) or "none; plan = wb.Plan.hybrid(graph, 4, 4) is one"
            raise LookupError(f"%wb open PLAN takes the name of a plan or experiment ({offered})")
        cluster = the_only(names, Cluster, "cluster", CLUSTER_FIRST)
        self._close("")
        names["ranks"] = cluster.ranks(known[name])
        display(names["ranks"])

    def _close(self, _rest: str) -> None:
        for name, ranks in self._open_ranks().items():
            ranks.close()
            del self._names[name]

    def _open_ranks(self) -> dict[str, Ranks]:
        found = named(self._names, Ranks)
        return {name: ranks for name, ranks in found.items() if ranks.is_open}


def _each(names: dict[str, Any], kind: type[Any], what: str, remedy: str) -> list[Any]:
    """Every value of a kind, once.

    Raises:
        LookupError: there is none.
    """
    found = {id(value): value for value in named(names, kind).values()}
    return list(found.values()) or [the_only(names, kind, what, remedy)]


def _without_comment(line: str) -> str:
    """The line up to a # that begins a word: IPython hands magics their comments, too."""
    return re.sub(r"(^|\s)#.*", "", line).strip()


def _numbers(text: str) -> list[int]:
    """Of "0,2-4": 0, 2, 3 and 4.

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"--ranks takes numbers such as 0,2 or 1-3, got {text!r}") from None
    return found


WORDS = ("status", "jobs", "open", "close")
OPTIONS = ("--ranks", "--quiet")


def complete_wb(shell: Any, event: Any) -> list[str]:
    """After `%wb`: its words; after `%wb open`: plans and experiments of the notebook."""
    before = event.line.split()
    if len(before) > 2 or (len(before) == 2 and event.line.endswith(" ")):
        names = shell.user_ns
        known = [*named(names, Plan), *named(names, Experiment)]
        return sorted(known) if before[1] == "open" else []
    return list(WORDS)


def complete_ranks(_shell: Any, _event: Any) -> list[str]:
    """After `%%ranks`: its options."""
    return list(OPTIONS)


def register(shell: Any) -> None:
    """Adds `%wb` and `%%ranks`, and what the tab key offers after them, to an IPython shell."""
    shell.register_magics(WorkbenchMagics(shell))
    shell.set_hook("complete_command", complete_wb, str_key="%wb")
    shell.set_hook("complete_command", complete_ranks, str_key="%%ranks")
