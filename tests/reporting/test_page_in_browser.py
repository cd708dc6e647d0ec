"""The report in a real browser: it opens offline, nothing fails, its switches work, its numbers are those of the runs."""

import json
import shutil

import pytest
from support.named import CLASSES, CLIENTS

import unskew

pytest.importorskip("plotly", reason="plotly is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def opened(compared, tmp_path_factory):
    """The page in a browser without a network, with all that it asked for and complained of."""
    file = unskew.report([compared[0], compared[0] / "fedavg"], tmp_path_factory.mktemp("page") / "report.html")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        context = browser.new_context(offline=True, color_scheme="light", viewport={"width": 1200, "height": 900})
        page = context.new_page()
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(file.as_uri())
        page.locator("html[data-ready=yes]").wait_for(state="attached", timeout=60_000)
        yield page
        assert page.said == [], "something failed in the browser"
        assert [url for url in page.asked if not url.startswith(("data:", "blob:"))] == [file.as_uri()]
        browser.close()


def drawn(page, role):
    """What a figure shows: its lines with a name, and its horizontal axis."""
    return page.evaluate(
        """role => { const place = document.querySelector(`[data-role="${role}"]`);
        return { names: place.data.filter(t => t.name).map(t => t.name), x: place.data.at(-1).x, y: place.data.at(-1).y,
                 type: place.layout.xaxis.type, title: place.layout.yaxis.title.text }; }""",
        role,
    )


def test_figures_are_drawn_and_switches_work(opened):
    first = drawn(opened, "curves")
    assert first["names"] == ["fedprox:mu=0.5", "fedavg", "fedexp+ft"]
    assert (first["x"], first["type"], first["title"]) == ([1, 2, 3], "linear", "test accuracy (%)")
    opened.get_by_label("traffic").check()
    assert drawn(opened, "curves")["type"] == "log"
    opened.get_by_label("seconds", exact=True).check()
    assert drawn(opened, "curves")["type"] == "linear"
    opened.get_by_label("test loss").check()
    assert drawn(opened, "curves")["title"] == "test loss"
    opened.get_by_label("test accuracy").check()
    opened.get_by_role("checkbox", name="fedavg", exact=True).uncheck()
    assert drawn(opened, "curves")["names"] == ["fedprox:mu=0.5", "fedexp+ft"]
    opened.get_by_role("checkbox", name="fedavg", exact=True).check()
    opened.locator('[data-choice="whose"] select').select_option("personal_accuracy")
    assert opened.evaluate("""document.querySelector('[data-role="boxes"]').layout.yaxis.ticktext""") == ["fedexp+ft"]
    opened.get_by_label("metric").select_option("train_loss")
    assert drawn(opened, "measured")["title"] == "train_loss"
    opened.get_by_role("radio", name="samples").check()


def test_numbers_on_the_page_are_those_of_the_runs(opened, compared):
    for summary in (json.loads(path.read_text()) for path in compared[0].glob("*/seed-*/summary.json")):
        row = opened.locator('table[data-name="runs"] tbody tr').filter(
            has=opened.locator(f'td:first-child:text-is("{summary["method"]}")')
        )
        cells = row.nth(summary["seed"]).locator("td")
        values = [cells.nth(place).get_attribute("data-value") for place in (2, 3, 4, 10, 12)]
        wanted = (summary["seed"], 100 * summary["accuracy"], 100 * summary["best_accuracy"], summary["bytes_up"] / 1e6)
        assert list(map(float, values)) == pytest.approx([*wanted, summary["seconds"]], rel=1e-12)
    opened.get_by_label("rounds").check()
    means = dict(zip(["fedprox:mu=0.5", "fedavg", "fedexp+ft"], opened.evaluate(
        """[...document.querySelector('[data-role="curves"]').data].filter(t => t.name).map(t => t.y.at(-1))"""
    ), strict=True))  # fmt: skip
    for row in compared[1].rows():
        assert means[row["method"]] == pytest.approx(100 * row["accuracy"], rel=1e-5)


def test_names_are_shown_as_they_are(opened):
    ticks = opened.evaluate(
        """[...document.querySelectorAll('[data-role="map"] .ytick text')].map(t => t.textContent)"""
    )
    assert len(ticks) == 4
    assert ticks[2] == CLIENTS[2]
    assert ticks[0] == CLIENTS[0][:17] + "…"
    classes = opened.evaluate(
        """[...document.querySelectorAll('[data-role="map"] .xtick text')].map(t => t.textContent)"""
    )
    assert classes[1:] == list(CLASSES[1:])


def test_tables_are_sorted_and_copied(opened):
    table = opened.locator('table[data-name="comparison"]')
    title = table.get_by_role("button", name="last round")
    title.press("Enter")
    column = [float(cell.get_attribute("data-value")) for cell in table.locator("tbody tr td:nth-child(3)").all()]
    assert column == sorted(column, reverse=True)
    assert table.locator('th[aria-sort="descending"]').count() == 1
    box = opened.locator(".copyable").filter(has=table)
    box.get_by_role("button", name="Copy as CSV").click()
    head, *lines = box.locator("textarea").input_value().splitlines()
    assert head.startswith('method,seeds,"last round, %","last round, %, std"')
    assert [float(line.split(",")[2]) for line in lines] == column
    box.get_by_role("button", name="Copy as LaTeX").click()
    text = box.locator("textarea").input_value()
    assert r"last round, \%" in text
    assert r"$\pm$" in text
    opened.locator("select[data-groups]").select_option("fedavg")
    shown = opened.locator('table[data-name="differences"] tbody tr:visible td:nth-child(2)').all_text_contents()
    assert shown == ["fedavg", "fedavg"]


def test_it_is_used_by_keys_and_turns_dark_and_printable(opened):
    place = opened.locator('[data-role="curves"]')
    extent = """document.querySelector('[data-role="curves"]')._fullLayout.xaxis.range"""
    before = opened.evaluate(extent)
    place.focus()
    place.press("+")
    after = opened.evaluate(extent)
    assert after[1] - after[0] < before[1] - before[0]
    place.press("0")
    assert opened.evaluate(extent) == before
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened.evaluate(ground) == "rgb(255, 255, 255)"
    opened.get_by_role("button", name="Dark").press("Enter")
    assert opened.evaluate(ground) == "rgb(20, 24, 29)"
    assert opened.get_by_role("button", name="Light").is_visible()
    opened.emulate_media(media="print")
    assert not opened.get_by_role("button", name="Copy as CSV").first.is_visible()
    opened.emulate_media(media="screen", color_scheme="dark")
    opened.get_by_role("button", name="Light").click()
    assert opened.evaluate(ground) == "rgb(255, 255, 255)"
    opened.set_viewport_size({"width": 400, "height": 800})
    opened.wait_for_timeout(1500)  # figures follow the window a moment later
    assert opened.evaluate("document.documentElement.scrollWidth") <= 400
