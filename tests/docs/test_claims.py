"""The page of claims, and the first sections of the result pages, say only what the sections behind them say."""

import json
import re

import pytest
from support.pages import DOCS, ROOT, section, table

RESULTS = DOCS / "results"
CLAIMS = (RESULTS / "claims.md").read_text(encoding="utf-8")
JOBS = {row[0] for row in table((ROOT / "speed" / "gpu_jobs" / "README.md").read_text(encoding="utf-8"))}
PAPERS = [row for row in table(section(CLAIMS, "Claims of the papers")) if row[-1]]
OURS = table(section(CLAIMS, "Claims of unskew"))
NOT_MEASURED = re.compile(r"\]\([^)]*\)|`[^`]*`|\b(jobs?|tables?|figures?) \w+((, | and )[\dA]\w*(\.\d)?)*", re.I)
NUMBER = re.compile(r"(?<![\w.)-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?: ± \d[\d.]*\d)?")
OPENING = "What holds, what does not, what is open"


def numbers(text):
    """Return the numbers of a text as they are written, without code, targets of links and numbers of tables and jobs."""
    return set(NUMBER.findall(NOT_MEASURED.sub("", text).replace("−", "-")))


def readings(found):
    """Return the numbers, also without their deviations, and without their signs, which a sentence may say in words."""
    found = found | {number.partition(" ± ")[0] for number in found}
    return found | {number.lstrip("+-") for number in found}


def sections(page):
    """Return the text below each heading of a page by its anchor, up to the next heading of the same level."""
    text = page.read_text(encoding="utf-8")
    headings = list(re.finditer(r"^(#+) (.*)$", re.sub(r"^```.*?^```", hidden, text, flags=re.M | re.S), re.M))
    found = {"": text}
    for index, heading in enumerate(headings):
        following = (later.start() for later in headings[index + 1 :] if len(later[1]) <= len(heading[1]))
        anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading[2].lower()).strip())
        found[anchor] = text[heading.start() : next(following, len(text))]
    return found


def hidden(block):
    return re.sub(r"[^\n]", " ", block[0])


def linked(cell):
    """Return the pages and the sections to which a cell links."""
    links = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", cell)]
    return [((RESULTS / path).resolve(), anchor) for path, _, anchor in links]


@pytest.mark.parametrize("row", [*PAPERS, *OURS], ids=lambda row: row[0])
def test_links_of_a_claim_lead_to_sections_and_its_tests_exist(row):
    links = [link for cell in row for link in linked(cell)]
    assert links
    assert [link for link in links if link[1] not in sections(link[0])] == []
    paths = re.findall(r"`(tests/[^`]+)`", " ".join(row))
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: row[0])
def test_numbers_of_a_paper_s_claim_are_those_of_the_linked_sections(row):
    links = linked(row[5])
    behind = set().union(*(numbers(sections(page)[anchor]) for page, anchor in links))
    assert numbers(row[1]) | numbers(row[3]) <= readings(behind)
    whole = set().union(*(numbers(page.read_text(encoding="utf-8")) for page, _ in links))
    assert numbers(row[2]) <= whole


@pytest.mark.parametrize("row", OURS, ids=lambda row: row[0])
def test_numbers_of_our_claims_are_those_of_the_linked_sections(row):
    behind = set().union(*(numbers(sections(page)[anchor]) for page, anchor in linked(row[3])))
    assert numbers(row[1]) | numbers(row[4]) <= readings(behind)


@pytest.mark.parametrize("row", [*PAPERS, *OURS], ids=lambda row: row[0])
def test_a_verdict_has_one_of_four_forms_and_names_jobs_that_exist(row):
    verdict = row[4] if row in PAPERS else row[2]
    assert re.match(r"(holds partly|holds|does not hold|open)\b", verdict)
    assert set(re.findall(r"\b\d+[a-d]?\b", "".join(re.findall(r"\(jobs? [^)]*\)", " ".join(row))))) <= JOBS


@pytest.mark.parametrize("name", ["fedcog", "fedals", "fedssyn", "feddle"])
def test_the_first_section_of_a_paper_s_page_has_the_numbers_of_the_rest(name):
    page = RESULTS / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    opening = section(text, OPENING)
    assert text.index(f"## {OPENING}") == text.index("\n## ") + 1
    theory = RESULTS / f"{name}-theory.md"
    rest = text.replace(opening, "") + (theory.read_text(encoding="utf-8") if theory.is_file() else "")
    assert numbers(opening) <= readings(numbers(rest))


@pytest.mark.parametrize("setting", ["A", "B", "resnet", "table"])
def test_speeds_of_the_libraries_are_the_stored_medians(setting):
    peers = json.loads((ROOT / "results" / f"peers-{setting}.json").read_text(encoding="utf-8"))["peers"]
    rows = table(sections(RESULTS / "speed.md")["peers"].split(f"--setting {setting}", 1)[1].split("\n\n", 1)[1])
    stored = [(f"{peer['rounds_per_s']:.2f}", *(f"{end:.2f}" for end in peer["range"])) for peer in peers.values()]
    assert [tuple(re.findall(r"\d+\.\d\d", row[2])) for row in rows] == stored


def test_times_on_the_gpu_are_the_stored_ones():
    lines = (ROOT / "results" / "gpu" / "2026-11-26-h100.jsonl").read_text(encoding="utf-8").splitlines()
    stored = {row["name"]: row.get("ms") for row in map(json.loads, lines)}
    columns = ("eager", "how=graphs", "how=resident", "how=inline", "processes=1 tf32=0", "processes=5 tf32=0")
    rows = table(sections(DOCS / "engines.md")["gpus"])
    for setting, row in zip(("A", "B", "pfl"), rows, strict=True):
        for column, cell in zip(columns, row[1:], strict=True):
            measured = stored.get(f"{setting} {column}")
            assert bool(cell) == (measured is not None)
            assert not cell or abs(float(cell) - measured) <= 0.5 * 10 ** -len(cell.partition(".")[2]) + 1e-9
