"""The report page as a browser shows it: what is seen, what is asked for, and what a hostile text cannot do."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser_rig import Browser, needs_browser
from shard_rig import write_output

from extract.job import read_job
from extract.manifest import finalize
from extract.report_page.page import write_report
from extract.sources import open_source
from extract.spec import StatesSpec

pytestmark = needs_browser

HOSTILE = (
    "<script>window.broken = 'script'</script>",
    "<img src=x onerror=\"window.broken = 'image'\">",
    "</script></style></title><svg onload=\"window.broken = 'svg'\">",
    '"><a href="javascript:window.broken=1">click</a>',
    "<!-- <b>bold</b> &lt;i&gt; %{x} {{ 7 * 7 }} {% endif %}",
    "Grüße 🙂 العربية \u202e right to left \u2028 line",
    "",
    "&lt;script&gt;window.broken = 'entity'&lt;/script&gt; javascript:window.broken=1",
)
"""Eight, over seven rows of which some have no state: each of them is sampled at least once."""


def texts(count: int) -> list[str]:
    return [HOSTILE[n % len(HOSTILE)] + (f" number {n}" if n >= len(HOSTILE) else "") for n in range(count)]


def output(root: Path, source: Path, **options: Any) -> Path:
    """An output whose texts are read from two files with unpleasant names."""
    write_output(root, StatesSpec(kind="last"), **options)
    source.mkdir()
    rows = texts(read_job(root).num_rows or 0)
    for name, part in (("<b>one&amp;.parquet", rows[:9]), ("two '\".parquet", rows[9:])):
        pq.write_table(
            pa.table({"text": part, "key": part, "meta.url": part, "score": [0.0] * len(part)}), source / name
        )
    table = json.loads((root / "job.json").read_text())
    table["spec"]["source"] |= {"path": [str(source)], "carry": ["score"], "id_column": "key"}
    table["contract"] = {"checkpoint": {"name": HOSTILE[0]}}
    (root / "job.json").write_text(json.dumps(table))
    table["source"] = open_source(read_job(root).spec.source).layout().fingerprint
    (root / "job.json").write_text(json.dumps(table))
    if not options.get("missing"):
        finalize(read_job(root))
    return root


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    found = write_report(output(folder / "out", folder / "source"), folder / "page.html")
    assert found.sample is not None
    assert found.sample.text_from == "source", found.sample.text_note
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile") / "new")
    yield opened
    opened.close()


def point(browser: Browser, row: int) -> tuple[float, float]:
    """Where a row's point of the map is in the window, which is scrolled to it."""
    script = """(row => {
        const drawn = document.getElementById("chart-map");
        drawn.scrollIntoView({block: "center", behavior: "instant"});
        const rows = JSON.parse(document.getElementById("facts").textContent).sample.rows;
        const own = rows.find(one => one.row === row), box = drawn.getBoundingClientRect(), full = drawn._fullLayout;
        const at = (axis, value) => axis._offset + axis.l2p(value);
        return [box.left + at(full.xaxis, own.pca[0]), box.top + at(full.yaxis, own.pca[1])];
    })"""
    x, y = browser.run(f"{script}({row})")
    return x, y


