"""What strategies have in common that use every gradient in the step that computed it."""

from workbench.train.in_flight import InFlight


class AtOnce:
    """Between steps nothing travels, and nothing waits to be used."""

    def rest(self) -> None:
        """Nothing travels."""

    @property
    def in_flight(self) -> list[InFlight]:
        return []
