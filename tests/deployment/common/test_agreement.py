"""A server that sends some sites other settings, models or data schemas, or asks sites more than a run needs.

The measure is the cosine between a site's update and what the server computes of it. Attacks on sums are also run with the
defense switched off, where they succeed.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.site_faults import with_patience
from support.sites import TINY, LoopPlace, crossed, deployed

import unskew
from unskew.config.loader import experiment
from unskew.deployment.common.agreement import PROTOCOL, experiment_digest
from unskew.deployment.common.audit_log import read_events
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.flower.project_files import init_project
from unskew.deployment.secagg.fixed_point import SumPart, dequantize, is_in_range, quantize, step_size
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.masked_engine import MaskedEngine
from unskew.deployment.server.run import run
from unskew.deployment.site import process, trainer
from unskew.deployment.site.check import check_site
from unskew.deployment.site.experiments import SiteExperiments
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.site.state import SiteState
from unskew.deployment.wire.digests import BroadcastDigest, broadcast_digest, parameter_spans
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import encode_requests
from unskew.deployment.wire.tensor_codec import InvalidMessageError, decode_record, encode_record
from unskew.errors import ConfigError, EngineError
from unskew.runs.build_model import initial_spec
from unskew.runs.run import load_federation_for
from unskew.sums.base import SumRequest

CHANCE = 0.1
MASKED = {"secure_aggregation": "required", "rounds": 1, "eval_clients": 0}
NOISE = "dp:noise=4,clip=1,adaptive=false,noise_at=sites,honest=3"


pytestmark = [pytest.mark.fuzz, pytest.mark.usefixtures("short_waits")]


def cosine(one, other):
    return abs(float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0)))


def tables(folder, count):
    """Sites with tables of their own: each has an age and one of two diagnoses."""
    draws = np.random.default_rng(0)

    def write(path, rows, names):
        lines = [f"{x:.3f},{y:.3f},{names[i % len(names)]}" for i, (x, y) in enumerate(draws.normal(size=(rows, 2)))]
        path.write_text("\n".join(["age,dose,diagnosis", *lines]))

    write(folder / "pilot.csv", 60, ["healthy", "flu", "hiv"])
    for k in range(count):
        (folder / "sites" / str(k)).mkdir(parents=True)
        write(folder / "sites" / str(k) / "data.csv", 20 + 7 * k, ["healthy", "flu"] if k else ["healthy", "hiv"])
    own = {"data": {"source": "table:data.csv", "label": "diagnosis"}}
    source = {"data": f"table:{folder / 'pilot.csv'}", "label": "diagnosis", "partition": "iid"}
    return {**source, "max_train_samples": None}, own


def sites_of(folder, count, own_data, **options):
    values, site = tables(folder, count) if own_data else ({}, {})
    values = {**TINY, **values, **MASKED, "clients": count, **options}
    return values, LoopPlace(folder, values, **site)


def isolated(folder, monkeypatch, count, lie, own_data=False, **options):
    """The cosine of the change of the model with the update of the last site, if all others receive ``lie``."""
    if count > 10:
        options = {"max_train_samples": 1000, "partition": "iid", **options}
    values, place = sites_of(folder, count, own_data, **options)
    truth, honest_begin = {}, SecAggClient.begin

    def spy(self, session, update, delta, *others, **named):
        truth[update.client] = delta.double() * update.weight
        return honest_begin(self, session, update, delta, *others, **named)

    monkeypatch.setattr(SecAggClient, "begin", spy)
    for client, site in enumerate(place.sites[:-1]):
        site.answer = lambda frame, honest=site.answer, client=client: honest(lie(frame, client))
    config = experiment(values)
    start = initial_spec(config, load_federation_for(config, ()), None, unskew.method(config.method)).flatten()
    deployment = replace(with_patience(round_timeout=0.05, on_timeout="continue"), own_data=own_data)
    try:
        result = run(config, deployment, folder / "run", [], lambda text: None, place)
    except (ConfigError, EngineError):
        return 0.0
    events, _ = read_events(folder / "run" / "audit.jsonl")
    if not any(f"site-{count - 1} (client {count - 1})" in event.get("sites", ()) for event in events):
        return 0.0  # its update is in no opened sum
    return cosine(result.vector - start, truth[count - 1])


def changed(**fields):
    return lambda frame, client: replace(frame, config={**frame.config, **fields}) if frame.kind == "train" else frame


def dead_model(frame, client):
    """A model whose softmax is saturated, so that the gradients of most samples vanish."""
    if frame.kind != "train":
        return frame
    v = decode_record(frame, "model")["v"]
    v = torch.zeros_like(v)
    v[-1] = 1e4
    return replace(frame, arrays={**frame.arrays, **encode_record("model", {"v": v})})


WEIGHTS = changed(weights=json.dumps([1e-30] * 10))
DEAD = changed(normalization=json.dumps([[0.0], [1e30], 1.0]))
DEAD_COLUMNS = changed(normalization=json.dumps([[0.0, 0.0], [1e30, 1e30], 1.0]))
SIZES = [5, pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("lie", [WEIGHTS, DEAD, dead_model], ids=["weights", "normalization", "model"])
def test_settings_that_only_some_sites_receive_isolate_no_update(lie, count, tmp_path, monkeypatch):
    assert isolated(tmp_path, monkeypatch, count, lie) < CHANCE


@pytest.mark.parametrize("method", ["scaffold", "scaffold+fedals"])
def test_equal_bytes_at_other_parameters_or_of_another_type_are_not_equal_models(method, tmp_path):
    values = {**TINY, **MASKED, "clients": 4, "method": method, "model": "mlp"}
    place = LoopPlace(tmp_path, values)
    run(experiment(values), with_patience(), tmp_path / "run", [], lambda text: None, place)
    frame = next(frame for _, frame in place.link.sent if frame.kind == "train")
    wire_context = place.sites[0].experiments._trainer[1].wire_context
    half = wire_context.spec.size // 2
    v = decode_record(frame, "model")["v"][:half]
    c = next(name for name in frame.arrays if name.startswith("download"))

    def sent(start, dtype="float32"):
        arrays = {**frame.arrays, **encode_record("model", {"v": v}), c: replace(frame.arrays[c], dtype=dtype)}
        config = {**frame.config, "down": f"{start}:{start + half}"}
        return broadcast_digest(replace(frame, config=config, arrays=arrays), wire_context, {}, "").signed

    assert sent(0) == sent(0)
    assert len({sent(0), sent(1), sent(0, "int32")}) == 3


@pytest.mark.parametrize("own_data", [False, True])
def test_without_the_comparison_they_do(own_data, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "broadcast_digest", lambda *_: BroadcastDigest("same", "same", {}))
    monkeypatch.setattr(process, "check_settings", lambda *_: None)
    monkeypatch.setattr(SiteExperiments, "check_schema", lambda *_: None)
    lie = changed(weights=json.dumps([1e-30] * 3)) if own_data else WEIGHTS
    assert isolated(tmp_path, monkeypatch, 5, lie, own_data) > 0.9999


@pytest.mark.parametrize("lie", [DEAD_COLUMNS, changed(weights="[1e-30, 1e-30, 1e-30]")])
def test_sites_with_their_own_data_compare_the_schema_that_they_received(lie, tmp_path, monkeypatch):
    assert isolated(tmp_path, monkeypatch, 5, lie, own_data=True) < CHANCE


@pytest.mark.parametrize(
    ("method", "model", "record"),
    [("fedrep", "mlp", "v"), ("fedals:alpha=2", "mlp", "v"), pytest.param("fedbn", "cnn", "v", marks=pytest.mark.slow)],
)
def test_methods_that_exchange_slices_compare_them_too(method, model, record, tmp_path, monkeypatch):
    def other(frame, client):
        if frame.kind != "train":
            return frame
        tensor = decode_record(frame, "model")[record]
        return replace(frame, arrays={**frame.arrays, **encode_record("model", {record: torch.zeros_like(tensor)})})

    assert isolated(tmp_path, monkeypatch, 5, other, method=method, model=model, rounds=2) < CHANCE


def test_slices_that_were_not_sent_again_are_compared_as_last_received(tmp_path):
    """In a round without the body, a site that received another body earlier is not in the sum of the others."""
    values = {**TINY, **MASKED, "clients": 5, "method": "fedals:alpha=3", "model": "mlp", "rounds": 3}
    place, seen, sizes = LoopPlace(tmp_path, values), {}, []
    first, last = (place.sites[k].answer for k in (0, 4))

    def sees(frame):
        seen[frame.kind] = frame
        return first(frame)

    def lies(frame):
        if frame.kind == "train" and frame.config["round"] == 0:
            v = decode_record(frame, "model")["v"]
            frame = replace(frame, arrays={**frame.arrays, **encode_record("model", {"v": v + 1})})
        elif frame.kind == "train":  # what the other sites receive: the head
            own = {name: frame.config[name] for name in ("client", "weight", "attempt", "session")}
            frame = replace(seen["train"], config={**seen["train"].config, **own})
            sizes.append(len(frame.arrays["model/v"].data))
        return last(frame)

    place.sites[0].answer, place.sites[4].answer = sees, lies
    result = run(experiment(values), with_patience(), tmp_path / "run", [], lambda text: None, place)
    assert max(sizes) < 4 * len(result.vector)
    assert [row["updates"] for row in result.history] == [4, 4, 4]


@pytest.mark.parametrize("method", ["scaffold", pytest.param("feddyn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("off", [True, False])
def test_two_sums_of_one_round_do_not_show_the_state_of_one_site(method, off, tmp_path, monkeypatch):
    """In the second one, only the last site starts without its state of the first round."""
    if off:
        monkeypatch.setattr(SiteState, "check_start", lambda *_: None)
    values, place = sites_of(tmp_path, 5, False, method=method, rounds=2)
    truth, sums, honest_begin, summed = [], [], SecAggClient.begin, MaskedEngine._summed

    def spy(self, session, update, delta, *others, **named):
        truth.extend([delta.double()] if update.client == 4 else [])
        return honest_begin(self, session, update, delta, *others, **named)

    honest_answer = place.sites[4].answer

    def twice(self, broadcasts):
        sums.append(summed(self, broadcasts))
        if broadcasts[0].round == 1:
            place.sites[4].answer = lambda frame: honest_answer(
                replace(frame, config={**frame.config, "accepted": -1}) if frame.kind == "train" else frame
            )
            sums.append(summed(self, broadcasts))
        return sums[-1]

    monkeypatch.setattr(SecAggClient, "begin", spy)
    monkeypatch.setattr(MaskedEngine, "_summed", twice)
    run(experiment(values), with_patience(round_timeout=0.05, on_timeout="continue"), tmp_path / "r", [], print, place)
    assert [4 in opened.clients for opened in sums] == [True, True, off]
    if off:
        assert cosine(sums[1].tensors["delta"] - sums[2].tensors["delta"], truth[0]) > 0.99


def test_slices_are_compared_as_received_until_the_round_that_a_site_continues_from(tmp_path):
    state = SiteState(tmp_path, "a" * 16, 0)
    state.keep_known(None, 0, {"v:0:4": "a"})
    state.keep_known(0, 1, {"v:0:4": "b"})
    assert [state.known(k) for k in (None, 0, 1)] == [{}, {"v:0:4": "a"}, {"v:0:4": "b"}]


def test_slices_that_overlap_others_are_rejected(tmp_path):
    """Their order would determine a site's model, but not its digest."""
    values = {**TINY, **MASKED, "clients": 4, "method": "fedals:alpha=2", "model": "mlp"}
    place = LoopPlace(tmp_path, values)
    run(experiment(values), with_patience(), tmp_path / "run", [], lambda text: None, place)
    frame = next(frame for _, frame in place.link.sent if frame.kind == "train")
    wire_context = place.sites[0].experiments._trainer[1].wire_context
    known = broadcast_digest(frame, wire_context, {}, "").known
    v = decode_record(frame, "model")["v"][1:3]
    part = replace(
        frame, config={**frame.config, "down": "1:3"}, arrays={**frame.arrays, **encode_record("model", {"v": v})}
    )
    with pytest.raises(InvalidMessageError, match="overlap slices of earlier rounds"):
        broadcast_digest(part, wire_context, known, "")


