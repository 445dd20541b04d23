"""A notebook's stop button, pressed at a chosen place."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable


def interrupt_inside(function: Callable) -> None:
    """Sends SIGINT to this process once its main thread is inside a function."""
    main = threading.main_thread().ident

    def is_inside() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        while not is_inside():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
