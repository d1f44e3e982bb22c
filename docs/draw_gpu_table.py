"""Draw what `python -m benchmarks.bench_gpu --json FILE` measured.

`python docs/draw_gpu_table.py benchmarks/h200.json docs/gpu_table.svg`.
"""

from __future__ import annotations

import json
import sys
from html import escape
from typing import Any

# In this order, as far as the file has a number for any shape.
COLUMNS = (
    "ours page 64",
    "ours page 16",
    "ours page 1",
    "FA3 fp8 page 64",
    "FA3 fp8 page 1",
    "FA3 fp8 dense",
    "FlashInfer fa3 fp8 page 64",
    "FlashInfer fmha_v2 fp8 page 64",
    "vLLM Triton fp8 page 64",
    "AITER fp8 page 64",
    "SDPA bf16 dense",
)
WIDTH, HEIGHT, FIRST = 104, 26, 150
CHARACTER = 7.4  # width of one, about
WRONG = 0.15  # the error from which benchmarks/bench_gpu.py counts a row for nothing


def measured(row: dict[str, Any] | None) -> bool:
    """Whether the row holds a number, which neither null nor NaN is."""
    return row is not None and (row["tflops"] or 0) > 0


def cell(row: dict[str, Any] | None) -> str:
    """TFLOP/s, or a dash where nothing was measured."""
    if row is None or not measured(row):
        return "–"
    right = row["error"] is not None and row["error"] < WRONG
    return f"{row['tflops']:.0f}" if right else "wrong"


def heading(name: str) -> list[str]:
    """A column's name from below: in what layout, and who, a word to the line."""
    words = name.split()
    at = next((at for at, word in enumerate(words) if word in ("fp8", "bf16", "page")), len(words))
    return [" ".join(words[at:]), *reversed(words[:at])]


def draw(data: dict[str, Any]) -> str:
    """The table as SVG: shapes down, implementations across, TFLOP/s in the cells."""
    shapes = list(dict.fromkeys((row["dims"], row["shape"]) for row in data["rows"]))
    found = {(row["dims"], row["shape"], row["name"]): row for row in data["rows"]}
    columns = [name for name in COLUMNS if any(measured(found.get((*shape, name))) for shape in shapes)]
    shown = [row for row in data["rows"] if row["name"] in columns and measured(row)]
    notes = dict.fromkeys(row["note"] for row in shown if row["note"] and not row["name"].startswith("ours"))
    lines = [
        f"TFLOP/s measured on one {data['device']}, {data['versions']}",
        "; ".join(["FA3: tokenspeed-fa3" if any(name.startswith("FA3") for name in columns) else "", *notes]).strip(
            "; "
        ),
    ]
    width = max(FIRST + WIDTH * len(columns) + 10, round(CHARACTER * max(map(len, lines))) + 16)
    height = HEIGHT * (len(shapes) + 4.5)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]

    def text(x: float, line: float, content: str, anchor: str, weight: str = "normal") -> None:
        y = HEIGHT * (line + 0.7)
        parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>')

    text(8, 0, lines[0], "start", "bold")
    text(8, 0.75, lines[1], "start")
    for column, name in enumerate(columns):
        for line, part in enumerate(heading(name)):
            text(FIRST + WIDTH * (column + 0.9), 3.2 - 0.7 * line, part, "end", "bold")
    for line, (dims, shape) in enumerate(shapes):
        at = line + 4.2
        if line % 2 == 0:
            parts.insert(2, f'<rect y="{HEIGHT * at}" width="{width}" height="{HEIGHT}" fill="#eef2f7"/>')
        text(8, at, f"{shape}, {dims}", "start")
        for column, name in enumerate(columns):
            ours = "bold" if name.startswith("ours") else "normal"
            text(FIRST + WIDTH * (column + 0.9), at, cell(found.get((dims, shape, name))), "end", ours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(source: str, target: str) -> None:
    with open(source) as file:
        data = json.load(file)
    with open(target, "w") as file:
        file.write(draw(data))


if __name__ == "__main__":
    main(*sys.argv[1:])