def test_honest_sites_that_missed_a_round_take_part_again(tmp_path):
    values = {**TINY, **MASKED, "clients": 5, "method": "fedals:alpha=2", "model": "mlp", "rounds": 4}
    place = LoopPlace(tmp_path, values)
    place.link.spoil = lambda client, asked, answer: (
        None if client == 4 and asked.kind == "train" and asked.config["round"] == 1 else answer
    )
    patience = with_patience(round_timeout=0.05, on_timeout="continue")
    result = run(experiment(values), patience, tmp_path / "run", [], lambda text: None, place)
    assert [row["updates"] for row in result.history] == [5, 4, 5, 5]


def test_slices_are_cut_at_parameters():
    assert parameter_spans([3, 2, 4], (slice(0, 9),)) == [slice(0, 3), slice(3, 5), slice(5, 9)]
    assert parameter_spans([3, 2, 4], (slice(3, 5), slice(6, 8))) == [slice(3, 5), slice(6, 8)]
    assert parameter_spans([3, 2, 4], ()) == []


def test_a_second_experiment_cannot_be_subtracted_from_the_first(tmp_path):
    """The administrator allows two runs; the second, with other settings of the server, lacks one reply."""
    first = {**TINY, **MASKED, "clients": 5}
    second = {**first, "method": "fedavgm"}
    for client in range(5):
        folder = tmp_path / "sites" / str(client) / "experiments"
        folder.mkdir(parents=True)
        for name, values in (("first", first), ("second", second)):
            (folder / f"{name}.yaml").write_text(experiment(values).to_yaml())
    place = LoopPlace(tmp_path, first, experiments="experiments")
    patience = with_patience(round_timeout=0.05, on_timeout="continue")
    result = run(experiment(first), replace(patience, run="a" * 16), tmp_path / "a", [], lambda text: None, place)
    assert result.history[0]["updates"] == 5
    with pytest.raises(ConfigError, match="The difference of sums of two runs could reveal"):
        run(experiment(second), replace(patience, run="b" * 16), tmp_path / "b", [], lambda text: None, place)
    for site in place.sites:
        site.config = site.config.model_copy(update={"max_runs": 2})
    place.link.spoil = lambda client, asked, answer: None if (client, asked.kind) == (4, "train") else answer
    result = run(experiment(second), replace(patience, run="c" * 16), tmp_path / "c", [], lambda text: None, place)
    assert result.history[0]["updates"] == 0  # the same model, without one site
    place.link.spoil = lambda client, asked, answer: answer
    result = run(experiment(second), replace(patience, run="c" * 16), tmp_path / "d", [], lambda text: None, place)
    assert result.history[0]["updates"] == 5


