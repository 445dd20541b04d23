"""The constants of a network, fitted to measured exchanges by non-negative least squares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.stats

from workbench.plan.io.errors import MachineError
from workbench.predict.closed_form.model import FLAT, Network, Terms

CONSTANTS = ("latency_s", "s_per_byte", "reduction_s_per_byte", "synchronisation_s")
CONFIDENCE = 0.95
Table = npt.NDArray[np.float64]
_SAME = 1e-6  # of a column's length that is left beside the others


@dataclass(frozen=True)
class Measurement:
    """One measured exchange.

    Attributes:
        workers: the number of workers that took part.
        nbytes: the bytes of the gradient on each worker.
        seconds: the seconds from its start to the last worker's end.
        algorithm: a name in `FLAT`.
    """

    workers: int
    nbytes: float
    seconds: float
    algorithm: str = "ring"

    @property
    def terms(self) -> Terms:
        """The counts that make up its time."""
        return FLAT[self.algorithm](self.workers, self.nbytes, None)


@dataclass(frozen=True)
class Fit:
    """Fitted constants, with their quality.

    Attributes:
        network: the network with these constants.
        half_widths: half of the 95 % interval of each fitted constant, in its own unit (of
            "s_per_byte": β); 0 where a constant was given or is at its limit, 0.
        residuals: (predicted - measured) / measured, for each measurement.
    """

    network: Network
    half_widths: Mapping[str, float]
    residuals: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Median of the relative residuals' magnitudes."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def worst_error(self) -> float:
        """Largest of the relative residuals' magnitudes."""
        return float(np.max(np.abs(self.residuals)))

    def __repr__(self) -> str:
        network, half = self.network, self.half_widths
        return (
            f"<Fit of {len(self.residuals)} exchanges: "
            f"α {1e6 * network.latency_s:.3g} ± {1e6 * half['latency_s']:.2g} us, "
            f"1/β {network.bandwidth / 1e6:.4g} MB/s ± {self._relative('s_per_byte'):.1%}, "
            f"γ {1e12 * network.reduction_s_per_byte:.3g} ± "
            f"{1e12 * half['reduction_s_per_byte']:.2g} ps/B, "
            f"S {1e6 * network.synchronisation_s:.3g} ± "
            f"{1e6 * half['synchronisation_s']:.2g} us; "
            f"error {self.median_error:.1%} median, {self.worst_error:.1%} worst>"
        )

    def _relative(self, name: str) -> float:
        return self.half_widths[name] * self.network.bandwidth


def fit(
    measurements: Sequence[Measurement], *, held: Mapping[str, float] = MappingProxyType({})
) -> Fit:
    """Fits the constants with the least squared relative error over all measurements.

    Args:
        measurements: the exchanges, without a codec. All algorithms but recursive doubling add half
            of the bytes that they move, so that β and γ are one constant without it: give γ, which
            a rank can time by itself. α and S need several algorithms or numbers of workers.
        held: the constants that are known, by their names in `CONSTANTS`.

    Raises:
        MachineError: fewer measurements than constants, a time that is not positive, an unknown
            name, or constants that these measurements cannot tell apart.
    """
    if unknown := sorted({*held} - {*CONSTANTS}):
        raise MachineError(f"no constants {unknown}; there are {', '.join(CONSTANTS)}")
    free = [name for name in CONSTANTS if name not in held]
    if len(measurements) < max(1, len(free)):
        raise MachineError(
            f"{len(measurements)} measurements for {len(free)} constants ({', '.join(free)})"
        )
    seconds = np.array([one.seconds for one in measurements])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise MachineError("measured times are positive numbers of seconds")
    table = np.array([_row(one.terms) for one in measurements])
    known = table @ [held.get(name, 0.0) for name in CONSTANTS]
    columns = table[:, [CONSTANTS.index(name) for name in free]] / seconds[:, None]
    _require_distinct(columns, free)
    values, half_widths = _least_squares(columns, (seconds - known) / seconds)
    found = {**held, **dict(zip(free, values, strict=True))}
    if not found["s_per_byte"] > 0:
        raise MachineError("the measured times do not grow with the bytes: no bandwidth in them")
    network = Network(
        1 / found["s_per_byte"],
        found["latency_s"],
        found["reduction_s_per_byte"],
        found["synchronisation_s"],
    )
    predicted = table @ [found[name] for name in CONSTANTS]
    errors = dict.fromkeys(CONSTANTS, 0.0) | dict(zip(free, half_widths, strict=True))
    return Fit(network, MappingProxyType(errors), tuple(map(float, predicted / seconds - 1)))


def _row(terms: Terms) -> tuple[float, ...]:
    return terms.rounds, terms.received, terms.added, terms.calls


def _require_distinct(columns: Table, names: Sequence[str]) -> None:
    """Raises MachineError where a column is a linear combination of the others."""
    lengths = np.linalg.norm(columns, axis=0)
    for index, name in enumerate(names):
        others = np.delete(columns, index, axis=1) / np.delete(lengths, index)
        own = columns[:, index]
        if others.size:
            solved = np.linalg.lstsq(others, own, rcond=None)[0]
            own = own - others @ solved
        if not np.linalg.norm(own) > _SAME * lengths[index]:
            rest = ", ".join(other for other in names if other != name)
            raise MachineError(
                f"these measurements cannot tell {name} from the other constants ({rest}): hold "
                "it, or measure other algorithms or numbers of workers"
            )


def _least_squares(columns: Table, target: Table) -> tuple[list[float], list[float]]:
    """(non-negative values, half of the confidence interval of each that is above 0)."""
    lengths = np.linalg.norm(columns, axis=0)
    scaled = columns / lengths
    values, _ = scipy.optimize.nnls(scaled, target)
    above = values > 0
    half = np.zeros(len(values))
    degrees = len(target) - int(above.sum())
    if degrees > 0 and above.any():
        misses = target - scaled @ values
        variance = float(misses @ misses) / degrees
        spread = np.linalg.inv(scaled[:, above].T @ scaled[:, above]).diagonal() * variance
        half[above] = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, degrees) * np.sqrt(spread)
    return list(map(float, values / lengths)), list(map(float, half / lengths))
