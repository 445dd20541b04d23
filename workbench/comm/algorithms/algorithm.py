"""The base class of all-reduce algorithms, built-in ones and a person's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from workbench.comm.algorithms.dry_run import drive
from workbench.comm.codecs.coders import Coder
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.messages.flat import MessageRounds
from workbench.plan.collective.algorithm import DryRun
from workbench.plan.extension.extension import Extension
from workbench.plan.extension.user_object import OwnObjectError

# Where an algorithm looks at values, all ranks together have so many bytes of zeros at most.
MOST_BYTES = 2**30

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Algorithm(Extension, ABC):
    """Sums flat tensors in place over the ranks of a group, by rounds of messages.

    One object serves all sums of a run, several of which may be under way: it keeps nothing from
    call to call. What it sends may depend on the length and the ranks, not on values.
    """

    kind: ClassVar[str] = "algorithms"

    @abstractmethod
    def rounds(self, flat: Tensor, members: Sequence[int], me: int) -> MessageRounds:
        """Yields the exchanges of one rank, one after another, and sums between them.

        It is resumed when what it wanted to receive is there and what it wanted to send may be
        overwritten. Afterwards all ranks have the same bits. All call it with equal lengths.

        Args:
            flat: the summand [elements], which becomes the sum; zero elements included.
            members: the ranks that sum, which messages are addressed to.
            me: the index of this rank in `members`.
        """

    def coded_rounds(
        self, flat: Tensor, members: Sequence[int], me: int, coding: PieceCoding
    ) -> MessageRounds:
        """Yields the same where values travel through a codec: buffers that `coding` has filled.

        An algorithm without this method takes no codec. Each rank decodes what it has encoded of a
        sum, as the others do, for all to have the same bits.

        Args:
            flat: the summand [elements], fp32 or fp64, which becomes the sum.
            members: the ranks that sum, which messages are addressed to.
            me: the index of this rank in `members`.
            coding: what encodes, decodes and adds pieces, and makes buffers for their bytes.
        """
        raise NotImplementedError(f"algorithm {self.name!r} takes no codec")

    @property
    def takes_codec(self) -> bool:
        """Whether values can travel through a codec."""
        return type(self).coded_rounds is not Algorithm.coded_rounds

    def dry(
        self,
        elements: int,
        itemsize: int,
        ranks: int,
        encoded_bytes: Callable[[int], int] | None = None,
    ) -> DryRun:
        """Runs all ranks on tensors without memory; on zeros, if it looks at values.

        Args:
            elements: the length of what each rank contributes.
            itemsize: the bytes of an element: 2, 4 or 8.
            ranks: the size of the group.
            encoded_bytes: the bytes of so many values that are encoded together; None: they
                travel as they are.

        Raises:
            OwnObjectError: its ranks do not fit together, it raises an error, or it looks at more
                values than are made for it.
        """
        what = f"algorithm {self.name!r}, {elements} elements on {ranks} ranks"
        try:
            return self._driven(elements, itemsize, ranks, encoded_bytes, "meta", what)
        except OwnObjectError:
            raise
        except Exception as error:  # it looks at values, or fails with them too
            nbytes = ranks * elements * itemsize
            if nbytes > MOST_BYTES:
                raise OwnObjectError(
                    f"{what}: fails on tensors without values, and {nbytes:,} bytes of zeros are "
                    f"more than are made for it: {type(error).__name__}: {error}"
                ) from error
        try:
            return self._driven(elements, itemsize, ranks, encoded_bytes, "cpu", what)
        except OwnObjectError:
            raise
        except Exception as error:  # whatever its own code raises
            raise OwnObjectError(f"{what}: {type(error).__name__}: {error}") from error

    def _driven(
        self,
        elements: int,
        itemsize: int,
        ranks: int,
        encoded_bytes: Callable[[int], int] | None,
        device: str,
        what: str,
    ) -> DryRun:
        dtype = _DTYPES[itemsize if encoded_bytes is None else max(itemsize, 4)]
        flats = [torch.zeros(elements, dtype=dtype, device=device) for _ in range(ranks)]
        members = range(ranks)
        if encoded_bytes is None:
            found = [self.rounds(flat, members, me) for me, flat in enumerate(flats)]
            return drive(found, flats, what)
        sized = [_Sized(encoded_bytes) for _ in flats]
        codings = [PieceCoding(coder, torch.device(device)) for coder in sized]
        found = [
            self.coded_rounds(flat, members, me, coding)
            for me, (flat, coding) in enumerate(zip(flats, codings, strict=True))
        ]
        return drive(found, flats, what, [coder.counts for coder in sized])


class _Sized(Coder):
    """Stands for a codec of which only the bytes are wanted; it counts what goes through it."""

    def __init__(self, encoded_bytes: Callable[[int], int]) -> None:
        self._bytes, self.counts = encoded_bytes, [0, 0, 0]

    def encoded_bytes(self, length: int) -> int:
        return self._bytes(length)

    def encode(self, x: Tensor, wire: Tensor) -> None:
        self._count(0, len(x))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        self._count(1, len(out))

    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        self._count(1, len(out))

    def peak(self, x: Tensor, wire: Tensor) -> Tensor:
        return torch.zeros(())

    def _count(self, which: int, length: int) -> None:
        self.counts[which] += length
        self.counts[2] += 1