def test_the_grid_depends_on_the_number_of_sites_only():
    """Neither large entries of one site nor a server make the small ones of another disappear."""
    small, large = torch.full((4,), 1.2345e-5), torch.tensor([1e6, -1e6, 3.0, 0.0])
    parts = [SumPart("delta", torch.float32, (4,))]
    total = quantize([(small, 1.0)], 5) + quantize([(large, 100.0)], 5)
    expected = small.double() + 100.0 * large.double()
    assert torch.allclose(dequantize(total, parts, 5)["delta"], expected, rtol=0, atol=step_size(5))
    assert not is_in_range(torch.tensor([5e9]), 1.0)
    assert not is_in_range(torch.tensor([torch.nan]), 1.0)
    integers = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)  # wrap modulo 2^32
    total = quantize([(integers, 1.0)], 3) + quantize([(torch.tensor([1, -1], dtype=torch.int32), 1.0)], 3)
    sums = dequantize(total, [SumPart("upload/dp/0", torch.int32, (2,))], 3)["upload/dp/0"]
    assert sums.tolist() == [-(2.0**31), 2.0**31 - 1]


def test_replies_of_a_masked_sum_tell_nothing_of_the_magnitude_of_an_update(tmp_path):
    """Ten times the learning rate changes nothing but masked numbers, keys, and signatures."""
    sent = []
    for lr in (0.05, 0.5):
        values = {**TINY, **MASKED, "clients": 4, "lr": lr}
        place = LoopPlace(tmp_path / str(lr), values)
        run(experiment(values), with_patience(), tmp_path / f"run-{lr}", [], lambda text: None, place)
        keep = {"parts", "num_samples", "weight", "round", "client", "opened"}
        frames = [frame for _, frame in place.link.received if frame.kind in ("ready", "masked", "agreed", "opened")]
        sent.append([(f.kind, f.metrics, {k: v for k, v in f.config.items() if k in keep}) for f in frames])
    assert sent[0] == sent[1]
    assert all(not figures for _, figures, _ in sent[0])


