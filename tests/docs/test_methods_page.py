"""Pages on methods: every method has a section, and its costs are those counted; the rest comes from the registry."""

import dataclasses
import inspect
import re

import pytest
from support.federations import LORA, QUICK, SmallBatchNorm, blobs
from support.pages import DOCS, ROOT, built, generator, section, table

import unskew
from unskew.data.sources.registry import SampleTable, Source
from unskew.errors import MethodConflictError
from unskew.generators.latent import LatentGenerator
from unskew.methods.conflicts import conflicts
from unskew.methods.descriptions import describe_all
from unskew.methods.registry import METHODS, method, rule_class
from unskew.protocol import rules
from unskew.protocol.federation_info import ClientDataView, FederationInfo
from unskew.protocol.method import SLOTS
from unskew.simulation.personal_models import has_fine_tuning, has_personal_models

SECURITY = (DOCS / "security.md").read_text()
PAGE = "\n".join(built(page) for page in sorted((DOCS / "methods").glob("*.md")))
WRITING = built(DOCS / "methods" / "writing-a-method.md")


def test_the_readme_promises_no_more_methods_than_there_are():
    """Privacy, compression and robust aggregation are not methods for skewed data."""
    others = ("dp", "dpsgd", "compression", "robust", "smooth")
    for_skew = [name for name, where in METHODS.items() if where.split(":")[0].split(".")[2] not in others]
    promised = re.findall(r"\bmore than (\d+)\b", (ROOT / "README.md").read_text(), re.IGNORECASE)
    assert promised
    assert len(for_skew) > max(map(int, promised))


def test_the_hooks_and_attributes_of_the_protocol_are_described():
    classes = (rules.Rule, rules.WithServerHalf, *SLOTS.values())
    hooks = {name for cls in classes for name, kind in vars(cls).items() if name[0] != "_" and callable(kind)}
    rows = table(WRITING.split("## Hooks")[1])
    assert {re.match(r"`(\w+)\(", row[1])[1] for row in rows} == hooks
    assert all(len(row[2].split()) > 1 for row in rows)
    declared = {name for cls in classes for name in vars(cls).get("__annotations__", {})} - {"name", "summary", "paper"}
    assert {row[1].strip("`") for row in table(section(WRITING, "Attributes"))} == declared


@pytest.mark.parametrize("received", [FederationInfo, ClientDataView, Source, SampleTable])
def test_the_attributes_of_what_rules_and_plugins_receive_are_described_and_no_others(received):
    """In the docstring, which the reference shows."""
    reference = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"^::: unskew\.[\w.]+\.{received.__name__}$", reference, re.M)
    described = re.findall(r"^    (\w+): ", inspect.getdoc(received).split("Attributes:")[1], re.M)
    assert described == [field.name for field in dataclasses.fields(received)]
    public = [kind for name, kind in vars(received).items() if name[0] != "_" and callable(kind)]
    assert all(kind.__doc__ for kind in public)


def part_of(name, label):
    """The lines of a method's section under one of its labels."""
    return section(PAGE, name).split(f"**{label}**\n", 1)[1].split("\n**", 1)[0]


@pytest.mark.parametrize("entry", describe_all(), ids=lambda entry: entry["name"])
def test_the_section_of_a_method_has_its_shape_and_every_option_is_described(entry):
    name = entry["name"]
    labels = re.findall(r"^\*\*(\w[\w ]*)\*\*$", section(PAGE, name), re.M)
    weights = ["Weights"] if rule_class(name).weights == "uniform" else []
    assert labels[:3] == ["Options", "Cost", "Compatibility"]
    assert labels[3:] in ([], ["Notes"])
    assert [name for name, text in entry["meanings"].items() if not re.match(r"[A-Z`\d].*\.$", text)] == []
    assert re.findall(r"^- `(\w+)` = ", part_of(name, "Options"), re.M) == list(entry["options"])
    lines = {
        label: re.findall(r"^- ([A-Z][\w ]*): ", part_of(name, label), re.M) for label in ("Cost", "Compatibility")
    }
    assert lines == {
        "Cost": ["Traffic", "Computation", "State"],
        "Compatibility": ["Compositions", "Server reads", "Tasks", "Delays", *weights],
    }


@pytest.mark.parametrize("name", METHODS)
def test_two_methods_run_together_or_raise_the_stated_error(name):
    """In both orders; the page and ``unskew methods NAME`` state what ``conflicts`` returns."""
    stated = conflicts(name)
    for other in set(METHODS) - {name}:
        for expression in (f"{name}+{other}", f"{other}+{name}"):
            if other in stated:
                with pytest.raises(MethodConflictError):
                    method(expression)
            else:
                method(expression)


@pytest.mark.slow
def test_the_costs_of_methods_are_those_counted():
    """In the second round, when nothing is missing any more and no body is due; all layers are linear."""
    options = {"model": "mlp", "model_options": {"hidden": [8]}}
    options |= {"rounds": 2, "local_steps": 1, "clients": 4, "partition": "iid", "engine": "inline"}
    for name in set(METHODS) - {*LORA}:  # tests of their own count them, in a model with LoRA factors
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
            "2Cf": 2 * 10 * 8,
            "f": 8,
            "6f": 6 * 8,
            "M": 2,
            "n": 3,
            "nd": 3 * size,
            "MCf": 2 * 10 * 8,
            "2f²": 2 * 8 * 8,
            "w": 10,
            "fw": 8 * 10,
            "none": 0,
        }
        numbers["s"] = 10 * 2 * 64 + 10 * 2 // 4  # two images of each class, a byte for a label
        first, second = result.history
        counted = [second[f"bytes_{way}"] - first[f"bytes_{way}"] for way in ("down", "up")]
        numbers["c"] = counted[1] / 16  # tests/methods/compression/test_rules.py compares it with the formulas
        costs = [cost.strip("`") for cost in traffic.groups()]
        assert counted == [16 * sum(numbers[term] for term in cost.split(" + ")) for cost in costs], name


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_sends_in_addition_to_the_update_is_on_the_page_about_security(name):
    rule = rule_class(name)
    listed = SECURITY.split("some methods reveal more than the update")[1].split("\n### ")[0]
    if getattr(rule, "uploads", False) or issubclass(rule, rules.SyncRule):
        assert f"`{name}`" in listed


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(LORA)))
def test_the_listed_kinds_of_personal_models_are_those_that_clients_get(name):
    chosen = method(QUICK.get(name, name))
    module, head = SmallBatchNorm(), "fc"
    for rule in chosen.client:
        module, head = rule.adapt(module, head)
    fed = blobs([8, 8])
    spec = unskew.ModelSpec(module, fed.shape, fed.classes, head)
    kind = generator().personal_models(rule_class(name))
    assert (kind == "after") == has_fine_tuning(chosen)
    assert (kind != "") == has_personal_models(chosen, spec)
