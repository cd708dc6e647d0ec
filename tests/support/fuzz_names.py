"""Spellings for the fuzzer, made from the catalogues: right ones, nearly right ones, and hostile ones."""

import functools

from hypothesis import strategies as st

from support.fuzzing import NUMBERS, TEXTS, near, nested, numbers, plain, texts
from unskew.config.experiment import DIAGNOSES, Experiment
from unskew.config.sections import NetworkConfig
from unskew.data.csv_format import CsvConfig
from unskew.data.partition.parsing import OPTIONS, PARTITIONS
from unskew.data.spec import TextSpec
from unskew.methods.registry import METHODS, rule_class
from unskew.models.registry import MODELS
from unskew.option_parsing import option_defaults
from unskew.simulation.delays import KINDS

FIELDS = [
    *Experiment.model_fields,
    *(f"network.{name}" for name in NetworkConfig.model_fields),
    *(f"text.{name}" for name in TextSpec.model_fields),
    *(f"csv.{name}" for name in CsvConfig.model_fields),
    *("model_options.hidden", "model_options.width", "model_options.x", "model_options.hidden.x", "lr.x"),
]
small = st.sampled_from([str(n) for n in NUMBERS[:8]] + ["0.5", "1.5", "1e6", "1e-9", "nan", "inf", "-inf", "true"])
scalars = small | small | st.sampled_from(TEXTS) | texts


def joined(pieces, by, **sizes):
    return st.lists(pieces, **sizes).map(by.join)


@st.composite
def methods(draw):
    """A sum of methods with options."""

    def one():
        name = draw(near(*METHODS))
        try:
            known = list(option_defaults(rule_class(name)))
        except Exception:
            known = []
        if not draw(st.booleans()):
            return name
        pairs = st.tuples(near(*known) if known else texts, scalars).map(lambda pair: f"{pair[0]}={pair[1]}")
        return (
            name + draw(st.sampled_from([":", ":", ":", "", ": ", "::"])) + draw(joined(pairs | texts, ",", max_size=3))
        )

    return draw(st.sampled_from(["+", "+", " + ", "++", ","])).join([one() for _ in range(draw(st.integers(1, 3)))])


@st.composite
def partitions(draw):
    name = draw(near(*PARTITIONS))
    keys = near(*OPTIONS.get(name, ()), "min", "by", "each")
    pairs = st.tuples(keys, scalars | near("half", "kind", "label")).map(lambda pair: f"{pair[0]}={pair[1]}")
    text = name + draw(st.sampled_from([":", ":", ":", ""])) + draw(scalars | near("label", "kind", "x0"))
    return ",".join([text, *draw(st.lists(pairs | texts, max_size=2))])


def delays():
    return st.tuples(near(*KINDS), joined(scalars | near("trace.csv", "tiny.csv"), ",", max_size=2)).map(":".join)


def models():
    own = [
        "torch.nn:Linear",
        "torch.nn:Flatten",
        "torch:zeros",
        "hf:here",
        "hf:",
        "no.module:f",
        "os:system",
        ":",
        "a:",
    ]
    return near(*(name for name, entry in MODELS.items() if not entry.pretrained), *own)


DATA = [
    "table:tiny.csv",
    "table:tiny.jsonl",
    "table:bad.csv",
    "tiny.csv",
    "table:.",
    "folder:.",
    "leaf:.",
    "text:tiny.csv",
]
DATA += ["digits", "table:", "arrays", "table:nowhere.csv", "dsprites:0", "dsprites:x", "text:.", "folder:tiny.csv"]


@functools.cache
def of_field(name):
    """Texts that a field may hold, and some that it may not."""
    named = {
        "method": methods(),
        "partition": partitions(),
        "model": models(),
        "delay": delays(),
        "network": delays(),
        "data": near(*DATA),
        "diagnose": near(*DIAGNOSES),
        # Neither local nor auto: a cluster would be started, or one that is there be used.
        "address": near("nowhere", "nowhere:1", ":1", "127.0.0.1:1", "127.0.0.1:99999", "ray://127.0.0.1:1"),
        "engine": near("auto", "inline", "vectorized"),
        "device": near("auto", "cpu", "cpu:0", "cuda", "cuda:99", "mps"),
        "server": near("1", "5", *DATA),
        **dict.fromkeys(
            ("label", "features", "exclude", "image", "columns"), near("label", "kind", "x0", "x0,x1", "name")
        ),
        "optimizer": near("sgd", "adam", "adamw"),
        "client_weighting": near("auto", "samples", "uniform"),
        "buffers": near("average", "local", "reset"),
        "precision": near("fp32", "fp64", "bf16"),
        "tokenizer": near("bytes", "."),
        **dict.fromkeys(
            ("data_path", "server_data_path", "start_from", "synthetic"), near(".", "run", "tiny.csv", "nowhere")
        ),
        "hidden": near("[3]", "[0]", "[1000000000000]", "[1000000000000, 1000000000000]", "[]", "[true]", "wide"),
        "head": near("linear", "head", "0"),
    }
    last = name.rpartition(".")[2]
    return named[last] | scalars if last in named else scalars


def fields_with_values():
    """A field, and a value of a kind that it may have or not."""
    names = st.sampled_from(FIELDS)
    return names.flatmap(lambda name: st.tuples(st.just(name), of_field(name) | numbers | plain | nested))