def noisy_sites(folder, names_of_last):
    """Three noisy sites with own tables, of which the last has other classes and another number of samples."""
    folder.mkdir()
    values, own = tables(folder, 4)
    values = {**TINY, **values, "secure_aggregation": "required", "rounds": 1, "clients": 4, "method": NOISE}
    lines = ["age,dose,diagnosis", *(f"{i}.5,{i}.25,{names_of_last[i % len(names_of_last)]}" for i in range(30))]
    (folder / "sites" / "3" / "data.csv").write_text("\n".join(lines[: 10 + 9 * len(names_of_last)]))
    init_project(folder / "deployment", experiment(values))
    for k in range(4):
        schema = (folder / "deployment" / "site" / "schema.json").read_text()
        (folder / "sites" / str(k) / "schema.json").write_text(schema)
    return values, LoopPlace(folder, values, **own)


QUESTIONS = [
    {},
    {"settled": False},
    {"class_names": json.dumps(["healthy", "flu"]), "classes": 2},
    {"class_names": json.dumps(["healthy", "hiv"]), "classes": 2},
    {"class_names": json.dumps(["flu", "hiv", "healthy"])},
    {"task": "regression", "settled": False, "class_names": json.dumps(["healthy", "hiv"])},
    {"shape": "[7]"},
    {"normalization": json.dumps([[0.0, 0.0], [1.0, 1.0], 1.0])},
    {"weights": "[1.0, 1.0, 1.0]"},
]


