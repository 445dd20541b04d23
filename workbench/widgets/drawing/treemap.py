"""Rectangles whose areas are to scale, as square as can be.

Source: Bruls, Huizing and van Wijk 2000, "Squarified Treemaps", doi:10.1007/978-3-7091-6783-0_4.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Its area."""
        return self.width * self.height

    def within(self, left: float, top: float, rest: float) -> "Box":
        """What is left of it inside margins; nothing where they leave nothing."""
        width = max(0.0, self.width - left - rest)
        return Box(self.x + left, self.y + top, width, max(0.0, self.height - top - rest))


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """A box for each size, in their order; together they are the whole box.

    Args:
        sizes: positive numbers, the largest first for squares rather than strips.
        box: the box that is filled.
    """
    boxes: list[Box] = []
    left = sum(sizes)
    if not box.area:
        return [Box(box.x, box.y, 0.0, 0.0) for _ in sizes]
    scale = box.area / left if left else 0.0
    areas = [size * scale for size in sizes]
    start = 0
    while start < len(areas):
        short = min(box.width, box.height)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], short) <= _worst(
            areas[start:end], short
        ):
            end += 1
        row, box = _row(areas[start:end], box)
        boxes += row
        start = end
    return boxes


def _worst(areas: Sequence[float], side: float) -> float:
    """The largest ratio of sides, of a row of these areas along a side."""
    if side <= 0:
        return 1.0
    total = sum(areas)
    largest, least = max(areas), min(areas)
    return max(side**2 * largest / total**2, total**2 / (side**2 * least))


def _row(areas: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """Boxes along the shorter side, and what they leave."""
    total, boxes = sum(areas), []
    if box.width >= box.height:
        depth, at = total / box.height, box.y
        for area in areas:
            length = area / depth if depth else 0.0
            boxes.append(Box(box.x, at, depth, length))
            at += length
        return boxes, Box(box.x + depth, box.y, max(0.0, box.width - depth), box.height)
    depth, at = total / box.width, box.x
    for area in areas:
        length = area / depth if depth else 0.0
        boxes.append(Box(at, box.y, length, depth))
        at += length
    return boxes, Box(box.x, box.y + depth, box.width, max(0.0, box.height - depth))
