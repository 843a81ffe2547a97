"""The picture of the architecture: rooms as boxes on their floors, what they import of each other as lines.

`python -m benchmarks.structure --draw docs/architecture.svg` writes it. The same code gives the same picture. A line
from A to B is strong unless others lead from A to B by way of a third room: then B is known to be below A, and the
line is faint. One that leads up is red.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from benchmarks.structure import Code, reached

WIDTH, LEFT, RIGHT, TOP = 1220, 70, 10, 44
PITCH, HEIGHT = 118, 44
"""From floor to floor, and of a box."""
FILLS = ("#e3e8ef", "#d9e8f6", "#d8f0e4", "#fbf0cf", "#fbe3cf", "#f6d9dd", "#e8ddf3")
"""Of boxes, from the bottom up; a floor beyond begins again."""
FAINT = 0.1
"""What a faint line's length counts in the order of rooms, to a strong one's 1."""
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b2430; text-anchor: middle }
.small { font-size: 11px; fill: #5b6675 }
rect.room { stroke: #7b8794; stroke-width: 1 }
path { fill: none }
.strong { stroke: #2f5d8c; stroke-width: 1.3; stroke-opacity: 0.65 }
.faint { stroke: #5b6675; stroke-width: 0.8; stroke-opacity: 0.22 }
.up { stroke: #c62828; stroke-width: 1.8 }
.ray { stroke: #5b6675; stroke-dasharray: 6 5 }
"""


def drawn(code: Code) -> str:
    """The picture of one checkout as SVG. Raises `SystemExit` where its `FLOORS` do not name all rooms."""
    if unknown := sorted(code.rooms.keys() - code.floors):
        raise SystemExit(f"FLOORS in tests/helpers/layers.py does not name {', '.join(unknown)}")
    picture = _Picture(code)
    height = TOP + PITCH * len(picture.floors) - 50
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>The packages of rayfed by level, and their imports</title>",
            f"<style>{STYLE}</style>",
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">',
            '<path d="M0 0.5 8 4 0 7.5z" style="fill: #2f5d8c; stroke: none"/></marker>',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            *picture.lines(),
            *picture.boxes(),
            "</svg>\n",
        ]
    )


class _Picture:
    def __init__(self, code: Code) -> None:
        self.code = code
        self.strong = {
            (own, other): not self._implied(own, other)
            for own in sorted(code.rooms)
            for other in sorted(code.rooms[own])
        }
        """(room, what it imports) -> whether that line is strong."""
        self.floors = self._ordered()
        """From the bottom up, rooms from left to right."""
        self.at = dict(self._placed())
        """Room -> the middle of its box, its top, its width."""

    def _implied(self, own: str, other: str) -> bool:
        rooms, levels = self.code.rooms, self.code.floors
        others = rooms[own] - {other}
        return levels[own] >= levels[other] and any(other in reached(rooms, third, without=own) for third in others)

    def _ordered(self) -> list[list[str]]:
        """Rooms of a floor are swapped for as long as that makes lines shorter."""
        levels = self.code.floors
        floors = [sorted(r for r in self.code.rooms if levels[r] == level) for level in sorted({*levels.values()})]
        floors = [floor for floor in floors if floor]
        best, better = self._length(floors), True
        while better:
            better = False
            for floor in floors:
                for i, j in combinations(range(len(floor)), 2):
                    floor[i], floor[j] = floor[j], floor[i]
                    if (length := self._length(floors)) < best - 1e-9:
                        best, better = length, True
                    else:
                        floor[i], floor[j] = floor[j], floor[i]
        return floors

    def _length(self, floors: list[list[str]]) -> float:
        """Of all lines from side to side; faint ones count little."""
        place = {room: (i + 0.5) / len(floor) for floor in floors for i, room in enumerate(floor)}
        return sum(abs(place[a] - place[b]) * (1 if strong else FAINT) for (a, b), strong in self.strong.items())

    def _placed(self) -> Iterator[tuple[str, tuple[float, float, float]]]:
        for level, floor in enumerate(reversed(self.floors)):
            slot = (WIDTH - LEFT - RIGHT) / len(floor)
            for i, room in enumerate(floor):
                yield room, (LEFT + slot * (i + 0.5), TOP + PITCH * level, min(slot - 18, 150))

    def boxes(self) -> Iterator[str]:
        for level, floor in enumerate(self.floors):
            top = self.at[floor[0]][1]
            yield f'<text class="small" x="{LEFT / 2}" y="{top + 26}">level {self.code.floors[floor[0]]}</text>'
            if "actors" in floor:
                y = top + HEIGHT + 14
                yield f'<path class="ray" d="M10 {y}H{WIDTH - 10}"/>'
                yield f'<text class="small" x="{WIDTH - 90}" y="{y + 16}">without Ray from here down</text>'
            for room in floor:
                x, y, width = self.at[room]
                fill = FILLS[level % len(FILLS)]
                size = f'width="{width:.1f}" height="{HEIGHT}" rx="6"'
                yield f'<rect class="room" x="{x - width / 2:.1f}" y="{y}" {size} fill="{fill}"/>'
                yield f'<text x="{x:.1f}" y="{y + 19}">{room.removeprefix("rayfed.")}</text>'
                yield f'<text class="small" x="{x:.1f}" y="{y + 35}">{self.code.lines[room]:,} lines</text>'

    def lines(self) -> Iterator[str]:
        """Faint ones first, so that strong ones lie over them."""
        for step in sorted(self.strong, key=lambda step: (self.strong[step], step)):
            rises = self.at[step[0]][1] > self.at[step[1]][1]
            kind = "up" if rises else "strong" if self.strong[step] else "faint"
            head = ' marker-end="url(#head)"' if self.strong[step] else ""
            yield f'<path class="{kind}" d="{self._curve(*step)}"{head}/>'

    def _curve(self, own: str, other: str) -> str:
        (x, top, _), (x2, top2, _) = self.at[own], self.at[other]
        if top == top2:  # an arc above the boxes between
            rise = min(12 + abs(x2 - x) / 14, 46)
            x, x2 = (x + 20, x2 - 20) if x2 > x else (x - 20, x2 + 20)
            return f"M{x:.1f} {top}C{x:.1f} {top - rise:.1f} {x2:.1f} {top - rise:.1f} {x2:.1f} {top}"
        start, end = (top + HEIGHT, top2) if top2 > top else (top, top2 + HEIGHT)
        x, x2 = x + self._port(own, other), x2 + self._port(other, own)
        middle = (start + end) / 2
        return f"M{x:.1f} {start}C{x:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {end}"

    def _port(self, room: str, other: str) -> float:
        """How far from the middle of a box's edge its line to another room begins: lines stand in the order of their
        other ends, so that they do not cross at once."""
        x, top, width = self.at[room]
        below = self.at[other][1] > top
        ends = {b if a == room else a for a, b in self.strong if room in (a, b)}
        side = [end for end in ends if (y := self.at[end][1]) != top and (y > top) == below]
        side.sort(key=lambda end: ((self.at[end][0] - x) / abs(self.at[end][1] - top), end))
        return ((side.index(other) + 0.5) / len(side) - 0.5) * (width - 16)
