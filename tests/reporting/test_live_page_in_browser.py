"""The live page in a real browser, while rounds are added to a run: what it shows, keyboard, dark mode, lost connection."""

import json
import shutil

import pytest
from support.live_page import served
from support.named import CLIENTS, federation

import unskew
from unskew.filesystem import write_atomic
from unskew.folder_locks import folder_lock
from unskew.reporting.live_page import LiveRuns, write_live_page
from unskew.tasks.formatting import format_percent

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt-get install chromium"),
]
OPTIONS = {"model": "logistic", "rounds": 4, "local_steps": 2, "engine": "inline", "batch_size": 8}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return unskew.run(federation(), out=tmp_path_factory.mktemp("finished") / "run", **OPTIONS)


@pytest.fixture
def runs(finished, tmp_path):
    """A folder with a finished run, and a run after its second round."""
    for name in (HOSTILE, "going"):
        shutil.copytree(finished.folder, tmp_path / "runs" / name)
    for name in ("summary.json", "clients.jsonl"):
        (tmp_path / "runs" / "going" / name).unlink()
    write_rows(tmp_path / "runs" / "going", finished.history[:2])
    return tmp_path / "runs"


def write_rows(folder, rows):
    write_atomic(folder / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())


@pytest.fixture
def page():
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_context(color_scheme="light", viewport={"width": 1200, "height": 900}).new_page()
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("dialog", lambda dialog: page.said.append(dialog.message))
        yield page
        browser.close()


def focused(page):
    return page.evaluate("[document.activeElement.tagName, document.activeElement.id]")


def is_focus_visible(page):
    return page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")


def test_a_run_in_progress_is_followed_with_the_keyboard(runs, finished, page):
    going, expect = runs / "going", playwright.expect
    with served(runs) as server, folder_lock(going):
        page.goto(server.address)
        status, rows = page.get_by_role("status"), page.locator("#runs tbody tr")
        expect(status).to_have_text("Runs: 1 running, 1 finished.")
        expect(status).to_have_attribute("aria-live", "polite")
        expect(rows.nth(0)).to_contain_text("going")
        expect(rows.nth(0)).to_contain_text("2 of 4")
        expect(rows.nth(1)).to_contain_text(HOSTILE)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Table of runs"
        assert is_focus_visible(page)
        page.keyboard.press("Tab")
        assert is_focus_visible(page)
        link = focused(page)[1]
        page.keyboard.press("Enter")
        details = page.locator("#details > details[open]")
        expect(details.get_by_role("heading", name="going")).to_be_visible()
        expect(details).to_contain_text("Clients are evaluated at the end of the run.")
        curve = details.get_by_role("img").first
        percent = [100 * row["accuracy"] for row in finished.history]
        expect(curve).to_have_attribute("aria-label", f"test accuracy (%) by round, from {min(percent[:2]):.4g} to "
                                        f"{max(percent[:2]):.4g}; {percent[1]:.4g} in round 2")  # fmt: skip
        page.keyboard.press("Tab")  # the name of the run, which closes its details
        page.keyboard.press("Tab")
        assert focused(page)[0] == "SUMMARY"
        page.keyboard.press("Enter")
        values = details.get_by_role("table").first
        expect(values.locator("tbody tr")).to_have_count(2)
        page.locator(f"#{link}").focus()

        write_rows(going, finished.history[:3])
        expect(rows.nth(0)).to_contain_text("3 of 4")
        expect(values.locator("tbody tr")).to_have_count(3)  # and still open
        expect(rows.nth(0)).to_contain_text(format_percent(finished.history[2]["accuracy"]) + "%")
        assert focused(page)[1] == link
        write_rows(going, finished.history)
        for name in ("summary.json", "clients.jsonl"):
            shutil.copy(finished.folder / name, going / name)
        expect(details.locator("caption", has_text="4 clients, worst first")).to_be_visible()
        worst = min(finished.clients, key=lambda client: client["accuracy"])["name"]
        clients = details.locator("div[id^=clients] tbody td:first-child")
        expect(clients.first).to_have_text(worst)
        assert {*clients.all_text_contents()} == {*CLIENTS}
        colors = """[getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector("svg text")).fill]"""
        assert page.evaluate(colors) == ["rgb(255, 255, 255)", "rgb(87, 96, 106)"]
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(colors) == ["rgb(20, 24, 29)", "rgb(160, 169, 179)"]
        page.set_viewport_size({"width": 400, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.said == []
        assert all(url.startswith((server.address, "data:")) for url in page.asked)
    expect(status).to_contain_text("unskew watch does not answer")


def test_the_page_as_one_file_opens_without_a_server(runs, tmp_path, page):
    write_live_page(LiveRuns(runs), tmp_path / "page.html")
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_role("link", name=HOSTILE).press("Enter")
    playwright.expect(page.get_by_text("4 clients, worst first")).to_be_visible()
    playwright.expect(page.get_by_role("heading", name="going")).not_to_be_visible()
    assert page.said == []
    assert page.asked == [(tmp_path / "page.html").as_uri()]
