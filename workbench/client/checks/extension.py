"""Checks an idea of a person's own, whatever kind it is of, before anything is built on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.client.checks import schemes, strategies, sums
from workbench.client.cluster import Cluster
from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.checks import algorithm_checks, codec_checks
from workbench.comm.codecs.coders import Coder
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import Codec, OwnCodec
from workbench.plan.experiment.sync import Strategy
from workbench.plan.extension.extension import Check, Extension, extension_of
from workbench.plan.extension.user_object import Own
from workbench.plan.io.html import Markup, element, frame_of, save, table
from workbench.plan.placement.schemes import Scheme
from workbench.plan.plans.rule import Rule
from workbench.plan.plans.rule import checks_of as rule_checks_of
from workbench.store.errors import RunError

if TYPE_CHECKING:
    import pandas

# A factor of two that should be the number of ranks is right for two of them.
ENGINES = 3
_MODELS = ("vgg11", "resnet18", "vit_b_16")


@dataclass(frozen=True)
class CheckedExtension:
    """What an extension was checked for, and what came of it.

    Attributes:
        name: its name.
        kind: its kind, such as "codecs".
        checks: each of the checks.
    """

    name: str
    kind: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether all checks hold."""
        return all(check.ok for check in self.checks)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each check."""
        return frame_of(map(asdict, self.checks), ["what", "ok", "said"])

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.csv" is the table, "x.html" a page.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    @property
    def _verdict(self) -> str:
        held = sum(check.ok for check in self.checks)
        return f"{self.name}, one of the {self.kind}: {held} of {len(self.checks)} checks hold"

    def __str__(self) -> str:
        lines = [f"  {'ok ' if c.ok else 'NOT'}  {c.what}: {c.said}" for c in self.checks]
        return "\n".join([self._verdict, *lines])

    def __repr__(self) -> str:
        return f"<CheckedExtension {self._verdict}>"

    def _repr_html_(self) -> Markup:
        rows = [("✓" if check.ok else "✗", check.what, check.said) for check in self.checks]
        return element("div", element("p", self._verdict), table(("", "checked", "found"), rows))


def check_extension(extension: Any, cluster: Cluster | None = None) -> CheckedExtension:
    """Checks that an extension does what the built-in ones of its kind do.

    An algorithm sums as torch does, leaves the same bits on all ranks and exchanges what its dry
    run says; a codec decodes what it encodes, in the bytes that it states; a scheme computes what
    the whole layer computes, with all gradients; a strategy does what its methods say under every
    cut; a rule makes valid plans. All but rules also run on engines, where what each rank receives
    must be what is predicted. An extension that fails in one process is not run on engines.

    Args:
        extension: an object of a class that extends one of `wb.extend`, the class, or
            "module:attribute" of either.
        cluster: a cluster whose engines are free; None: three engines are started, and end with it.
            In a group of two, what is right for two ranks alone is not found.

    Raises:
        TypeError: it is no extension.
        OwnObjectError: it cannot be imported.
        ClusterError: engines are in use, or cannot be started.
    """
    found = _taken(extension)
    if isinstance(found, Rule):
        graphs = [trace(name, input_shape=(3, 224, 224), num_classes=10) for name in _MODELS]
        return _of(found, rule_checks_of(found, graphs))
    checks: list[Check] = []
    with _engines(cluster) as engines:
        try:
            for more in _checks(found, engines):
                checks += more
                if not all(check.ok for check in more):
                    break  # its ranks might wait for each other
        except RunError as error:
            checks.append(Check("runs", False, str(error)))
    return _of(found, checks)


def _taken(given: Any) -> Extension:
    if isinstance(given, str):
        given = Own(name=given).loaded
    if isinstance(given, type) and issubclass(given, Extension):
        given = given()
    if not isinstance(given, Extension):
        raise TypeError(
            f"{given!r} is no extension: it extends none of wb.extend.Algorithm, Codec, Scheme, "
            "Strategy and Rule"
        )
    found: Extension = extension_of(Own.of(given), given.kind)
    return found


def _checks(extension: Extension, cluster: Cluster) -> Iterator[list[Check]]:
    """The checks in one process, and then those on engines."""
    match extension:
        case Algorithm():
            own = Own.of(extension)
            yield algorithm_checks(extension)
            yield sums.checks_on(cluster, algorithm=own)
            if extension.takes_codec:
                yield sums.checks_on(cluster, algorithm=own, codec=Codec(name="int8"))
        case Coder():
            coding = OwnCodec(own=Own.of(extension), error_feedback=False)
            yield codec_checks(extension)
            yield sums.checks_on(cluster, codec=coding)
        case Scheme():
            yield from schemes.checks_of(extension, cluster)
        case Strategy():
            yield strategies.checks_of(extension, cluster)


def _of(extension: Extension, checks: list[Check]) -> CheckedExtension:
    return CheckedExtension(extension.name, extension.kind, tuple(checks))


@contextmanager
def _engines(cluster: Cluster | None) -> Iterator[Cluster]:
    if cluster is not None:
        yield cluster
        return
    with Cluster(ENGINES) as own:
        yield own
