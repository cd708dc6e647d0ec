"""Reports and pages of the documentation in Chromium: no error, no request to other servers, narrow, dark and printed."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
from support.named import federation
from support.pages import DOCS, ROOT

import unskew

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt-get install chromium"),
]
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--virtual-time-budget=15000",
)
PHONE, DESKTOP = (390, 844), (1280, 900)
MEASURE = """<script>addEventListener("load", () => setTimeout(() => parent.postMessage(JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  ground: getComputedStyle(document.body).backgroundColor,
  scheme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  diagrams: document.querySelectorAll("pre.diagram svg").length,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name) }), "*"), 3000))</script>"""
FRAME = """<!doctype html><script>onmessage = (event) => document.documentElement.dataset.measured = event.data</script>
<iframe src="measured.html" style="width: {}px; height: {}px; border: 0"></iframe>"""
"""Shows the page in a frame, because no window of Chromium is narrower than 500 pixels."""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("Cache-Control", "no-store")  # pages are written again within a second
        super().end_headers()


def run_chromium(profile, address, *options):
    """Run Chromium on a page; assert that nothing fails and return the standard output."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    assert console == []
    return done.stdout


def measured(profile, page, address, size, *options):
    """Open a copy of a page that measures itself, in a frame.

    Args:
        profile: Folder of the browser.
        page: File of the page; the copy and the frame are written next to it.
        address: Address of the folder of the page.
        size: Width and height of the frame.
        options: Further options of the browser.
    """
    # The copy has no content-security policy, which would not allow the script: what it blocks is tried here and recorded.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    page.with_name("measured.html").write_text(text.replace("</body>", f"{MEASURE}</body>"))
    page.with_name("frame.html").write_text(FRAME.format(*size))
    window = f"--window-size={size[0] + 200},{size[1] + 200}"
    dom = run_chromium(profile, f"{address}/frame.html", window, *options, "--dump-dom")
    return json.loads(html.unescape(re.search(r'data-measured="([^"]*)"', dom)[1]))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    pytest.importorskip("plotly", reason="plotly is not installed")
    folder = tmp_path_factory.mktemp("compared")
    options = {"model": "logistic", "rounds": 3, "local_steps": 2, "lr": 0.1, "engine": "inline", "batch_size": 8}
    unskew.compare(federation(), methods=["fedavg", "scaffold"], seeds=2, out=folder / "runs", **options)
    return unskew.report(folder / "runs", folder / "report.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder and the address of the built documentation."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder], cwd=ROOT, check=True)
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_browser_check_notices_script_errors(tmp_path):
    """The other tests rely on it."""
    page = tmp_path / "page.html"
    for fault in ("throw Error()", "console.error(1)", "Promise.reject(1)"):
        page.write_text(f"<!doctype html><body><script>{fault}</script></body>")
        with pytest.raises(AssertionError, match="CONSOLE"):
            run_chromium(tmp_path / "profile", page.as_uri(), "--dump-dom")
    remote = "https://example.org/a.png"
    page.write_text(f'<!doctype html><body><img src="{remote}"><div style="width: 500px">wide</div></body>')
    state = measured(tmp_path / "profile", page, tmp_path.as_uri(), PHONE)
    assert state["needed"] > PHONE[0]
    assert state["loaded"] == [remote]


def check_page(profile, page, address, own):
    """Check a page on a desktop and on a phone in light mode, and on a phone in dark mode.

    Args:
        profile: Folder of the browser.
        page: File of the page.
        address: Address of its folder.
        own: Prefix of all addresses from which the page may load.
    """
    for size in (DESKTOP, PHONE):
        state = measured(profile, page, address, size)
        assert state["width"] == size[0]
        assert state["needed"] <= size[0], "the page must not scroll sideways"
        assert [url for url in state["loaded"] if not url.startswith(own)] == []
        assert (state["scheme"], state["ground"]) == ("light", "rgb(255, 255, 255)")
    # Another profile, because the site remembers the colors of the first visit.
    state = measured(profile.with_name("dark"), page, address, PHONE, "--force-dark-mode")
    assert state["needed"] <= PHONE[0]
    assert state["scheme"] == "dark"
    assert max(map(int, re.findall(r"\d+", state["ground"])[:3])) < 64


def check_print(profile, address, target):
    run_chromium(profile, address, f"--print-to-pdf={target}")
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type /Page\b", data)) >= 1


def test_report_runs_in_the_browser_without_errors(report, tmp_path):
    page = report.read_text()
    tags = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"', page)
    assert tags == []
    dom = run_chromium(tmp_path / "profile", report.as_uri(), "--dump-dom")
    assert 'data-ready="yes"' in dom[:2000], "the script of the page ran under its content-security policy"
    check_page(tmp_path / "profile", report, report.parent.as_uri(), "data:")
    check_print(tmp_path / "profile", report.as_uri(), tmp_path / "report.pdf")


@pytest.mark.parametrize("name", ["", "methods/client", "reference/running", "gallery"])
def test_page_of_the_documentation(name, site, tmp_path):
    folder, address = site
    check_page(tmp_path / "profile", folder / name / "index.html", f"{address}/{name}", address)
    check_print(tmp_path / "profile", f"{address}/{name}/", tmp_path / "page.pdf")


def test_diagrams_are_drawn(site, tmp_path):
    if not list((DOCS / "assets" / "vendor").glob("mermaid-*.js")):
        pytest.skip("mermaid is missing: python docs/fetch_mermaid.py")
    folder, address = site
    page = folder / "architecture" / "index.html"
    state = measured(tmp_path / "profile", page, f"{address}/architecture", DESKTOP)
    assert [url for url in state["loaded"] if not url.startswith(address)] == []
    assert state["diagrams"] == 1


def test_search_finds_words_in_code_and_lists(site):
    """Words of the search index are what its separator leaves; titles and texts contain HTML."""
    folder, _ = site
    index = json.loads((folder / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    pages = {}
    for entry in index["docs"]:
        text = html.unescape(re.sub("<[^>]+>", " ", f"{entry['title']} {entry['text']}")).lower()
        for word in separator.split(text):
            pages.setdefault(word, set()).add(entry["location"].split("#")[0])
    assert {"tutorials/own-csv/", "configuration/", "data/", "tables/"} <= pages["csv"]
    assert len(pages["scaffold"]) > 10
    assert not [word for word in pages if "scaffold" in word and word not in ("scaffold", "scaffold's", "scaffold’s")]
