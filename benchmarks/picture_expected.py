"""The README's picture: decode speeds on the CPU beside llama.cpp's, from the same results as its
table.

Models without silent neurons alone, since both programs then compute the same."""

from html import escape

from table_contents import TYPES
from table_expected import chat_ratios, downloaded, of_experts, planted

REAL, SYNTHETIC = "#2f6f9f", "#a9b8c4"
WIDTH, LEFT, STEP, TOP = 760, 300, 30, 52
LARGEST = 2.0  # times llama.cpp, at the right end of the axis


def bars() -> list[tuple[str, str, list[float]]]:
    """(label, colour, ratios of several processors, levels or models)."""
    return [
        ("Gemma 3 270M, downloaded Q4_K_M", REAL, downloaded()),
        *((f"SmolLM2-135M, {kind}", REAL, chat_ratios(kind)) for kind in TYPES),
        ("mixtures of experts, layers of three", SYNTHETIC, of_experts()),
        ("a Llama of 1.1 B, q8_0", SYNTHETIC, planted("dense")),
    ]


def picture() -> str:
    """The picture as SVG. Raises AssertionError for a ratio beyond its axis."""
    rows, scale = bars(), (WIDTH - LEFT - 110) / LARGEST
    height = TOP + STEP * len(rows) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="sans-serif" font-size="13" fill="#222222">',
        "<title>Decode speed on two CPU cores, times llama.cpp</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="24" font-size="15">Decode speed on two CPU cores, times llama.cpp in the'
        " same run</text>",
    ]
    for tick in (0.0, 0.5, 1.0, 1.5, 2.0):
        x = LEFT + tick * scale
        colour, width = ("#222222", 1.5) if tick == 1 else ("#dddddd", 1)
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{height - 34}" stroke="{colour}"'
            f' stroke-width="{width}"/>'
        )
        name = "llama.cpp" if tick == 1 else f"{tick:g}x"
        lines.append(f'<text x="{x:.1f}" y="{height - 16}" text-anchor="middle">{name}</text>')
    for number, (label, colour, ratios) in enumerate(rows):
        slow, fast, y = min(ratios), max(ratios), TOP + STEP * number
        assert 0 < slow <= fast <= LARGEST, (label, ratios)
        lines.append(f'<text x="{LEFT - 12}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        lines.append(
            f'<rect x="{LEFT + slow * scale:.1f}" y="{y + 2}" width="{(fast - slow) * scale:.1f}"'
            f' height="16" fill="{colour}"/>'
        )
        lines.append(
            f'<text x="{LEFT + fast * scale + 8:.1f}" y="{y + 14}">'
            f"{slow:.2f}x to {fast:.2f}x</text>"
        )
    at = WIDTH - 200
    for colour, words in ((REAL, "real"), (SYNTHETIC, "random weights")):
        lines.append(f'<rect x="{at}" y="14" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{at + 17}" y="24">{words}</text>')
        at += 70
    return "\n".join([*lines, "</svg>", ""])
