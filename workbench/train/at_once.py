"""What strategies have in common that use every gradient in the step that computed it."""

from workbench.train.in_flight import InFlight
from workbench.train.residuals import Residuals


class AtOnce:
    """Between steps nothing travels or waits to be used; without a codec nothing is left out."""

    @property
    def is_settled(self) -> bool:
        return True

    def rest(self) -> None:
        """Nothing travels."""

    @property
    def in_flight(self) -> list[InFlight]:
        return []

    @property
    def residuals(self) -> Residuals:
        return []
