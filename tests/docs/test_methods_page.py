"""Every method is on its pages as the code has it: tables, sections, options, costs, and what it is refused with."""

import dataclasses
import inspect
import re

import pytest
from support.federations import QUICK
from support.pages import DOCS, first_names, section, table

import unskew
from unskew.data.sources.registry import Source
from unskew.generators.latent import LatentGenerator
from unskew.methods.registry import METHODS, describe_all, method, rule_class
from unskew.protocol import requirements, rules
from unskew.protocol.federation_info import ClientDataView
from unskew.protocol.method import SLOTS

PAGE = "\n".join(page.read_text() for page in sorted((DOCS / "methods").glob("*.md")))
WRITING = (DOCS / "methods" / "writing-a-method.md").read_text()
CONCEPTS = (DOCS / "concepts.md").read_text()


def test_the_tables_of_methods_list_the_catalogue():
    for page in (DOCS / "methods" / "index.md",):
        rows = table(page.read_text().split("<!-- methods -->")[1])
        listed = [(re.search("`(.*?)`", row[0])[1], *row[1:]) for row in rows]
        assert listed == [(m["name"], ", ".join(m["slots"]), m["summary"], m["paper"]) for m in describe_all()], (
            page.name
        )


def test_the_table_of_slots_names_every_method():
    rows = table(section(CONCEPTS, "A method is a composition"))
    named = {row[0].strip("`"): re.findall("`(.*?)`", row[2]) for row in rows}
    assert list(named) == ["data", "client", "sync", "aggregate", "server"]
    assert named == {slot: [m["name"] for m in describe_all() if slot in m["slots"]] for slot in named}


def test_methods_that_weigh_clients_alike_are_named():
    sentence = re.search(r"Uniformly: (.*?)\.", section(CONCEPTS, "Weights"))[1]
    assert set(re.findall("`(.*?)`", sentence)) == {name for name in METHODS if rule_class(name).weights == "uniform"}


@pytest.mark.parametrize(
    ("title", "task"),
    [("Multi-label data", "multilabel"), ("Texts", "language"), ("Regression targets", "regression")],
)
def test_methods_that_refuse_a_task_are_named(title, task):
    sentence = re.search(r"Not supported: (.*?)[.;]", section((DOCS / "data.md").read_text(), title))[1]
    refusing = [name for name in METHODS if task not in rule_class(name).tasks]
    assert re.findall("`(.*?)`", sentence) == refusing


def test_the_hooks_of_the_protocol_are_described_and_no_others():
    classes = (rules.Rule, rules.WithServerHalf, *SLOTS.values())
    hooks = {name for cls in classes for name, kind in vars(cls).items() if name[0] != "_" and callable(kind)}
    listed = [re.match(r"`(\w+)\((.*)\)`", row[1]).groups() for row in table(WRITING)]
    assert sorted(name for name, _ in listed) == sorted(hooks)
    assert f"has {len(hooks)} hooks" in WRITING
    for name, parameters in listed:
        kind = next(vars(cls)[name] for cls in reversed(classes) if name in vars(cls))
        assert parameters.split(", ") == list(inspect.signature(kind).parameters)[1:] or not parameters, name
    assert first_names(WRITING.split("tuple of words:")[1]) == list(requirements.NEEDS)


def test_the_attributes_of_what_rules_and_plugins_receive_are_described_and_no_others():
    plugins = (DOCS / "methods" / "plugins.md").read_text()
    view = first_names(WRITING.split("`federation_info.ClientDataView`")[1])
    public = {name for name in vars(ClientDataView) if name[0] != "_" and name not in ("of", "plan")}
    fields = {field.name for field in dataclasses.fields(ClientDataView)}
    assert {name.partition("(")[0] for name in view} == fields | public
    rows = plugins.split("| field of `Source` | meaning |")[1]
    described = re.findall(r"^\| (.*?) \|", rows, re.M)
    assert re.findall(r"`(\w+)`", " ".join(described)) == [field.name for field in dataclasses.fields(Source)]


def part_of(name, label):
    """The lines of a method's section under one of its labels."""
    return section(PAGE, name).split(f"**{label}**\n", 1)[1].split("\n**", 1)[0]


def shown(default):
    """An option's default as the page writes it."""
    words = {"None": "none", "": "empty", "()": "empty", "True": "true", "False": "false"}
    return words.get(str(default), str(default))