def message_header(config):
    """Header of the messages of a run, without the data schema."""
    about = {"protocol": PROTOCOL, "run": "0123456789abcdef", "attempt": 0}
    return {**about, "digest": experiment_digest(config), "rounds": config.rounds}


def test_sites_with_noise_answer_the_same_whatever_their_data_are(tmp_path):
    """A server asks with unsettled and wrong schemas: nothing but the clock, keys and signatures may differ."""
    answers = []
    for number, names in enumerate((["healthy", "hiv", "flu"], ["flu", "healthy"])):
        values, place = noisy_sites(tmp_path / str(number), names)
        config = experiment(values)
        schema = DataSchema.of(load_federation_for(config, ())).config()
        base = message_header(config)
        for question in QUESTIONS:
            for kind in ("hello", "sums", "evaluate", "contribute"):
                asked = Frame(kind, {**base, **schema, "round": 1, **question}, {}, {})
                answer = place.sites[3].answer(crossed(asked))
                config_of = {k: v for k, v in answer.config.items() if k not in ("clock", "key", "digest")}
                arrays = {name: blob.data for name, blob in answer.arrays.items()}
                answers.append((number, kind, question, answer.kind, config_of, answer.metrics, arrays))
    half = len(answers) // 2
    for one, other in zip(answers[:half], answers[half:], strict=True):
        assert one[1:] == other[1:]
    kinds = [(kind, question, reply) for _, kind, question, reply, *_ in answers[:half]]
    assert [reply for kind, question, reply in kinds if kind == "hello" and not question] == ["client_info"]
    assert {reply for kind, question, reply in kinds if question or kind != "hello"} == {"refused"}


