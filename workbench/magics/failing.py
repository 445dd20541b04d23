"""A cell that raised on ranks: ends what runs all cells, without a traceback of ours."""

from workbench.client.ranks import CellOutput


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
