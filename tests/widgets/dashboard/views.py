"""What the views of a dashboard are sent."""

import queue
import time

import numpy as np

PATIENCE_S = 30


class Views:
    """What the views of a dashboard are sent."""

    def __init__(self):
        self.messages = queue.Queue()
        self.times = []

    def take(self, content, buffers=()):
        self.times.append(time.monotonic())
        if content["type"] == "update":
            self.messages.put((content, unpacked(content, buffers)))

    def wait(self, **wanted):
        """The next message whose first run has these values; its numbers by name."""
        while True:
            content, parts = self.messages.get(timeout=PATIENCE_S)
            for run in content.get("runs", ()):
                said = {"start": run["start"], **run["status"]}
                if all(said[name] == value for name, value in wanted.items()):
                    return said, parts

    def wait_for(self, name, what=lambda value: True):
        """The next message that holds such a value under this name."""
        while True:
            content, parts = self.messages.get(timeout=PATIENCE_S)
            if name in content and what(content[name]):
                return content, parts


def unpacked(content, buffers):
    """The numbers of a message, by name."""
    (buffer,), found, at = buffers, {}, 0
    for name, length in content["parts"]:
        found[name] = np.frombuffer(buffer, count=length // 8, offset=at)
        at += length
    assert at == len(buffer)
    return found
