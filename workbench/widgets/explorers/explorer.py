"""What all explorers have in common: controls that are traits, and panels that are redrawn."""

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.widgets.explorers import still
from workbench.widgets.explorers.controls import Button, Control
from workbench.widgets.explorers.picture import Picture
from workbench.widgets.live import Live, View

_ELSEWHERE = "picture"  # of what was refused and has no control


class Explorer(Live):
    """Pictures of a model, with what it depends on under sliders.

    Every control is a trait of its name: readable, assignable and observable, and what is assigned
    is shown at once. What cannot be is refused beside its control, and the picture stays as it is.
    """

    script = "explorer"

    def __init__(self, **state: Any) -> None:
        self._errors: dict[str, str] = {}
        self._last: Picture | None = None
        super().__init__(**state)
        names = [control.name for control in self.controls() if not isinstance(control, Button)]
        self.observe(self._moved, names)

    def controls(self) -> Sequence[Control]:
        """What can be moved, in the order in which it is shown."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """What is shown at these values.

        Raises:
            ValueError: there is no such picture; the text says why, and what to do.
        """
        raise NotImplementedError

    def press(self, name: str) -> None:
        """Does what a button is for."""
        raise ValueError(f"there is no button {name!r}")

    def pick(self, name: str) -> None:
        """Does what is done when a part of a picture is chosen: nothing."""

    @property
    def errors(self) -> Mapping[str, str]:
        """What was refused last, by the control's name; "" is why there is no picture."""
        with self._guard:
            return dict(self._errors)

    def view(self) -> View:
        """Controls, and the last picture that could be drawn."""
        try:
            self._last = self.picture()
            self._errors.pop("", None)
        except ValueError as error:
            self._errors[""] = str(error)
        controls = [
            {**control.spec(self._value(control)), "error": self._errors.get(control.name, "")}
            for control in self.controls()
        ]
        drawn = Picture(type(self).__name__) if self._last is None else self._last
        wrong = [self._errors[name] for name in ("", _ELSEWHERE) if name in self._errors]
        return {"controls": controls, "error": "\n".join(wrong), **drawn.view()}

    def act(self, content: Mapping[str, Any]) -> None:
        """Moves a control, presses a button, or picks a part of a picture."""
        self._errors.clear()
        kind, name = content["type"], content.get("name", "")
        if kind == "pick":
            self.pick(name)
        elif kind == "press":
            self.press(name)
        elif kind == "set":
            control = next((each for each in self.controls() if each.name == name), None)
            if control is None:
                raise ValueError(f"there is no control {name!r}")
            setattr(self, name, control.value(content["value"]))
        else:
            raise ValueError(f"there is no {kind!r} to do")

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Shows the reason beside the control."""
        known = {control.name for control in self.controls()}
        name = content.get("name", "")
        self._errors[name if name in known else _ELSEWHERE] = reason

    def still(self) -> str:
        """The pictures and their tables, as HTML without scripts."""
        with self._guard:
            return still.html(self._shown)

    def __repr__(self) -> str:
        values = ", ".join(
            f"{control.name}={self._value(control)!r}"
            for control in self.controls()
            if not isinstance(control, Button)
        )
        return f"<{type(self).__name__}: {values}>"

    def _value(self, control: Control) -> Any:
        return None if isinstance(control, Button) else getattr(self, control.name)

    def _moved(self, change: Mapping[str, Any]) -> None:
        with self._guard:
            self.refresh()
            self.keep_soon()
