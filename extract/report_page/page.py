"""The page: facts in a template, with its style, its scripts and the charts' library inside one file.

It asks for nothing from anywhere, and its own policy forbids it to: only the two scripts whose hashes it names may run,
so a text that looks like one stays a text. Every value is escaped by the template; those that scripts read are JSON
without a character that HTML knows.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from extract.errors import ExtractError, SpecError
from extract.progress import duration
from extract.report_page.facts import Report
from extract.report_page.gathering import DEFAULT_ROWS, gather
from extract.storage import Place, locate
from extract.store import replace_file

MARK = b'<meta name="generator" content="extract report">'
"""What tells one of our pages from somebody's file."""
MARK_WITHIN = 1_000

OUTCOME_MEANINGS = {
    "ok": "all of its tokens went through the model",
    "truncated": "it was too long, so a part of it was cut off",
    "empty": "its text has no characters, or no tokens",
    "null": "it has no text",
    "bad_text": "what it holds is not valid text",
    "too_long": "it was too long, and such rows were left out",
    "non_finite": "its numbers were not finite or too large to store",
}
STAGE_MEANINGS = {
    "read+tokenise": "reading rows and turning text into tokens",
    "forward": "running the model",
    "write": "compressing and writing states",
}

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


class NotOurPage(SpecError):
    """A file that no earlier report wrote is in the way."""

    template = "{path}: exists and is not a page of `extract report`. Choose another file with -o."


class PageUnwritable(ExtractError):
    """The page has nowhere to go."""

    exit_code = 2
    template = "{path}: {problem}. Choose another file with -o."


def write_report(root: str | Place, page: str | Path, rows: int = DEFAULT_ROWS) -> Report:
    """Write the page of an output directory, finished or not; an earlier page of that name is replaced.

    Args:
        root: the output directory.
        page: the HTML file.
        rows: how many rows to look at with their states, at most 10,000.

    Raises:
        NotAJob: `root` is no output directory.
        NotOurPage, PageUnwritable: see there.
    """
    page = Path(page)
    _check_place(page)
    report = gather(locate(root), rows)
    replace_file(page, html(report).encode("utf-8", "replace"))
    return report


def html(report: Report) -> str:
    """The whole page."""
    import jinja2
    from plotly.offline import get_plotlyjs

    folder = resources.files("extract.report_page")
    parts = {name: (folder / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")}
    plotly: str = get_plotlyjs()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": _number,
        "size": size_text,
        "share": _share,
        "seconds": _seconds,
        "short": _short,
    }
    return environment.from_string(parts["page.html"]).render(
        report=report,
        facts=script_json(report.as_json()),
        style=parts["page.css"],
        script=parts["page.js"],
        plotly=plotly,
        policy=_policy(plotly, parts["page.js"]),
        outcome_meanings=OUTCOME_MEANINGS,
        stage_meanings=STAGE_MEANINGS,
        stateless=sum(count for name, count in report.outcomes.items() if name not in ("ok", "truncated")),
    )


def script_json(value: Mapping[str, Any]) -> str:
    """JSON in which no character means anything to HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII alone
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def size_text(num_bytes: float) -> str:
    """Bytes for people: 1.2 GB."""
    power = 0
    while num_bytes >= 1000 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{num_bytes:,.{1 if power else 0}f} {_UNITS[power]}"


def _check_place(page: Path) -> None:
    if page.is_dir():
        raise PageUnwritable(path=page, problem="a directory, not a file")
    if not page.parent.is_dir():
        raise PageUnwritable(path=page, problem=f"there is no directory {page.parent}")
    if page.exists():
        with page.open("rb") as file:
            if MARK not in file.read(MARK_WITHIN):
                raise NotOurPage(path=page)


def _policy(*scripts: str) -> str:
    """What the browser may do on this page: run these scripts and nothing else, and ask nobody for anything."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def _share(part: float, whole: float) -> str:
    """A share in percent, never rounded to none or all where it is neither."""
    if not whole:
        return "0 %"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %" if percent % 1 else f"{percent:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else duration(value)


def _short(value: float) -> str:
    return f"{value:,.4g}"
