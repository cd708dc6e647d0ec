"""Pages of runs whose texts are mark-up: the report and the page of ``unskew watch`` show them as text."""

import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz_folder import TINY
from support.fuzzing import amounts, fuzz
from support.named import federation
from support.received import files, places, read, replaced, write

import unskew
from unskew.reporting.live_page import LiveRuns, write_live_page

pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("undrawn")]
PIECES = [
    "<xss onx=1>",
    "</script>",
    "<script>",
    "<!--",
    "-->",
    "]]>",
    '"',
    "'",
    "`",
    ">",
    "<",
    "&lt;",
    "&#60;",
    "\\u003c",
]
PIECES += [
    '" onx="1',
    "' onx='1",
    "${xss}",
    "{{xss}}",
    "javascript:xss",
    "</style>",
    "</title>",
    "\0",
    "\u2028",
    "%",
    "a ",
]
MARKUP = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)


class Elements(HTMLParser):
    """The names of a page's elements and attributes, and its number of scripts."""

    def __init__(self, text):
        super().__init__()
        self.names, self.scripts = set(), 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(f"{tag} {name}" for name, _ in attrs)}
        self.scripts += tag == "script"


def texts_of(content):
    """Return the paths of the texts in a file of a run."""
    found = []
    for place in places(content):
        value = content
        for key in place:
            value = value[key]
        if isinstance(value, str):
            found.append(place)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages") / "run"
    unskew.run(federation(), **{**TINY, "method": "fedprox+ft"}, out=folder)
    (folder / "warnings.txt").write_text("a warning\n")
    return folder


def pages(folder, target):
    """Write both pages of a run, and return their texts."""
    unskew.report(folder, target / "report.html")
    write_live_page(LiveRuns(folder), target / "watch.html")
    return [(target / name).read_text() for name in ("report.html", "watch.html")]


@pytest.mark.usefixtures("light")
@amounts(8, 300)
def test_texts_of_a_run_add_no_element_and_no_script_to_its_pages(box, run, examples):
    usual = [Elements(text) for text in pages(run, box.here)]
    cases = [(file, place) for file in files(run) if "checkpoints" not in file.parts for place in texts_of(read(file))]
    assert len({file.name for file, _ in cases}) > 3

    def check_pages(file, place, text):
        sent = shutil.copytree(run, box.here / "sent")
        write(sent / file.relative_to(run), replaced(read(file), place, text))
        (sent / "warnings.txt").write_text(f"{text}\n")
        for page, before in zip(pages(sent, box.here), usual, strict=True):
            found = Elements(page)
            assert found.names <= before.names, found.names - before.names
            assert found.scripts == before.scripts

    @fuzz(examples)
    @given(st.sampled_from(cases), MARKUP)
    def check(case, text):
        box.python(lambda: check_pages(*case, text))

    check()
