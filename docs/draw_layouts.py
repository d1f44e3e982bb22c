"""Draws docs/layouts.svg: where one token of one head lies in each cache layout.

Run again after a change: python docs/draw_layouts.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

CELL, GAP, LEFT = 22, 64, 24
TOKEN, DIM, BOTH, PLAIN = "#f2a65a", "#7fb2d9", "#c0504d", "#eef1f4"
INK = "#1f2933"


def text(x: float, y: float, words: str, size: int = 13, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-family="sans-serif" font-size="{size}" font-weight="{weight}" '
        f'fill="{INK}">{escape(words)}</text>'
    )


def cell(x: float, y: float, fill: str, words: str = "") -> str:
    box = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" stroke="{INK}" stroke-width="0.6"/>'
    return box + (text(x + 3, y + 15, words, 9) if words else "")


def grid(x: float, y: float, rows: int, columns: int, row_hit: set[int], column_hit: set[int]) -> str:
    """A grid in memory order (left to right, then down); hits of token and dim are coloured."""
    parts = []
    for r in range(rows):
        for c in range(columns):
            fill = (
                BOTH
                if r in row_hit and c in column_hit
                else TOKEN
                if r in row_hit
                else DIM
                if c in column_hit
                else PLAIN
            )
            parts.append(cell(x + c * CELL, y + r * CELL, fill))
    return "".join(parts)


def panel(y: float, title: str, lines: list[str], drawing: str) -> str:
    head = text(LEFT, y, title, 16, "bold")
    for number, line in enumerate(lines):
        head += text(LEFT, y + 22 + 18 * number, line)
    return head + drawing


def draw() -> str:
    """The whole picture: three panels, each one head of one page, shortened to a few rows and packs."""
    y, parts = 40.0, []
    lines = [
        "K [slots, Hkv, D], V [slots, Hkv, Dv]: one token's heads side by side; the page table holds token ids",
        "K [pages, page, Hkv, D], V [pages, page, Hkv, Dv]: the same, page after page",
        "element (token t, head h, dim d) of a page at (t * Hkv + h) * D + d",
    ]
    top = y + 84
    drawing = grid(LEFT + 90, top, 4, 16, {1}, {5})
    drawing += text(LEFT, top + 15, "token 0") + text(LEFT, top + CELL + 15, "token 1")
    for head in range(2):
        drawing += text(LEFT + 90 + 8 * head * CELL, top - 6, f"head {head}: dims 0..7", 11)
    parts.append(panel(y, "linear", lines, drawing))
    y = top + 4 * CELL + GAP
    lines = [
        "K [pages, Hkv, D/16, page, 16]: packs of 16 dims of one token; all tokens of a page, then the next pack",
        "element (t, h, d) of a page at ((h * D/16 + d/16) * page + t) * 16 + d%16",
    ]
    top = y + 66
    drawing = ""
    for pack in range(2):
        x = LEFT + 90 + pack * (16 * CELL + 30)
        drawing += text(x, top - 6, f"dims {16 * pack}..{16 * pack + 15}", 11)
        drawing += grid(x, top, 4, 16, {1}, {5} if pack == 0 else set())
    drawing += text(LEFT, top + 15, "token 0") + text(LEFT, top + CELL + 15, "token 1")
    parts.append(panel(y, "vectorized, K", lines, drawing))
    y = top + 4 * CELL + GAP
    lines = [
        "V [pages, Hkv, page/16, Dv, 16]: packs of 16 tokens of one dim: 16 bytes are 16 keys of the second product",
        "element (t, h, d) of a page at ((h * page/16 + t/16) * Dv + d) * 16 + t%16",
    ]
    top = y + 66
    drawing = ""
    for pack in range(2):
        x = LEFT + 90 + pack * (16 * CELL + 30)
        drawing += text(x, top - 6, f"tokens {16 * pack}..{16 * pack + 15}", 11)
        drawing += grid(x, top, 4, 16, {2}, {1} if pack == 0 else set()).replace(TOKEN, "#TMP").replace(DIM, TOKEN)
        drawing = drawing.replace("#TMP", DIM)
    drawing += text(LEFT, top + 15, "dim 0") + text(LEFT, top + CELL + 15, "dim 1")
    parts.append(panel(y, "vectorized, V", lines, drawing))
    y = top + 4 * CELL + 40
    legend = ""
    for number, (fill, words) in enumerate(((TOKEN, "one token"), (DIM, "one dim"), (BOTH, "one element"))):
        legend += cell(LEFT + number * 140, y, fill) + text(LEFT + number * 140 + 30, y + 16, words)
    parts.append(legend + text(LEFT + 440, y + 16, "memory order: left to right, down, then the next block"))
    height, width = y + 50, LEFT * 2 + 90 + 32 * CELL + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("layouts.svg").write_text(draw())