def shown(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def tab_to(browser: Browser, selector: str) -> None:
    """Press Tab until an element has the focus; a person would not press it more often than this."""
    for _ in range(8):
        browser.key("Tab")
        if browser.run(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    pytest.fail(f"{selector} is not reached")


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_is_whole_at_any_width_in_both_themes(theme, width, page, browser):
    browser.open(page, width=width, theme=theme)
    assert browser.errors == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.run("document.documentElement.scrollWidth") == width
    charts = browser.run(
        """[...document.querySelectorAll(".chart")].map(chart => {
            const box = chart.getBoundingClientRect(), card = chart.closest("section").getBoundingClientRect();
            return [
                chart.querySelectorAll(".main-svg").length > 0,
                box.left >= card.left && box.right <= card.right + 1,
                chart.getAttribute("aria-label").length > 10,
                chart.closest("figure").querySelector("figcaption").textContent.length > 40,
            ];
        })"""
    )
    assert len(charts) == 5  # files, lengths, norms, dimensions, map: this output has no times
    assert charts == [[True] * 4] * 5


def test_pointing_at_a_row_shows_its_text_outcome_and_neighbours(page, browser):
    browser.open(page)
    rows = browser.run("JSON.parse(document.getElementById('facts').textContent).sample.rows")
    for own in (rows[3], rows[8]):
        browser.move(*point(browser, own["row"]))
        browser.until(f"document.querySelector('#card h3').textContent === 'Row {own['row']}'")
        assert shown(browser, "#card .text") == (own["text"] or "(no text)")
        assert shown(browser, "#card .muted").startswith(f"ok · {own['num_tokens']} tokens · norm ")
        near = browser.run(
            "[...document.querySelectorAll('#card .near button')].map(one => [one.title, one.firstChild.textContent])"
        )
        assert near == [
            [f"Row {rows[other]['row']}", f"{cosine:.3f}"]
            for other, cosine in zip(own["neighbours"], own["cosines"], strict=True)
        ]
        label = shown(browser, "#chart-map .hoverlayer")
        assert f"Row {own['row']} · ok · {own['num_tokens']} tokens" in label
    assert browser.errors == []


def test_no_text_of_the_data_runs_or_becomes_markup(page, browser):
    browser.open(page)
    rows = browser.run("JSON.parse(document.getElementById('facts').textContent).sample.rows")
    assert all(any(row["text"].startswith(text) for row in rows) for text in HOSTILE)
    for own in rows:
        browser.move(*point(browser, own["row"]))
    assert browser.run("window.broken") is None
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.run("document.querySelectorAll('img, iframe, object, embed, form, link, a[href^=java]').length") == 0
    assert browser.run("document.querySelectorAll('main b, main i, main a').length") == 0
    assert shown(browser, "h1").startswith(HOSTILE[0])
    assert "<b>one&amp;.parquet" in shown(browser, "table")
    assert browser.errors == []
    assert browser.requests == [page.resolve().as_uri()]


def test_a_label_of_the_map_shows_markup_as_it_is_written(page, browser):
    browser.open(page)
    browser.move(*point(browser, 12))
    browser.until("document.querySelector('#chart-map .hoverlayer').textContent.includes('Row 12')")
    assert HOSTILE[4][:40] in shown(browser, "#chart-map .hoverlayer")
    assert browser.run("document.querySelectorAll('#chart-map .hoverlayer a').length") == 0


@pytest.mark.parametrize(
    "attempt",
    [
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.broken = 1\">')",
        "document.body.appendChild(Object.assign(document.createElement('script'), {text: 'window.broken = 1'}))",
        "fetch('https://127.0.0.1:9/').catch(() => 'refused')",
        "void new Image().setAttribute('src', 'https://127.0.0.1:9/x.png')",
    ],
)
def test_the_pages_own_policy_refuses_code_and_requests_that_get_in(attempt, page, browser):
    browser.open(page)
    browser.run(f"(() => {{ return {attempt} ? 1 : 0 }})()" if "fetch" not in attempt else attempt)
    browser.settle()
    assert browser.run("window.broken") is None
    assert browser.errors  # the browser says that it refused
    assert all("Content Security Policy" in error for error in browser.errors), browser.errors


def test_charts_follow_the_theme_while_the_page_is_open(page, browser):
    colours = """["body", "section", "#chart-lengths .xtick text", "#chart-lengths .bars path"].map(selector => {
        const style = getComputedStyle(document.querySelector(selector));
        return selector.startsWith("#") ? style.fill : style.backgroundColor;
    })"""
    browser.open(page, theme="light")
    light = browser.run(colours)
    before = browser.picture(whole=False)
    browser.theme("dark")
    browser.settle()
    dark = browser.run(colours)
    assert all(one != other for one, other in zip(light, dark, strict=True)), (light, dark)
    assert browser.picture(whole=False) != before
    browser.theme("light")
    browser.settle()
    assert browser.run(colours) == light


def test_rows_are_read_with_the_keyboard_alone(page, browser):
    browser.open(page)
    browser.run("document.getElementById('find').focus()")
    tab_to(browser, "#next")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    first = shown(browser, "#card h3")
    browser.key("Enter")
    browser.until(f"document.querySelector('#card h3').textContent !== {json.dumps(first)}")
    assert shown(browser, "#position") == "2 of 15 sampled"
    near = browser.run("document.querySelector('.near button').title")
    tab_to(browser, ".near button")
    browser.key("Enter")
    assert shown(browser, "#card h3") == near


def test_rows_are_found_by_their_text(page, browser):
    browser.open(page)
    browser.run("""(() => {
        const find = document.getElementById("find");
        find.value = "NUMBER 1"; find.dispatchEvent(new Event("input"));
    })()""")
    rows = browser.run("JSON.parse(document.getElementById('facts').textContent).sample.rows")
    expected = sum("number 1" in row["text"] for row in rows)
    assert shown(browser, "#found") == f"{expected} rows"
    strong = browser.run(
        """document.getElementById("chart-map").data.flatMap(one => one.marker.opacity || [])
            .filter(opacity => opacity > 0.5).length"""
    )
    assert strong == expected


@pytest.mark.parametrize("colour", ["length", "norm", "row"])
def test_the_map_is_coloured_as_asked(colour, page, browser):
    browser.open(page)
    browser.run(f"""(() => {{
        const chosen = document.getElementById("colour");
        chosen.value = "{colour}"; chosen.dispatchEvent(new Event("change"));
    }})()""")
    found = browser.run("document.getElementById('chart-map').data[0].marker.color")
    rows = browser.run("JSON.parse(document.getElementById('facts').textContent).sample.rows")
    key = {"length": "num_tokens"}.get(colour, colour)
    assert found == [row[key] for row in rows]
    assert browser.errors == []


def test_no_button_sends_anything_anywhere(page, browser):
    browser.open(page)
    titles = browser.run("[...document.querySelectorAll('.modebar-btn')].map(one => one.dataset.title)")
    assert titles == ["Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]


def test_a_dark_page_is_printed_on_white(page, browser):
    browser.open(page, theme="dark")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.theme("dark", media="print")
    browser.settle()
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tick = "getComputedStyle(document.querySelector('#chart-lengths .xtick text')).fill"
    assert browser.run(tick) == "rgb(92, 100, 112)"
    assert browser.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.theme("dark")
    browser.settle()
    assert browser.run(tick) == "rgb(160, 168, 180)"


@pytest.mark.parametrize(
    "options",
    [
        {"missing": (0, 1, 2)},
        {"missing": (1,)},
        {"num_shards": 1, "rows_per_shard": 1},
        {"num_shards": 1, "rows_per_shard": 2},
    ],
    ids=["no rows", "a shard missing", "one row", "one state"],
)
def test_unusual_outputs_are_drawn_without_errors(options, tmp_path, browser):
    root = tmp_path / "out"
    write_output(root, StatesSpec(), **options)
    write_report(root, tmp_path / "page.html")
    browser.open(tmp_path / "page.html", width=400)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") == 400
    assert browser.run("document.querySelectorAll('main section').length") == 8
