"""Draw what `python -m benchmarks.bench_gpu --json FILE` measured.

`python docs/draw_gpu_table.py benchmarks/h200.json docs/gpu_table.svg`.
"""

from __future__ import annotations

import json
import sys
from html import escape
from typing import Any

COLUMNS = (
    "ours page 64",
    "ours page 16",
    "ours page 1",
    "FA3 fp8 page 64",
    "FA3 fp8 page 1",
    "FA3 fp8 dense",
    "SDPA bf16 dense",
)
WIDTH, HEIGHT, FIRST = 118, 26, 150


def cell(row: dict[str, Any] | None) -> str:
    """TFLOP/s, or a dash where nothing was measured."""
    return f"{row['tflops']:.0f}" if row and row["tflops"] else "–"


def draw(data: dict[str, Any]) -> str:
    """The table as SVG: shapes down, implementations across, TFLOP/s in the cells."""
    shapes = list(dict.fromkeys((row["dims"], row["shape"]) for row in data["rows"]))
    found = {(row["dims"], row["shape"], row["name"]): row for row in data["rows"]}
    width, height = FIRST + WIDTH * len(COLUMNS) + 10, HEIGHT * (len(shapes) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]

    def text(x: float, line: int, content: str, anchor: str, weight: str = "normal") -> None:
        y = HEIGHT * (line + 0.7)
        parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>')

    text(8, 0, f"TFLOP/s measured on one {data['device']}, {data['versions']}; FA3: tokenspeed-fa3", "start", "bold")
    for column, name in enumerate(COLUMNS):
        text(FIRST + WIDTH * (column + 0.9), 1, name, "end", "bold")
    for line, (dims, shape) in enumerate(shapes, start=2):
        if line % 2 == 0:
            parts.insert(2, f'<rect y="{HEIGHT * line}" width="{width}" height="{HEIGHT}" fill="#eef2f7"/>')
        text(8, line, f"{shape}, {dims}", "start")
        for column, name in enumerate(COLUMNS):
            ours = "bold" if name.startswith("ours") else "normal"
            text(FIRST + WIDTH * (column + 0.9), line, cell(found.get((dims, shape, name))), "end", ours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(source: str, target: str) -> None:
    with open(source) as file:
        data = json.load(file)
    with open(target, "w") as file:
        file.write(draw(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
