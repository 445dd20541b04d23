"""How much of the world's running statistics a rank's own are, where batch norm is local.

In a training pass with the rows n_1 .. n_k of k ranks (or shard groups), n of them together, rank
r normalizes by its own mean s_r. The world's running mean R (the running variance likewise) moves
by what all ranks have seen, each as much as it has rows; with momentum m

    R  <-  (1 - m) R + m (n_1 s_1 + ... + n_k s_k) / n

No rank knows R before it is asked for. Instead each keeps a share W_r of it, and its own running
mean B_r, so that R = W_1 B_1 + ... + W_k B_k at any time, and the shares add up to 1:

    W_r'  =  W_r + m (n_r / n - W_r)              without rows it fades
    B_r  <-  (1 - f) B_r + f s_r                  f = m (n_r / n) / W_r'

Ranks whose part of the rows never changes have W_r = n_r / n and f = m: what torch itself does.
Every rank computes its share from the rows of all, which it knows: nothing is sent.
"""

from dataclasses import dataclass

from workbench.layers.context import BatchContext


@dataclass
class RunningShare:
    """The share of one batch norm on one rank.

    Attributes:
        context: says which rows the batch in hand has on each rank.
        group_size: of the groups in which the layer lies: all ranks of one see the same rows.
        value: the share; None: all ranks hold the same statistics, and nothing was seen since.
    """

    context: BatchContext
    group_size: int
    value: float | None = None

    def factor(self, momentum: float) -> float:
        """The momentum of the rank's own statistics for the batch in hand, which then count.

        Args:
            momentum: of the world's; where it is the cumulative average's, 1 / batches so far.
        """
        rows = self.context.global_rows
        if rows == 0:
            return 0.0
        own = sum(self.context.group_rows(self.group_size).sizes) / rows
        before = own if self.value is None else self.value
        self.value = before + momentum * (own - before)
        # Where rows never change the quotient is 1, and the momentum torch's to the bit.
        return momentum * (own / self.value) if self.value else 0.0