def test_noise_at_sites_with_own_data_needs_the_installed_schema(tmp_path):
    values, place = noisy_sites(tmp_path / "a", ["flu", "healthy"])
    deployment = Deployment(run="0123456789abcdef", startup_timeout=0.5, own_data=True)
    result = run(experiment(values), deployment, tmp_path / "run", [], lambda text: None, place)
    assert result.history[0]["updates"] == 4
    site = tmp_path / "a" / "sites" / "3"
    found = [(f.what, f.ok, f.text) for f in check_site(site / "site.yaml")]
    assert ("data", None, "they fit schema.json; the site rejects messages with another schema") in found
    (site / "schema.json").unlink()
    assert any(ok is False and "schema.json is missing" in text for _, ok, text in check_failures(site))
    values, place = noisy_sites(tmp_path / "b", ["flu", "healthy"])
    for k in range(4):
        (tmp_path / "b" / "sites" / str(k) / "schema.json").unlink()
    with pytest.raises(ConfigError, match="needs the data schema of the experiment"):
        run(experiment(values), deployment, tmp_path / "run-b", [], lambda text: None, place)


def check_failures(site):
    return [(f.what, f.ok, f.text) for f in check_site(site / "site.yaml")]


def test_sums_of_columns_are_not_answered_with_noise_at_the_sites(tmp_path):
    values, own = tables(tmp_path, 4)
    values = {**TINY, **values, "secure_aggregation": "required", "clients": 4, "method": NOISE, "model": "table-mlp"}
    values["categories"] = "auto"
    config = experiment(values)
    place = LoopPlace(tmp_path, values, **own)
    schema = DataSchema.of(load_federation_for(config, ())).open
    base = message_header(config)
    moments = encode_requests([SumRequest("moments", {"columns": ["age"]})], session="1")
    words = "noise at the sites does not protect"
    for asked, known, reason in (
        (Frame("hello"), schema, words),
        (moments, schema, words),
        (moments, replace(schema, settled=True), "needs the data schema"),
    ):
        answer = place.sites[3].answer(Frame(asked.kind, {**asked.config, **base, **known.config()}, {}, asked.arrays))
        assert answer.kind == "refused"
        assert reason in answer.config["reason"]


@pytest.mark.parametrize("masked", ["required", "off"])
def test_a_site_evaluates_one_model_per_round(masked, tmp_path):
    """Else held-out samples could be reconstructed from the losses of many models."""
    values = {**TINY, "secure_aggregation": masked, "clients": 4, "rounds": 2, "eval_clients": 10}
    place, seen = LoopPlace(tmp_path, values), []
    place.link.spoil = lambda client, asked, answer: seen.append((asked, answer)) or answer
    run(experiment(values), with_patience(), tmp_path / "run", [], lambda text: None, place)
    asked, honest = next((a, b) for a, b in seen if a.kind == "evaluate" and a.config["client"] == 3)
    site = place.sites[3]
    assert site.answer(asked).metrics == honest.metrics  # a repeated message gets the same reply

    def probe(round, scale):
        v = decode_record(asked, "model")["v"] * scale
        return site.answer(
            replace(
                asked,
                config={**asked.config, "round": round},
                arrays={**asked.arrays, **encode_record("model", {"v": v})},
            )
        )

    replies = [probe(round, 2 + number / 64) for round in (0, 1, 2, 3, 10**6) for number in range(20)]
    assert {reply.kind for reply in replies} <= {"outdated", "refused"}


def test_evaluations_before_the_first_masked_sum_count_as_a_run(tmp_path):
    """Else a server could have a model evaluated in each of many runs that open no sum."""
    values = {**TINY, "secure_aggregation": "required", "clients": 4, "rounds": 1, "eval_clients": 10}
    place, seen = LoopPlace(tmp_path, values), []
    place.link.spoil = lambda client, asked, answer: seen.append(asked) or answer
    run(experiment(values), with_patience(), tmp_path / "run", [], lambda text: None, place)
    asked = next(frame for frame in seen if frame.kind == "evaluate" and frame.config["client"] == 3)
    shutil.rmtree(tmp_path / "sites" / "3" / "state")  # as a site that has opened no sum
    first, second = (
        place.sites[3].answer(replace(asked, config={**asked.config, "run": name * 16, "round": 0, "accepted": -1}))
        for name in "ab"
    )
    assert first.kind == "scores"
    assert "max_runs: 2" in second.config["reason"]


