"""A sweep as people read it: on the terminal, and as a comment in the recipe."""

from collections.abc import Callable

from extract.tuning.results import NOISY, Point, Tuning, Unmeasured, curve_name

COLUMNS: tuple[tuple[str, str, Callable[[Point], str]], ...] = (
    ("precision", "<", lambda point: point.precision),
    ("threads", ">", lambda point: "-" if point.threads is None else str(point.threads)),
    ("budget", ">", lambda point: f"{point.budget:,}"),
    ("tokens/s", ">", lambda point: "-" if point.tokens_per_s is None else f"{point.tokens_per_s:,.0f}"),
    ("range", ">", lambda point: _range(point)),
    ("memory", ">", lambda point: "-" if point.memory_bytes is None else f"{point.memory_bytes / 1e6:,.0f} MB"),
    ("expected", ">", lambda point: "-" if point.expected_bytes is None else f"{point.expected_bytes / 1e6:,.0f} MB"),
    ("rel error", ">", lambda point: _given(point, "rel_error", ".1e")),
    ("KL", ">", lambda point: _given(point, "kl", ".1e")),
    ("top-1", ">", lambda point: _given(point, "top1", ".1%")),
)


def tuning_text(found: Tuning) -> str:
    """Head, table, what was left out, what was chosen."""
    usable = {"own": f"; own decoder, {found.arithmetic} kernels", "vendor": f"; {found.arithmetic}"}.get(
        found.decoder, f"; {found.decoder} decoder"
    )
    lines = [
        f"checkpoint {found.checkpoint} ({found.architecture}, {found.dtype})",
        f"device     {found.device}{usable}; {found.date}, {found.seconds:,.0f} s",
        f"rows       passages of at most {found.recipe.max_input_tokens:,} tokens, {found.mean_tokens:,.0f} on average",
        f"budget     {found.budget_is}",
        "",
        *_table(found),
        "",
    ]
    if any(point.noisy for point in found.points):
        lines.append(f"!          runs differ by more than {NOISY:.0%}: something else ran on this machine")
    lines += [f"unmeasured {_left_out(one)}" for one in found.unmeasured]
    chosen = found.chosen
    lines.append(f"chosen     {chosen.curve}, {chosen.budget:,} {found.budget_is}: {_rate(chosen)} tokens/s")
    fastest = max(found.points, key=lambda point: point.tokens_per_s or 0.0)
    if fastest.precision != chosen.precision:
        lines.append(
            f"           {fastest.curve} gives {_rate(fastest)} tokens/s and is less exact; choose it yourself"
            + (" (--allow-int8)" if fastest.precision in ("int8", "fp8") else " (extract build --dtype)")
        )
    return "\n".join(lines)


def _table(found: Tuning) -> list[str]:
    on_card = any(point.expected_bytes is not None for point in found.points)
    columns = [column for column in COLUMNS if on_card or column[0] != "expected"]
    rows = [["", *(name for name, _, _ in columns)]]
    rows += [["*" if point == found.chosen else "", *(cell(point) for _, _, cell in columns)] for point in found.points]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns) + 1)]
    sides = ["<", *(side for _, side, _ in columns)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _range(point: Point) -> str:
    if point.tokens_per_s is None:
        return "out of memory"
    mark = " !" if point.noisy else "  "
    return f"{point.slowest:,.0f}-{point.fastest:,.0f}{mark}"


def _given(point: Point, key: str, form: str) -> str:
    value = None if point.difference is None else getattr(point.difference, key)
    return "-" if value is None else format(value, form)


def _rate(point: Point) -> str:
    return f"{point.tokens_per_s or 0:,.0f}"


def _left_out(one: Unmeasured) -> str:
    budgets = "" if one.from_budget is None else f", budgets from {one.from_budget:,} up"
    return f"{curve_name(one.precision, one.threads)}{budgets}: {one.reason}"
