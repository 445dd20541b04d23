"""One step of all ranks, tensor by tensor, against what one process computed."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tests.oracle.expected import FLOOR, LEAST, MARGIN, MOST, Expected, largest
from tests.oracle.oracle import Step
from tests.oracle.running import Seen
from workbench.plan.experiment.experiment import (
    LocalSGD,
    Pipelined,
    Synchronous,
)
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan


class Compared:
    """One step of all ranks against the same step of one process."""

    def __init__(self, expected: Expected, plan: Plan, found: list[Seen], step: Step) -> None:
        self.expected, self.plan, self.found, self.step = expected, plan, found, step
        self.experiment = expected.experiment
        self.index = found[0].step
        self.wide = expected.rounded[self.index] if expected.rounded else None
        self.alike = plan.batch_norm != "local" or found[0].evaluation is not None

    def all(self) -> Iterator[str]:
        sync = self.experiment.sync
        yield from self._outputs()
        yield from self._loss()
        yield from self._scale()
        alike = isinstance(sync, Synchronous | Pipelined) and not self.experiment.fused
        if alike and not self.step.skipped:  # those that are no numbers need not be the same ones
            if not (isinstance(sync, Pipelined) and sync.width > 1):
                yield from self._gradients()
        if isinstance(sync, LocalSGD) and not self._averaged(sync):
            return
        yield from self._values("weight", self.step.weights, self.wide and self.wide.weights)
        yield from self._values("buffer", self.step.buffers, self.wide and self.wide.buffers)
        if not isinstance(sync, LocalSGD):
            yield from self._state()
        yield from self._evaluation()

    def _averaged(self, sync: LocalSGD) -> bool:
        return (self.index + 1) % sync.every == 0 or self.index == self.experiment.steps - 1

    def _outputs(self) -> Iterator[str]:
        for place, whole in enumerate(self.step.outputs):
            wide = self.wide.outputs[place] if self.wide else None
            scale = largest(whole)
            for rank, seen in enumerate(self.found):
                span = Shard(0, seen.rows).span(rank)
                mine = whole.narrow(0, *span)
                yield from self._off(
                    "output", str(place), rank, seen.outputs[place], mine, scale, [(whole, wide)]
                )

    def _loss(self) -> Iterator[str]:
        tolerance = max(LEAST[self.experiment.precision], 1e-9) * max(abs(self.step.loss), 1.0)
        if self.wide:
            tolerance = max(tolerance, MARGIN * abs(self.wide.loss - self.step.loss))
        for rank, seen in enumerate(self.found):
            if not abs(seen.loss - self.step.loss) <= tolerance:
                yield f"step {self.index}: loss on rank {rank} is {seen.loss}, not {self.step.loss}"
                return

    def _scale(self) -> Iterator[str]:
        for rank, seen in enumerate(self.found):
            if seen.scale != self.step.scale:
                yield (
                    f"step {self.index}: the loss scale on rank {rank} is {seen.scale}, "
                    f"not {self.step.scale}"
                )

    def _gradients(self) -> Iterator[str]:
        wide = self.wide.gradients if self.wide else None
        known = {n: g for n, g in self.step.gradients.items() if g is not None}
        for rank, seen in enumerate(self.found):
            missing = [
                name
                for name, gradient in seen.gradients.items()
                if gradient is None
                and self.step.gradients[self._listed(name)] is not None
                and self._piece(name, rank).piece_numel(rank)
            ]
            extra = [
                name
                for name, gradient in seen.gradients.items()
                if gradient is not None and self.step.gradients[self._listed(name)] is None
            ]
            if missing:
                yield f"step {self.index}: no gradient of {missing} on rank {rank}"
            if extra:
                yield f"step {self.index}: a gradient of {extra} on rank {rank}, torch has none"
        pieces = [
            {n: g for n, g in seen.gradients.items() if g is not None and self._listed(n) in known}
            for seen in self.found
        ]
        yield from self._pieces("gradient", pieces, known, wide)

    def _values(
        self, what: str, whole: dict[str, Tensor], wide: Mapping[str, Tensor] | None
    ) -> Iterator[str]:
        if what == "buffer" and not self.alike:
            return  # each rank has its own, until somebody asks
        pieces = []
        for seen in self.found:
            names = {n for n in seen.pieces if self.expected.names.get(n) in whole}
            pieces.append({name: seen.pieces[name] for name in names})
        there = {self.expected.names[name] for some in pieces for name in some}
        if lost := sorted(set(whole) - there):
            yield f"step {self.index}: no {what} {lost}"
        yield from self._pieces(what, pieces, whole, wide)

    def _state(self) -> Iterator[str]:
        whole, wide = {}, {}
        for name, states in self.step.state.items():
            for state, tensor in states.items():
                whole[f"{state}/{name}"] = tensor
                if self.wide:
                    wide[f"{state}/{name}"] = self.wide.state[name][state]
        pieces = []
        for seen in self.found:
            mine = {}
            for entry, tensor in seen.state.items():
                _, state, name = entry.split("/", 2)
                if tensor.numel() == 0 or not self._piece(name, 0).trainable:
                    continue
                key = f"{state}/{self.expected.names[name]}"
                if key in whole:
                    mine[f"{state}/{name}"] = tensor
                elif state in ("step", "momentum_buffer") and tensor.any():
                    yield f"step {self.index}: state {key}, torch has none"
            pieces.append(mine)
        there = {f"{k.split('/', 1)[0]}/{self.expected.names[k.split('/', 1)[1]]}"
                 for some in pieces for k in some}  # fmt: skip
        if lost := sorted(key for key in set(whole) - there if whole[key].numel()):
            yield f"step {self.index}: no state {lost}"
        for state in sorted({key.split("/", 1)[0] for key in whole}):
            those = {k: v for k, v in whole.items() if k.startswith(f"{state}/")}
            mine = [{k: v for k, v in some.items() if k.startswith(f"{state}/")} for some in pieces]
            yield from self._pieces("state", mine, those, wide or None)

    def _evaluation(self) -> Iterator[str]:
        loss, accuracy = self.step.evaluation
        tolerance = LEAST[self.experiment.precision] * max(abs(loss), 1.0)
        if self.wide:
            tolerance = max(tolerance, MARGIN * abs(self.wide.evaluation[0] - loss))
        for rank, seen in enumerate(self.found):
            if seen.evaluation is None:
                continue
            given = seen.evaluation["loss"]
            alike = math.isclose(given, loss, rel_tol=0.0, abs_tol=tolerance)
            if not alike and not (math.isnan(given) and math.isnan(loss)):
                yield f"step {self.index}: evaluated loss on rank {rank} is {given}, not {loss}"
            elif self.wide is None and not math.isclose(seen.evaluation["accuracy"], accuracy):
                given = seen.evaluation["accuracy"]
                yield f"step {self.index}: accuracy on rank {rank} is {given}, not {accuracy}"

    def _pieces(
        self,
        what: str,
        pieces: list[dict[str, Tensor]],
        whole: Mapping[str, Tensor],
        wide: Mapping[str, Tensor | None] | None,
    ) -> Iterator[str]:
        """Every rank's pieces against their places in whole tensors."""
        floor = 1.0 if self.experiment.half else FLOOR[what]
        least = floor * max(map(largest, whole.values()), default=0.0)
        pairs = [(tensor, (wide or {}).get(name)) for name, tensor in whole.items()]
        for rank, mine in enumerate(pieces):
            for key, piece in mine.items():
                prefix, name = key.rsplit("/", 1) if "/" in key else ("", key)
                listed = f"{prefix}/{self.expected.names[name]}" if prefix else (
                    self.expected.names[name]
                )  # fmt: skip
                tensor = whole[listed]
                scale = max(least, largest(tensor))
                place = cut_of(tensor, self._piece(name, rank), rank)
                yield from self._off(what, key, rank, piece, place, scale, pairs)

    def _listed(self, name: str) -> str:
        """The name under which torch lists what the library calls so."""
        return self.expected.names[name]

    def _piece(self, name: str, rank: int) -> WeightPlacement:
        return self.plan.flow.weights[name]

    def _off(
        self,
        what: str,
        name: str,
        rank: int,
        found: Tensor,
        expected: Tensor,
        scale: float,
        rounding: list[tuple[Tensor, Tensor | None]],
    ) -> Iterator[str]:
        where = f"step {self.index}: {what} {name} on rank {rank}"
        if found.shape != expected.shape:
            yield f"{where} is {tuple(found.shape)}, not {tuple(expected.shape)}"
            return
        if found.numel() == 0:
            return
        apart = (found.double() - expected.double()).abs()
        off = torch.where(found == expected, 0.0, apart).max().item()  # infinities are alike
        precision = self.experiment.precision
        tolerance = LEAST[precision]
        if self.wide is not None:
            moved = max((largest(a.double() - b.double()) for a, b in rounding if b is not None),
                        default=0.0)  # fmt: skip
            tolerance = max(tolerance, min(MARGIN * moved / (scale or 1.0), MOST[precision]))
        if not off <= tolerance * scale and off != 0.0:
            yield f"{where} is off by {off / (scale or 1.0):.1e}"


def cut_of(tensor: Tensor, placed: WeightPlacement, rank: int) -> Tensor:
    """A rank's part of a whole tensor; a number of updates is nobody's part."""
    cut = placed.placement
    if tensor.ndim == 0 or not isinstance(cut, Shard):
        return tensor
    spans = cut.spans(rank % placed.group_size)
    return torch.cat([tensor.narrow(cut.dim, *span) for span in spans], cut.dim)