def test_a_site_trains_no_more_rounds_than_it_has_agreed_to(tmp_path):
    values = {**TINY, "clients": 3, "rounds": 2}
    place, seen = LoopPlace(tmp_path, values), []
    with pytest.raises(ConfigError, match="site-0 has agreed to 2 rounds, but the run has 3"):
        run(experiment({**values, "rounds": 3}), with_patience(), tmp_path / "a", [], lambda text: None, place)

    def asks(client, asked, answer):
        if asked.kind == "train" and asked.config["round"] == 1:
            for closing, reply in ((False, "refused"), (True, "refused")):
                further = {**asked.config, "round": 2, "closing": closing}
                seen.append((place.sites[client].answer(replace(asked, config=further)), reply))
        return answer

    place.link.spoil = asks
    run(experiment(values), with_patience(), tmp_path / "b", [], lambda text: None, place)
    assert [answer.kind for answer, _ in seen] == [reply for _, reply in seen]
    assert "round 3 is beyond the 2 rounds that site-0 has agreed to" in seen[0][0].config["reason"]
    assert "the method has no survey after the last round" in seen[1][0].config["reason"]


def test_a_second_run_of_dpsgd_needs_the_consent_of_the_administrator(tmp_path):
    values = {"clients": 3, "rounds": 1, "method": "dpsgd:noise=1", "eval_clients": 0}
    place = LoopPlace(tmp_path, {**TINY, **values})
    deployed(tmp_path, place, **values)
    with pytest.raises(ConfigError, match="the privacy losses add up"):
        deployed(tmp_path / "again", place, replace(with_patience(), run="f" * 16), **values)


def test_a_round_with_private_noise_has_one_reply(tmp_path):
    """Two replies with noise of their own, or noise of one draw for two models, would reveal more than one."""
    values = {"clients": 3, "rounds": 2, "method": "dpsgd:noise=1", "eval_clients": 0}
    place, seen = LoopPlace(tmp_path, {**TINY, **values}), []

    def asks(client, asked, answer):
        if asked.kind == "train" and client == 0:
            site = place.sites[0]
            site.experiments._trainer = None  # as after a restart
            again = site.answer(replace(asked, config={**asked.config, "attempt": 99}))
            assert {n: b.data for n, b in again.arrays.items()} == {n: b.data for n, b in answer.arrays.items()}
            v = decode_record(asked, "model")["v"]
            other = site.answer(replace(asked, arrays={**asked.arrays, **encode_record("model", {"v": v * 2})}))
            seen.append((other.kind, "from another message" in other.config["reason"]))
        return answer

    place.link.spoil = asks
    deployed(tmp_path, place, **values)
    assert seen == [("outdated", True)] * 2


def test_data_received_before_the_first_round_do_not_change_later(tmp_path):
    values = {"clients": 3, "rounds": 2, "method": "vhl", "model": "mlp", "eval_clients": 0}
    place, seen = LoopPlace(tmp_path, {**TINY, **values}), []

    def asks(client, asked, answer):
        if asked.kind == "receive":
            seen.append((client, asked))
        if asked.kind == "train" and asked.config["round"] == 1 and client == 0:
            message = seen[0][1]
            changed = {name: replace(blob, data=bytes(len(blob.data))) for name, blob in message.arrays.items()}
            for arrays, kind in ((message.arrays, "client_info"), (changed, "refused")):
                reply = place.sites[0].answer(replace(message, arrays=arrays))
                assert reply.kind == kind
                assert kind == "client_info" or "do not change during a run" in reply.config["reason"]
        return answer

    place.link.spoil = asks
    result, _ = deployed(tmp_path, place, **values)
    assert [row["updates"] for row in result.history] == [3, 3]
