"""The curves of a sweep as a picture: tokens/s against the token budget, a line a precision and number of threads.

Draws on figures of its own, never through pyplot, so nothing is left behind in the process and no display is needed.
Text in an SVG stays text.
"""

import io
from pathlib import Path
from typing import Any

from extract.errors import SpecError
from extract.store import clear_write_errors, replace_file
from extract.tuning.recipe_file import MARK
from extract.tuning.results import Point, Tuning

FORMATS = {".svg": "svg", ".png": "png"}
COLOURS = {"float32": "#4269d0", "bfloat16": "#d9730d", "float16": "#6c8f2f", "int8": "#2a8c6a"}
MARKERS = "osD^vP"
"""By number of threads, most first."""

LABEL_GAP = 0.045
"""Least distance of two labels, as a part of the height."""


class NoPictureFormat(SpecError):
    """The picture's name ends in neither .svg nor .png."""

    template = "{path}: pictures are .svg or .png. Choose another name with --plot."


def picture_format(path: Path) -> str:
    """What matplotlib calls it: svg or png.

    Raises:
        NoPictureFormat: the name ends in something else.
    """
    found = FORMATS.get(path.suffix.lower())
    if found is None:
        raise NoPictureFormat(path=path)
    return found


def draw(tuning: Tuning, path: Path) -> None:
    """Write the picture; it may be replaced later, as `extract.tuning.recipe_file` says."""
    import matplotlib
    from matplotlib.figure import Figure

    kind = picture_format(path)
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": MARK, "font.size": 10}):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        _draw(figure.subplots(), tuning)
        metadata = {"Creator": MARK} if kind == "svg" else {"Software": MARK}
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue())


def _draw(axes: Any, tuning: Tuning) -> None:
    curves: dict[tuple[str, int | None], list[Point]] = {}
    for point in tuning.points:
        curves.setdefault((point.precision, point.threads), []).append(point)
    counts = sorted({threads or 0 for _, threads in curves}, reverse=True)
    top = max(point.fastest or 0.0 for point in tuning.points)
    ends = []
    for (precision, threads), points in curves.items():
        measured = [point for point in points if point.tokens_per_s is not None]
        colour, place = COLOURS.get(precision, "#555555"), counts.index(threads or 0)
        if measured:
            x, y = [point.budget for point in measured], [point.tokens_per_s or 0.0 for point in measured]
            axes.vlines(
                x, [point.slowest for point in measured], [point.fastest for point in measured], colour, alpha=0.5
            )
            line = {"color": colour, "marker": MARKERS[place % len(MARKERS)], "markersize": 5}
            axes.plot(x, y, linestyle="-" if place == 0 else "--", **line)
            ends.append((x[-1], y[-1], points[0].curve, colour))
        for point in points[len(measured) :]:
            axes.plot([point.budget], [0], marker="x", color=colour, clip_on=False)
            axes.annotate(
                "out of memory", (point.budget, 0), (0, 6), textcoords="offset points", ha="center", color=colour
            )
    chosen = tuning.chosen
    axes.plot([chosen.budget], [chosen.tokens_per_s], "o", markersize=13, fillstyle="none", color="black")
    budgets = sorted({point.budget for point in tuning.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * top)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"token budget ({tuning.budget_is})")
    axes.set_ylabel("throughput (tokens/s, median and range)")
    kernels = {"own": f"own decoder, {tuning.arithmetic} kernels", "vendor": tuning.arithmetic}.get(
        tuning.decoder, f"{tuning.decoder} decoder"
    )
    axes.set_title(f"{tuning.checkpoint} on {tuning.device}", loc="left", fontsize=11, pad=18)
    settings = f"{chosen.budget:,} {tuning.budget_is}, {chosen.curve}"
    axes.text(0, 1.015, f"{kernels}; ring: chosen, {settings}", transform=axes.transAxes, fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    _label_ends(axes, ends, 1.08 * top)


def _label_ends(axes: Any, ends: list[tuple[int, float, str, str]], height: float) -> None:
    """Each curve's name at its right, moved up as far as the name below needs."""
    last, right = 0.0 - LABEL_GAP, max(x for x, _, _, _ in ends)
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        last = max(y / height, last + LABEL_GAP)
        axes.annotate(
            text,
            (x, y),
            (1.02, last),
            textcoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.3, "linewidth": 0.8} if x <= right else None,
        )
