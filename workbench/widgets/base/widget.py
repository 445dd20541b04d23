"""What all widgets have in common: scripts, a picture for where no kernel runs, work on threads.

Those that are `Live` have a view that is one value: Python makes it, browsers draw it.
`BackgroundTasks` runs what takes longer than a click; of requests to a `LatestWorker` only the
latest counts.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import anywidget
import ipywidgets
import traitlets
from IPython.display import DisplayHandle, display

from workbench.plan.display import svg
from workbench.plan.io.html import Markup, save

if TYPE_CHECKING:
    import pandas


class BackgroundTasks:
    """Each on a thread of its own; the views are told how it stands.

    Args:
        tell: Called with the task's name and state: "running", "done" or "failed", with `text`, and
            `advice` where something can be done. It may be called on any thread.
    """

    def __init__(
        self, tell: Callable[[str, Mapping[str, Any]], None], advice: Mapping[str, str]
    ) -> None:
        self._tell, self._advice, self._guard = tell, advice, threading.Lock()
        self._under_way: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, name: str, work: Callable[[], Mapping[str, Any]], text: str) -> None:
        """Starts a task, unless one of this name is under way."""
        with self._guard:
            if self._closed or name in self._under_way:
                return
            thread = threading.Thread(
                target=self._run, args=(name, work), name=f"widget: {name}", daemon=True
            )
            self._under_way.add(name)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        self._tell(name, {"state": "running", "text": text})
        thread.start()

    def at_once(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        """Runs a short task here."""
        self._tell(name, self._outcome(name, work))

    def wait(self, timeout: float) -> bool:
        """Waits until none is under way; whether that was in time."""
        with self._guard:
            threads = list(self._threads)
        for thread in threads:
            if thread.ident is not None:
                thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    def close(self) -> None:
        """What is under way goes on, and nobody hears of it."""
        with self._guard:
            self._closed = True

    def _run(self, name: str, work: Callable[[], Mapping[str, Any]]) -> None:
        state = self._outcome(name, work)
        with self._guard:  # first: who hears that it is done may start it again
            self._under_way.remove(name)
        if not self._closed:
            self._tell(name, state)

    def _outcome(self, name: str, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            return {"state": "done", **work()}
        except Exception as error:  # it belongs into the widget: nobody reads a thread's log
            text = str(error) or type(error).__name__
            return failed(text, self._advice.get(name, ""))


def failed(text: str, advice: str = "") -> dict[str, Any]:
    """What views are told of a task that came to nothing."""
    return {"state": "failed", "text": text, "advice": advice}


T = TypeVar("T")


class LatestWorker(Generic[T]):
    """One thread that works on the newest request; those in between are skipped.

    Args:
        work: Called on the thread with each request; it hands on what it found by itself, and must
            not raise.
        rest: Called on the thread once nothing was asked for `rest_s` seconds after work.
    """

    def __init__(
        self, work: Callable[[T], None], name: str, rest: Callable[[], None], rest_s: float = 1.0
    ) -> None:
        self._work, self._name, self._rest, self._rest_s = work, name, rest, rest_s
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, request: T) -> None:
        """Replaces the request that waits, if there is one; returns at once."""
        with self._changed:
            if self._closed:
                return
            self._waiting[:] = [request]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def superseded(self) -> bool:
        """Whether a newer request waits, so that what is under way is of no use any more."""
        return bool(self._waiting) or self._closed

    def settle(self, timeout: float) -> bool:
        """Waits until there is nothing to do; whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self) -> None:
        """Ends the thread after what it is at."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        worked = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                patience = self._rest_s if worked else None
                called = self._changed.wait_for(self.superseded, patience)
                if self._closed:
                    return
                if called:
                    request, self._busy = self._waiting.pop(), True
            if called:
                self._work(request)
            else:
                self._rest()
            worked = called


BUNDLE = Path(__file__).parent.parent / "bundle"
REST_S = 1.0

View = dict[str, Any]


@cache
def asset(name: str) -> str:
    """A bundled file ("dashboard.js", "dashboard.css").

    Raises:
        FileNotFoundError: it has not been built; published wheels hold it.
    """
    path = BUNDLE / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built yet: run `python env/bundle.py` once")
    return path.read_text(encoding="utf-8")


class Displayed(ipywidgets.DOMWidget):  # type: ignore[misc]
    """A widget of which saved notebooks hold a picture, too.

    A subclass says what `still` is; `keep` brings that up to date in the notebooks that show the
    widget.
    """

    _keeping: threading.Timer | None = None

    def __init__(self, **state: Any) -> None:
        self._handles: list[DisplayHandle] = []
        super().__init__(**state)

    def still(self) -> Markup:
        """The last state as HTML without scripts, which untrusted notebooks show, too."""
        raise NotImplementedError

    def to_frame(self) -> "pandas.DataFrame":
        """What it shows, as a table in plain numbers."""
        raise NotImplementedError

    def pictures(self) -> Sequence[Markup]:
        """The pictures that it shows, documents of their own; none: it shows a table."""
        return ()

    def save(self, path: str | Path) -> None:
        """Writes what it shows now into a file: "x.svg", "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        drawn = self.pictures()
        save(self, path, partial(svg.stacked, drawn) if drawn else None)

    def _repr_html_(self) -> Markup:
        return self.still()

    def keep(self) -> None:
        """Brings the picture that saved notebooks hold up to date."""
        data, metadata = self._repr_mimebundle_()
        for handle in self._handles:
            handle.update(data, raw=True, metadata=metadata)

    def keep_soon(self) -> None:
        """Brings it up to date once nothing moves for a second."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._handles:
            self._keeping = threading.Timer(REST_S, self.keep)
            self._keeping.daemon = True
            self._keeping.start()

    def close(self) -> None:
        """Ends the view; its values stay readable."""
        if self._keeping is not None:
            self._keeping.cancel()
        super().close()

    def _ipython_display_(self) -> None:
        data, metadata = self._repr_mimebundle_()
        handle = display(data, raw=True, metadata=metadata, display_id=True)
        self._handles.append(handle)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = super()._repr_mimebundle_(**kwargs) or {}
        data, metadata = found if isinstance(found, tuple) else (found, {})  # as anywidget has it
        return {**data, "text/html": self.still(), "text/plain": repr(self)}, metadata


class Widget(Displayed, anywidget.AnyWidget):
    """A view in the browser with a Python half that can be read, assigned and observed.

    A subclass names its script.
    """

    script: ClassVar[str]
    """Name of its entry among the bundled scripts: "dashboard"."""

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    @traitlets.default("_esm")
    def _bundled_esm(self) -> str:
        return asset(f"{self.script}.js")

    @traitlets.default("_css")
    def _bundled_css(self) -> str:
        return asset(f"{self.script}.css")


class Live(Widget):
    """Sends what it shows whenever that has changed, whole: it is small.

    A subclass says in `view` what is shown, as JSON can hold it, and in `act` what a person can
    ask for. Messages may come on several threads at once, and are carried out one by one. The
    view is `live.js`.

    Args:
        guard: the lock that is held while what is shown changes; None: one of its own.
        state: first values of the attributes.
    """

    # What a view begins with; from then on it gets messages, and keeps this up to date by itself,
    # so that a saved notebook holds what was last seen.
    _view = traitlets.Dict().tag(sync=True)

    _begun = False

    def __init__(self, guard: AbstractContextManager[Any] | None = None, **state: Any) -> None:
        self._guard = guard or threading.RLock()
        super().__init__(**state)
        self._begun = True
        self.on_msg(self._receive)

    def open(self) -> None:
        """Opens the way to views, which have something to show from the start."""
        self._shown = self.view()
        self._view = self._shown
        super().open()

    def view(self) -> View:
        """Everything that a view needs."""
        raise NotImplementedError

    def act(self, content: Mapping[str, Any]) -> None:
        """Does what a view asks for.

        Raises:
            ValueError: it cannot be; the text is shown.
        """
        raise NotImplementedError

    def refused(self, content: Mapping[str, Any], reason: str) -> None:
        """Takes note that what a view asked for cannot be."""
        raise NotImplementedError

    @property
    def shown(self) -> View:
        """What views show now."""
        return self._shown

    def refresh(self) -> bool:
        """Has all views show what is the case now; whether that is news."""
        if not self._begun:
            return False
        with self._guard:
            view = self.view()
            if view == self._shown:
                return False
            self._shown = view
            self.send({"type": "view", "view": view})
            return True

    def _receive(self, _widget: object, content: Mapping[str, Any], _buffers: object) -> None:
        with self._guard:
            if content.get("type") == "hello":
                self.send({"type": "view", "view": self._shown})
            else:
                try:
                    self.act(content)
                except Exception as error:  # a click in vain must not be lost in a log
                    self.refused(content, str(error) or type(error).__name__)
                self.refresh()
            self.send({"type": "heard"})  # a view that hears nothing says so