def listed_options(text):
    """Names and defaults in a list of options, after those of the section that the text refers to."""
    options = {}
    if other := re.search(r"options are those of \[.*?\]\(.*?#(.*?)\)", text):
        title = next(t for t in re.findall("^## (.*)$", PAGE, re.M) if t.lower().replace(" ", "-") == other[1])
        options = listed_options(part_of(title, "Options") if title in METHODS else section(PAGE, title))
    return options | dict(re.findall(r"^- `(\w+)` = `?([^`:]*?)`?: ", text, re.M))


@pytest.mark.parametrize("entry", describe_all(), ids=lambda entry: entry["name"])
def test_the_section_of_a_method_has_its_shape_and_its_options(entry):
    name = entry["name"]
    labels = re.findall(r"^\*\*(\w[\w ]*)\*\*$", section(PAGE, name), re.M)
    assert labels[:3] == ["Options", "Cost", "Compatibility"]
    assert labels[3:] in ([], ["Notes"])
    assert listed_options(part_of(name, "Options")) == {k: shown(v) for k, v in entry["options"].items()}

    cost, goes_with = (
        re.findall(r"^- ([A-Z][\w ]*): (.*)$", part_of(name, label), re.M) for label in ("Cost", "Compatibility")
    )
    assert [line for line, _ in cost] == ["Traffic", "Computation", "State"]
    assert [line for line, _ in goes_with] == ["Compositions", "Server reads", "Tasks", "Delays"]
    told = dict(goes_with)
    assert told["Server reads"].startswith({"sum": "sums", "individual": "single updates"}[entry["needs"]])
    tasks = {"all": {"classification", "multilabel", "language", "regression"}, "classification": {"classification"}}
    tasks["classification, multi-label"] = {"classification", "multilabel"}
    tasks["classification, multi-label, regression"] = {"classification", "multilabel", "regression"}
    assert tasks[re.split(r"\.", told["Tasks"])[0]] == set(rule_class(name).tasks)


def test_the_compositions_that_are_not_supported_are_listed():
    """The page tells once that two methods of the slot server do not add up, and what center and feddm refuse."""
    fills_server = {name for name in METHODS if method(name).server is not None}
    robust = {name for name in METHODS if method(name).aggregate is not None}  # their page lists the others
    for name in set(METHODS) - {"center", "feddm"}:
        refused = set()
        for other in set(METHODS) - {"center", "feddm", name} - robust:
            if not {name, other} <= fills_server:
                try:
                    method(f"{name}+{other}")
                except unskew.UnskewError:
                    refused.add(other)
        line = re.search(r"^- Compositions: (.*)$", part_of(name, "Compatibility"), re.M)[1]
        told = re.match(r"not with ([^:.]*)", line)
        assert set(re.findall("`(.*?)`", told[1] if told else "")) == refused, name


@pytest.mark.slow
def test_the_costs_of_methods_are_those_counted():
    """In the second round, when nothing is missing any more and no body is due; all layers are linear."""
    options = {"model": "mlp", "model_options": {"hidden": [8]}}
    options |= {"rounds": 2, "local_steps": 1, "clients": 4, "partition": "iid", "engine": "inline"}
    for name in set(METHODS) - {"flora"}:  # tests/methods/test_flora.py counts it, in a model with LoRA factors
        traffic = re.search(r"^- Traffic: (.*?) down, (.*?) up\b", part_of(name, "Cost"), re.M)
        expressions = {**QUICK, "dp": "dp:noise=0.1,bit_noise=1"}  # with the bits of adaptive clipping
        expressions |= {name: f"{name}:rates=0.5" for name in ("heterofl", "fedrolex")}
        result = unskew.run(method=expressions.get(name, name), server_data=100, base_run=True, **options)
        size = result.summary["parameters"]
        g = LatentGenerator(classes=10, noise=32, hidden=256, features=8).size
        numbers = {
            "d": size,
            "2d": 2 * size,
            "3d": 3 * size,
            "dc": size,
            "db": 64 * 8 + 8,
            "dh": 8 * 10 + 10,
            "dr": 64 * 4 + 4 + 4 * 10 + 10,
            "db/alpha": 0,
            "1": 1,
            "g": g,
            "C": 10,
            "Cf": 10 * 8,
            "none": 0,
        }
        numbers["s"] = 10 * 2 * 64 + 10 * 2 // 4  # two images of each class, a byte for a label
        first, second = result.history
        counted = [second[f"bytes_{way}"] - first[f"bytes_{way}"] for way in ("down", "up")]
        numbers["c"] = counted[1] / 16  # tests/methods/test_compression.py compares it with the formulas
        costs = [cost.strip("`") for cost in traffic.groups()]
        assert counted == [16 * sum(numbers[term] for term in cost.split(" + ")) for cost in costs], name
