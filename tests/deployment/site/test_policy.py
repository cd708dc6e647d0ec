"""Every rule of a site for statistics, with the attack that it stops. The attack succeeds when only this rule is off."""

import contextlib
import functools
import itertools
import json
import random
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sites import TINY, LoopPlace

from unskew.config.loader import experiment
from unskew.data.readers.encoders import Encoder
from unskew.deployment.common.agreement import PROTOCOL, experiment_digest
from unskew.deployment.common.audit_log import read_events
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.site import policy as policy_module
from unskew.deployment.site import process as process_module
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.data import load_site_data, schema_from_own_data
from unskew.deployment.site.policy import StatisticsPolicy, small_cells
from unskew.deployment.site.statistics_ledger import StatisticsLedger
from unskew.deployment.site.sums import check_precision
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.sums import encode_requests
from unskew.deployment.wire.tensor_codec import decode_record
from unskew.errors import ConfigError, DataError
from unskew.privacy.discrete_laplace import discrete_laplace
from unskew.sums.base import ClientRows, SumKind, SumRequest
from unskew.sums.columns import Classes, ColumnArguments, Histogram
from unskew.sums.registry import SUMS

pytestmark = pytest.mark.fuzz

ALL = ("counts", "missing", "histograms", "moments")
CLASSES = SumRequest("class_counts", {"classes": 3})
MOMENTS = SumRequest("column_moments", {"columns": ["age"]})
RUN, OTHER_RUN = "a" * 16, "b" * 16


class Patients:
    """Rows of a site with an age, which may be missing, and one of three classes."""

    def __init__(self, ages, classes, wards=None):
        ages, y = np.array(ages, np.float64), torch.tensor(classes)
        self.rows = ClientRows(
            columns=("age",),
            numbers=ages[:, None],
            missing={"age": int(np.isnan(ages).sum())},
            class_counts=lambda: torch.bincount(y, minlength=3),
            x=torch.from_numpy(ages).float()[:, None],
            y=y,
        )
        self.values = {"age": ages.tolist(), "label": list(classes)}
        if wards is not None:
            self.values["ward"] = wards


def hundred(extra=()):
    """A hundred patients of ages 20 to 69 in classes of 30, 30 and 40, and further ones of class 2."""
    return Patients([*(20 + k % 50 for k in range(100)), *extra], [*[0] * 30, *[1] * 30, *[2] * (40 + len(extra))])


def site(folder, allow=ALL, log=None, **rules):
    config = SiteConfig.model_validate({"name": "clinic", "client": 0, "statistics": {"allow": allow, **rules}})
    return StatisticsPolicy(config, folder, (log if log is not None else []).append)


def ask(policy, request, patients, run=RUN, experiment="c" * 64, masked=False):
    """The tensors of a reply to one request."""
    return policy.reply(experiment, run, [request], patients.rows, patients.values, masked).sums[0]


def histogram(low, high):
    return SumRequest("histogram", {"column": "age", "range": [low, high]})


@pytest.fixture
def seeded(monkeypatch):
    """Noise from a fixed seed, so that no test depends on luck."""
    monkeypatch.setattr(
        policy_module, "discrete_laplace", functools.partial(discrete_laplace, below=random.Random(7).randrange)
    )


# ---- permissions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "permission"),
    [
        (CLASSES, "counts"),
        (MOMENTS, "moments"),
        (SumRequest("column_squares", {"columns": ["age"]}, {"mean": torch.zeros(1).double()}), "moments"),
        (SumRequest("missing", {"columns": ["age"]}), "missing"),
        (histogram(0, 64), "histograms"),
    ],
)
def test_each_statistic_needs_its_permission(request_, permission, tmp_path):
    others = [name for name in ALL if name != permission]
    with pytest.raises(ConfigError, match=f"site clinic .*{request_.kind}.*allow: .*{permission}.* of site.yaml"):
        ask(site(tmp_path, others), request_, hundred())
    assert not (tmp_path / "state").exists()
    assert ask(site(tmp_path, [permission]), request_, hundred())


def test_what_the_experiment_needs_passes_unchanged_and_leaves_no_record(tmp_path):
    patients = Patients([30.0, np.nan], [0, 2])
    reply = site(tmp_path, []).reply(
        "c" * 64, RUN, [SumRequest("moments", {"columns": ["age"]})], patients.rows, patients.values
    )
    assert reply.sums[0]["counts"].tolist() == [1]
    assert reply.sums[0]["sums"].tolist() == [30]
    assert (reply.hidden, reply.epsilon) == ([{}], 0)
    assert not (tmp_path / "state").exists()


def test_kinds_with_a_permission_are_off_by_default(tmp_path):
    config = SiteConfig.model_validate({"name": "clinic", "client": 0})
    for kind in SUMS.values():
        if kind.permission:
            with pytest.raises(ConfigError, match=f"permission {kind.permission}"):
                ask(StatisticsPolicy(config, tmp_path, print), SumRequest(kind.name, {}), hundred())


# ---- 1. no filters ------------------------------------------------------------------------------------------------------


def select_one_row(policy, patients):
    """The age of one patient, from a request that names a row."""
    return float(ask(policy, SumRequest("filtered", {"columns": ["age"], "rows": [17]}), patients)["sums"])


class FilteredArguments(ColumnArguments):
    rows: tuple[int, ...] = ()


class Filtered(SumKind):
    """A kind whose author did not declare that it selects rows."""

    name, permission = "filtered", "moments"

    arguments = ColumnArguments

    def compute(self, rows, request):
        chosen = request.args.get("rows") or range(len(rows.numbers))
        return {"sums": torch.from_numpy(rows.numbers[list(chosen)].sum(0))}

    def shapes(self, request):
        return {"sums": (torch.float64, (1,))}


def test_a_request_cannot_select_rows(monkeypatch, tmp_path):
    monkeypatch.setitem(SUMS, "filtered", Filtered())
    with pytest.raises(ConfigError, match="rows"):
        select_one_row(site(tmp_path), hundred())
    monkeypatch.setattr(Filtered, "arguments", FilteredArguments)
    assert select_one_row(site(tmp_path), hundred()) == 37


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (SumRequest("class_counts", {"classes": 3, "seed": 1}), "seed"),
        (SumRequest("class_counts", {"classes": "3"}), "classes"),
        (SumRequest("class_counts", {"classes": True}), "classes"),
        (SumRequest("histogram", {"column": "age", "range": ["0", "64"]}), "range"),
        (SumRequest("histogram", {"column": "age", "range": [64, 0]}), "range"),
        (SumRequest("class_counts", {"classes": 3}, {"salt": torch.zeros(1)}), "constant 'salt'"),
        (SumRequest("gradient_of_mine", {}), "no statistic 'gradient_of_mine'"),
    ],
)
def test_requests_with_other_arguments_are_rejected(request_, why, tmp_path):
    """Each of them would otherwise be a further request for the same statistic."""
    with pytest.raises(ConfigError, match=why):
        ask(site(tmp_path, epsilon=1, allow=["counts", "histograms"]), request_, hundred())


def test_a_number_of_classes_that_the_data_do_not_have_is_rejected(tmp_path):
    with pytest.raises(DataError, match="another dtype or shape"):
        ask(site(tmp_path), SumRequest("class_counts", {"classes": 4}), hundred())
    assert StatisticsLedger(tmp_path / "state").read().replies == ()


# ---- 2. one grid per column ---------------------------------------------------------------------------------------------

SHIFTED = Patients([*[30.2] * 11, 30.8, *[31.2] * 20], [0] * 32)
"""All cells of width 1 have at least 11 rows, whether they begin at whole or half ages."""


def count_between_half_ages(policy, experiment):
    """The number of patients from 30.5 to 31, as the difference of counts up to 31 and up to 30.5."""
    whole = ask(policy, histogram(0, 64), SHIFTED)["counts"]
    half = ask(policy, histogram(0.5, 64.5), SHIFTED, experiment=experiment)["counts"]
    return int(whole[: 1 + 31].sum() - half[: 1 + 30].sum())  # the first cell counts what is below the range


@pytest.mark.parametrize("experiment", ["c" * 64, "d" * 64])
@pytest.mark.parametrize("masked", [False, True])
def test_overlapping_grids_are_rejected_also_in_two_experiments(experiment, masked, monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "ask", functools.partial(ask, masked=masked))
    with pytest.raises(ConfigError, match=r"already counted age on the grid \[0.0, 64.0, 64.0\]"):
        count_between_half_ages(site(tmp_path / "on"), experiment)
    monkeypatch.setattr(Histogram, "grids", SumKind.grids)
    assert count_between_half_ages(site(tmp_path / "off"), experiment) == 1


def test_two_grids_in_one_message_are_rejected_and_nothing_is_stored(tmp_path):
    policy = site(tmp_path, epsilon=1, allow=["histograms"])
    with pytest.raises(ConfigError, match="already counted age"):
        policy.reply("c" * 64, RUN, [histogram(0, 64), histogram(0, 65)], SHIFTED.rows, SHIFTED.values)
    assert policy.ledger.read().spent == 0
    assert ask(policy, histogram(0, 65), SHIFTED)


def age_of_the_rare_ward(policy):
    """Sum of the ages in ward 3, from two data schemas that merge it with one of the other wards each."""
    wards, rows = [*[1, 2] * 50, 3], []
    for merged in (1, 2):
        patients = hundred([83])
        codes = torch.tensor([[0 if ward == 3 else int(ward != merged) for ward in wards]]).T
        object.__setattr__(patients.rows, "x", torch.cat([patients.rows.x, codes], 1))
        center = {"center": torch.tensor([0.0, merged]).double()}  # makes the requests different
        request = SumRequest("label_products", {"codes": [0, 2], "targets": 3}, center)
        reply = policy.reply("c" * 64, RUN, [request], patients.rows, patients.values, schema=f"{merged:064x}")
        rows.append(reply.sums[0]["products"])
    both, other = (products[1, 3] for products in rows)  # ages of ward 2, and of ward 1
    return float(rows[0][0, 1] - both - other)


def test_two_data_schemas_are_rejected_because_their_difference_shows_smaller_groups(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"another data schema prepared .* unskew deploy forget site\.yaml"):
        age_of_the_rare_ward(site(tmp_path / "on", ["features"]))
    monkeypatch.setattr(policy_module, "PREPARED", ())
    assert age_of_the_rare_ward(site(tmp_path / "off", ["features"])) == 83


def test_a_site_that_forgets_accepts_another_data_schema(tmp_path):
    policy, patients, request = site(tmp_path, ["gradients"]), hundred(), SumRequest("gradient", {"parameters": 1})
    object.__setattr__(patients.rows, "gradient", lambda: (torch.ones(1), 1.0))

    def reply(schema):
        return policy.reply("c" * 64, RUN, [request], patients.rows, patients.values, schema=schema * 64)

    reply("1")
    with pytest.raises(ConfigError, match="another data schema"):
        reply("2")
    policy.ledger.forget()
    reply("2")


def classes_above(age, folder):
    """Classes of the patients above an age: its difference to a mean of 2^31 is rounded to multiples of 256."""
    text = "age,bmi,y\n" + "".join(f"{97 if k == 8 else 20 + k % 50},{20 + k % 9},{'ny'[k % 2]}\n" for k in range(60))
    (folder / "rows.csv").write_text(text)
    path = str(folder / "rows.csv")
    config = {**TINY, "data": f"table:{path}", "label": "y", "missing": "mean", "max_train_samples": None}
    place = LoopPlace(
        folder, config, count=1, data={"source": f"table:{path}", "label": "y"}, statistics={"allow": ["features"]}
    )
    process, agreed = place.sites[0], experiment(config)
    digest = experiment_digest(agreed)
    schema = schema_from_own_data(load_site_data(process.config, agreed, folder), agreed)
    means = {"age": age - 2.0**31 - 128, "bmi": 0.0}
    columns = tuple(replace(one, mean=means[one.name], std=1.0 if one.name == "age" else 1e9) for one in schema.columns)
    center = torch.tensor([2.0**31, 0]).double()
    asked = encode_requests([SumRequest("label_products", {"codes": [0, 0], "targets": 2}, {"center": center})])
    header = {
        "digest": digest,
        "rounds": agreed.rounds,
        **replace(schema, columns=columns).config(),
        "protocol": PROTOCOL,
        "run": RUN,
        "attempt": 0,
    }
    reply = process.answer(Frame(asked.kind, {**header, **asked.config}, {}, asked.arrays))
    if reply.kind == "refused":
        raise ConfigError(reply.config["reason"])
    return (decode_record(reply, "sum.0")["products"][1, 3:] / 256).tolist()


def test_a_mean_that_rounds_the_values_cannot_be_a_threshold(monkeypatch, tmp_path):
    """The oldest of the patients is the only one above 96."""
    monkeypatch.setattr(type(SUMS["label_products"]), "group_sizes", SumKind.group_sizes)  # which finds two values
    (tmp_path / "on").mkdir()
    with pytest.raises(ConfigError, match=r"no sums of inputs with the mean -2\.14748e\+09 of age"):
        classes_above(96, tmp_path / "on")
    (tmp_path / "off").mkdir()
    monkeypatch.setattr(process_module, "check_precision", lambda *args: None)
    assert classes_above(96, tmp_path / "off") == [1, 0]


@pytest.mark.parametrize(("mean", "sent"), [(1000, True), (-99_999, True), (100_001, False), (-1e6, False)])
def test_which_means_a_site_accepts(mean, sent):
    """Values up to 120 have the order of magnitude 100."""
    schema = DataSchema((1,), 2, ("n", "y"), "classification", torch.float32, None, (Encoder("age", mean=mean),))
    rows = Patients([-120.0, np.nan, 3.0], [0, 1, 2]).rows
    with contextlib.nullcontext() if sent else pytest.raises(ConfigError, match="Check the units"):
        check_precision(schema, rows, "clinic")


# ---- 3. repeats ---------------------------------------------------------------------------------------------------------


def average_of_repeats(folder, requests, **rules):
    """The mean of a noisy count over requests from other runs and experiments, to a site that restarts in between."""
    replies = []
    for number, request in enumerate(requests):
        policy = site(folder, allow=["counts", "histograms"], epsilon=1, min_count=1, **rules)
        reply = ask(policy, request, hundred(), run=f"{number:016x}", experiment=f"{number:064x}")
        replies.append(reply["counts"])
    return torch.stack(replies).double().mean(0), len({tuple(reply.tolist()) for reply in replies})


def test_repeats_get_the_stored_noise_so_that_it_cannot_be_averaged(seeded, monkeypatch, tmp_path):
    mean, distinct = average_of_repeats(tmp_path / "on", [CLASSES] * 64)
    assert distinct == 1
    assert mean.round().tolist() != [30, 30, 40]
    assert StatisticsLedger(tmp_path / "on" / "state").read().spent == 1
    monkeypatch.setattr(StatisticsPolicy, "_same_data", lambda self, records, hashes: set())
    mean, distinct = average_of_repeats(tmp_path / "off", [CLASSES] * 64)
    assert distinct > 20
    assert mean.round().tolist() == [30, 30, 40]


SAME = [
    '{"column": "age", "range": [0, 64]}',
    '{"range": [0, 64], "column": "age"}',
    '{"column": "age", "range": [0.0, 64.0]}',
    '{"column": "age", "range": [-0.0, 6.4e1]}',
]
"""The same arguments, as JSON that a server may write."""


def test_the_same_request_in_other_words_gets_the_same_noise(seeded, monkeypatch, tmp_path):
    requests = [SumRequest("histogram", json.loads(text)) for text in SAME]
    assert len({request.digest for request in requests}) == 3
    assert average_of_repeats(tmp_path / "on", requests)[1] == 1
    monkeypatch.setattr(StatisticsPolicy, "_checked", lambda self, request: request)
    assert average_of_repeats(tmp_path / "off", requests)[1] == 3


def counted_as(policy, names):
    """The counts of a hundred patients for a list of classes, by class."""
    patients, own = hundred(), ("flu", "cold", "none")
    order = [own.index(name) if name in own else 3 for name in names]
    rows = replace(patients.rows, labels=("diagnosis",), class_names=tuple(names))
    counts = torch.tensor([30, 30, 40, 0])[order]
    patients.rows = replace(rows, class_counts=lambda: counts)
    request = SumRequest("class_counts", {"classes": len(names)})
    return dict(zip(names, ask(policy, request, patients)["counts"].tolist(), strict=True))


@pytest.mark.parametrize("names", [["flu", "cold", "none", "invented"], ["none", "cold", "flu"]])
def test_other_classes_get_neither_new_noise_nor_the_counts_of_others(names, seeded, monkeypatch, tmp_path):
    policy = site(tmp_path / "on", allow=["counts"], epsilon=1, min_count=1)
    noisy = counted_as(policy, ["flu", "cold", "none"])
    with pytest.raises(ConfigError, match="other classes of diagnosis"):
        counted_as(policy, names)
    assert counted_as(policy, ["flu", "cold", "none"]) == noisy
    monkeypatch.setattr(policy_module, "only_values", lambda *_: {})
    policy = site(tmp_path / "off", allow=["counts"], epsilon=1, min_count=1)
    noisy, other = counted_as(policy, ["flu", "cold", "none"]), counted_as(policy, names)
    assert other["flu"] == noisy["none"] if names[0] == "none" else other["flu"] != noisy["flu"]


def test_the_stored_gradient_is_that_of_its_experiment(tmp_path):
    patients, policy, request = hundred(), site(tmp_path, ["gradients"]), SumRequest("gradient", {"parameters": 1})
    for seed in (1, 2, 1):
        gradient = torch.tensor([float(seed)]).double()
        patients.rows = replace(patients.rows, gradient=lambda gradient=gradient: (gradient, 1.0))
        assert float(ask(policy, request, patients, experiment=f"{seed:064x}")["gradient"]) == seed


def scalars(policy, shares):
    """The distance of a site's labels from chosen frequencies, as a summand of a masked sum."""
    request = SumRequest("site_scalars", {"classes": 3}, {"shares": torch.tensor(shares).double()})
    return float(ask(policy, request, hundred(), masked=True)["labels"][1])


def test_masked_distances_from_several_frequencies_cannot_reveal_a_sites_counts(monkeypatch, tmp_path):
    """The distance has a kink at the frequency of a class, here 0.3; a sum over sites has one for each site."""

    def kink(policy):
        below, at, above = (scalars(policy, [share, 0.0, 0.0]) for share in (0.29, 0.3, 0.31))
        return below - 2 * at + above

    with pytest.raises(ConfigError, match="other shares for site_scalars"):
        kink(site(tmp_path / "on"))
    with pytest.raises(DataError, match="do not add up to 1"):
        scalars(site(tmp_path / "more"), [0.9, 0.9, 0.0])
    monkeypatch.setattr(policy_module, "only_values", lambda *_: {})
    assert kink(site(tmp_path / "off")) == pytest.approx(0.01)


def test_a_request_that_occurs_twice_in_a_message_has_one_noise(tmp_path):
    patients, policy = hundred(), site(tmp_path, allow=["counts"], epsilon=0.1)
    reply = policy.reply("c" * 64, RUN, [CLASSES, CLASSES], patients.rows, patients.values)
    assert torch.equal(reply.sums[0]["counts"], reply.sums[1]["counts"])
    assert reply.epsilon == 0.1


def test_with_other_training_rows_of_the_same_data_the_reply_is_the_stored_one(monkeypatch, tmp_path):
    """Two experiments may divide the same data differently; the difference of two splits would select rows."""
    patients, split = hundred(), hundred()
    object.__setattr__(split.rows, "numbers", split.rows.numbers[1:])

    def age_of_the_row_that_is_in_one_split(policy):
        first, second = (ask(policy, MOMENTS, some)["sums"] for some in (patients, split))
        return float(first - second)

    assert age_of_the_row_that_is_in_one_split(site(tmp_path / "on")) == 0
    monkeypatch.setattr(StatisticsPolicy, "_same_data", lambda self, records, hashes: set())
    assert age_of_the_row_that_is_in_one_split(site(tmp_path / "off")) == 20


# ---- 4. changed data ----------------------------------------------------------------------------------------------------


def age_of_new_patient(policy, before, after, **second):
    """The age of a patient that was added between two requests."""
    sums = [ask(policy, MOMENTS, before)["sums"], ask(policy, MOMENTS, after, **second)["sums"]]
    return float(sums[1] - sums[0])


ONE_CHANGE = [
    (hundred(), hundred([83]), 83),
    (hundred([83]), hundred(), -83),
    (hundred([51]), hundred([83]), 32),
    (hundred(), hundred([83, np.nan]), 83),
]
"""One patient, or two, added, removed or changed, and the difference of the sums."""


@pytest.mark.parametrize(("before", "after", "age"), ONE_CHANGE)
@pytest.mark.parametrize("second", [{}, {"run": OTHER_RUN}, {"experiment": "d" * 64}, {"masked": True}])
def test_after_a_change_of_few_rows_the_site_does_not_reply(before, after, age, second, tmp_path):
    log = []
    with pytest.raises(ConfigError, match="differ in fewer than 10 rows from those of an earlier reply"):
        age_of_new_patient(site(tmp_path / "on", log=log), before, after, **second)
    assert "Rows changed since an earlier reply: " in log[0]
    assert age_of_new_patient(site(tmp_path / "off", min_count=1), before, after, **second) == age


def test_one_new_training_row_cannot_hide_among_new_held_out_rows(monkeypatch, tmp_path):
    after = hundred([83])
    after.values = {
        "age": [*after.values["age"], *(50.5 + k for k in range(9))],
        "label": [*after.values["label"], *[2] * 9],
    }
    with pytest.raises(ConfigError, match="differ in fewer than 10 rows"):
        age_of_new_patient(site(tmp_path / "on"), hundred(), after)
    only_all_rows(monkeypatch)
    assert age_of_new_patient(site(tmp_path / "off"), hundred(), after) == 83


def test_two_experiments_whose_training_rows_differ_by_one_are_found(monkeypatch, tmp_path):
    """The rows are the same, but in one of the experiments the last one is held out. Requests with different constants."""
    longer, shorter = hundred([83]), hundred()
    shorter.values = longer.values

    def age_of_the_row(policy):
        squares = []
        for patients, first in ((longer, 0), (shorter, 2)):
            for mean in (first, first + 1):
                constant = {"mean": torch.tensor([mean]).double()}
                request = SumRequest("column_squares", {"columns": ["age"]}, constant)
                squares.append(float(ask(policy, request, patients)["squares"]))
        return (squares[0] - squares[1] + 101) / 2 - (squares[2] - squares[3] + 100 * (9 - 4)) / 2

    with pytest.raises(ConfigError, match="differ in fewer than 10 rows"):
        age_of_the_row(site(tmp_path / "on"))
    only_all_rows(monkeypatch)
    assert age_of_the_row(site(tmp_path / "off")) == 83


def only_all_rows(monkeypatch):
    """Compare training rows and held-out rows only together."""
    parts = policy_module.parts_of_rows
    monkeypatch.setattr(policy_module, "parts_of_rows", lambda stored: (parts(stored)[0], parts(stored)[0]))


def test_the_server_does_not_learn_how_many_rows_changed(tmp_path):
    texts = set()
    for number, extra in enumerate(([83], [83, 84, 85])):
        with pytest.raises(ConfigError) as error:
            age_of_new_patient(site(tmp_path / str(number)), hundred(), hundred(extra))
        texts.add(str(error.value))
    assert len(texts) == 1


def test_a_change_is_found_between_experiments_with_other_columns(monkeypatch, tmp_path):
    """Here the second experiment also has the wards, of which all have changed."""
    before, after = hundred(), hundred([83])
    before.values["ward"], after.values["ward"] = ["a"] * 100, ["b"] * 101
    for some in (before, Patients([*before.values["age"]], before.values["label"])):
        folder = tmp_path / str(len(some.values))
        with pytest.raises(ConfigError, match="fewer than 10 rows"):
            age_of_new_patient(site(folder), some, after)
    count_changes = policy_module.count_changes
    monkeypatch.setattr(
        policy_module, "count_changes", lambda *two: {"all columns": count_changes(*two)["all columns"]}
    )
    assert age_of_new_patient(site(tmp_path / "whole rows"), before, after) == 83


def test_data_are_compared_with_those_of_all_earlier_replies(monkeypatch, tmp_path):
    def by_way_of_twelve_others(policy):
        age_of_new_patient(policy, hundred(), hundred(range(12)))
        return age_of_new_patient(policy, hundred(), hundred([83]))

    with pytest.raises(ConfigError, match="fewer than 10 rows"):
        by_way_of_twelve_others(site(tmp_path / "on"))
    read = StatisticsLedger.read
    newest = lambda self: (found := read(self)).model_copy(update={"data": found.data[-1:]})  # noqa: E731
    monkeypatch.setattr(StatisticsLedger, "read", newest)
    policy = site(tmp_path / "off")
    age_of_new_patient(policy, hundred(), hundred(range(12)))
    assert float(ask(policy, MOMENTS, hundred([83]))["sums"]) - hundred().rows.numbers.sum() == 83


def test_after_a_change_of_enough_rows_the_site_replies(tmp_path):
    policy = site(tmp_path)
    assert ask(policy, CLASSES, hundred())["counts"].tolist() == [30, 30, 40]
    assert ask(policy, CLASSES, hundred(range(10)))["counts"].tolist() == [30, 30, 50]


def test_the_order_of_rows_does_not_matter(tmp_path):
    policy, patients = site(tmp_path, allow=["counts"], epsilon=0.1), hundred()
    backward = Patients(patients.values["age"][::-1], patients.values["label"][::-1])
    assert torch.equal(ask(policy, CLASSES, patients)["counts"], ask(policy, CLASSES, backward)["counts"])


# ---- 5. small cells -----------------------------------------------------------------------------------------------------


def rare_class_from_the_total(policy, sizes):
    """The size of the class that is not sent, if it is the only one: the number of patients is known."""
    patients = Patients(range(20, 20 + sum(sizes)), [c for c, size in enumerate(sizes) for _ in range(size)])
    reply = policy.reply("c" * 64, RUN, [CLASSES], patients.rows, patients.values)
    hidden = reply.hidden[0].get("counts", [])
    rest = sum(sizes) - int(reply.sums[0]["counts"].sum())
    return rest if len(hidden) == 1 else None


def test_small_counts_are_not_sent(tmp_path):
    patients = Patients(range(60), [0] * 3 + [1] * 9 + [2] * 48)
    sent = ask(site(tmp_path / "on"), CLASSES, patients)["counts"]
    assert sent.tolist() == [0, 0, 48]
    assert ask(site(tmp_path / "off", min_count=1), CLASSES, patients)["counts"].tolist() == [3, 9, 48]


def test_a_single_hidden_count_takes_the_next_smallest_with_it(monkeypatch, tmp_path):
    assert rare_class_from_the_total(site(tmp_path / "on"), (3, 40, 57)) is None
    exact = small_cells
    monkeypatch.setattr(policy_module, "small_cells", lambda counts, least, total: exact(counts, least, None))
    assert rare_class_from_the_total(site(tmp_path / "off"), (3, 40, 57)) == 3


@pytest.mark.parametrize(
    ("counts", "total", "hidden"),
    [
        ([3, 40, 57], 100, [0, 1]),
        ([3, 0, 57], 60, [0, 2]),
        ([1, 1, 40, 57], 99, [0, 1, 2]),  # a sum of two would leave only 1 and 1
        ([8, 9, 40], 57, [0, 1]),
        ([9, 9, 40], 58, [0, 1, 2]),  # two counts below 10 with the sum 18 are 9 and 9
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 40], 50, [*range(11)]),  # ten counts with the sum 10 are 1
        ([3, 40, 40, 57], 140, [0, 1, 2]),  # without the other 40, this one would be known to be the smallest
        ([40, 57], 97, []),
        ([40, 57, 60], 160, [0, 1]),  # 3 rows have no value, which is a small count, too
        ([4, 0, 0], 4, [0, 1, 2]),
        ([3, 40, 57], None, [0]),
        ([], 0, []),
    ],
)
def test_which_counts_are_hidden(counts, total, hidden):
    small = small_cells(torch.tensor(counts, dtype=torch.int64), 10, total)
    assert torch.nonzero(small)[:, 0].tolist() == hidden


@pytest.mark.parametrize("least", [3, 4])
def test_every_small_count_has_two_possible_values_for_all_who_know_the_rule(least):
    views = {}
    for cells in (2, 3):
        for *counts, missing in itertools.product(range(11), repeat=cells + 1):
            total = sum(counts) + missing
            small = small_cells(torch.tensor(counts), least, total).tolist()
            shown = [None if hide else count for count, hide in zip(counts, small, strict=True)]
            views.setdefault((total, *shown, None), []).append((*counts, missing))
    assert len(views) > 1000
    for (total, *shown), tables in views.items():
        for cell, count in enumerate(shown):
            possible = {table[cell] for table in tables}
            assert count is not None or len(possible) > 1 or not 0 < possible.pop() < least, (total, shown, tables)


def number_of_missing_ages(policy, patients):
    """The number of missing ages that is not sent, from the counts of the others."""
    kinds = [SumRequest("missing", {"columns": ["age"]}), histogram(0, 128)]
    reply = policy.reply("c" * 64, RUN, kinds, patients.rows, patients.values)
    assert reply.sums[0]["counts"].tolist() == [0]
    return None if reply.hidden[1] else 60 - int(reply.sums[1]["counts"].sum())


def test_few_missing_values_do_not_follow_from_a_histogram(monkeypatch, tmp_path):
    patients = Patients([*[20.5] * 20, *[40.5] * 37, *[np.nan] * 3], [0] * 60)
    assert number_of_missing_ages(site(tmp_path / "on"), patients) is None
    exact = small_cells
    monkeypatch.setattr(policy_module, "small_cells", lambda counts, least, total: exact(counts, least, None))
    assert number_of_missing_ages(site(tmp_path / "off"), patients) == 3


class ClassMeans(Classes):
    """Sum of the inputs of each class."""

    name = "means_of_classes"
    permission = "features"

    def compute(self, rows, request):
        counts = super().compute(rows, request)["counts"]
        return {"counts": counts, "sums": torch.zeros(3, 1).double().index_add_(0, rows.y, rows.x.double())}

    def shapes(self, request):
        return {**super().shapes(request), "sums": (torch.float64, (3, 1))}

    def group_sizes(self, rows, request):
        return {"sums": super().compute(rows, request)["counts"]}


def inputs_of_the_rare_patient(policy, masked=False):
    """The inputs of the only patient of a class, from the mean of the class."""
    patients = Patients([*range(20, 50), *range(30, 60), 83], [0] * 30 + [1] * 30 + [2])
    return float(ask(policy, SumRequest("means_of_classes", {"classes": 3}), patients, masked=masked)["sums"][2])


def test_sums_over_small_groups_are_not_sent(monkeypatch, tmp_path):
    monkeypatch.setitem(SUMS, "means_of_classes", ClassMeans())
    assert inputs_of_the_rare_patient(site(tmp_path / "on", ["features"])) == 0
    assert inputs_of_the_rare_patient(site(tmp_path / "off", ["features"], min_count=1)) == 83
    monkeypatch.setattr(ClassMeans, "group_sizes", SumKind.group_sizes)
    assert inputs_of_the_rare_patient(site(tmp_path / "other", ["features"])) == 83


def test_the_group_that_is_hidden_with_a_small_one_has_no_sums_either(monkeypatch, tmp_path):
    """Otherwise those of the small group follow from the sums over all rows, and from those of the other groups."""
    monkeypatch.setitem(SUMS, "means_of_classes", ClassMeans())
    patients = Patients([*range(20, 50), *range(30, 63), 83], [0] * 30 + [1] * 33 + [2])
    reply = site(tmp_path, ["features"]).reply(
        "c" * 64, RUN, [SumRequest("means_of_classes", {"classes": 3})], patients.rows, patients.values
    )
    assert reply.hidden == [{"counts": [0, 2], "sums": [0, 2]}]
    assert reply.sums[0]["sums"][:, 0].tolist() == [0, sum(range(30, 63)), 0]


def test_moments_of_few_values_are_not_sent(tmp_path):
    patients = Patients([83.0, *[np.nan] * 59], [0] * 60)
    squares = SumRequest("column_squares", {"columns": ["age"]}, {"mean": torch.tensor([80.0]).double()})
    for rules, expected in (({}, [0, 0]), ({"min_count": 1}, [83, 9])):
        policy = site(tmp_path / str(len(rules)), **rules)
        found = [float(ask(policy, MOMENTS, patients)["sums"]), float(ask(policy, squares, patients)["squares"])]
        assert found == expected


def test_sums_of_no_columns_are_empty(tmp_path):
    """As of a table with categories only."""
    patients = hundred()
    patients.rows = replace(patients.rows, columns=(), numbers=np.zeros((100, 0)))
    assert ask(site(tmp_path), SumRequest("column_moments", {"columns": []}), patients)["sums"].shape == (0,)


TWO_VALUES = {
    "column_moments": ({"columns": ["age"]}, {}, lambda sums: sums["sums"][0]),
    "class_means": ({"classes": 3, "inputs": 1}, {}, lambda sums: sums["sums"].sum()),
    "label_products": (
        {"codes": [0], "targets": 3},
        {"center": torch.zeros(1).double()},
        lambda sums: sums["products"][0, 1],
    ),
}
"""Arguments, constants and the number of ones in a column of zeros and ones, by kind."""


@pytest.mark.parametrize("kind", TWO_VALUES)
@pytest.mark.parametrize(("ones", "sent"), [(2, 0), (40, 40), (98, 0)])
def test_each_of_two_values_is_a_group(kind, ones, sent, monkeypatch, tmp_path):
    """A column of 0 and 1, for example of a rare disease: its sum is the number of patients who have it."""
    carriers = Patients([1.0] * ones + [0.0] * (100 - ones), [*[0, 1] * 50])
    args, constants, number = TWO_VALUES[kind]
    request = SumRequest(kind, args, constants)
    assert number(ask(site(tmp_path / "on", ["moments", "features"]), request, carriers)) == sent
    monkeypatch.setattr(type(SUMS[kind]), "group_sizes", SumKind.group_sizes)
    assert number(ask(site(tmp_path / "off", ["moments", "features"]), request, carriers)) == ones


@pytest.mark.parametrize("kind", TWO_VALUES)
@pytest.mark.parametrize(("threes", "sent"), [(2, 0), (20, 100)])
def test_each_of_three_values_is_a_group(kind, threes, sent, tmp_path):
    """The number of rows, the sum and the sum of squares are three equations for the numbers of rows with 0, 1 and 3."""
    grades = Patients([0.0] * 40 + [1.0] * 40 + [3.0] * threes, [*[0, 1] * ((80 + threes) // 2)])
    args, constants, number = TWO_VALUES[kind]
    assert number(ask(site(tmp_path, ["moments", "features"]), SumRequest(kind, args, constants), grades)) == sent


def test_products_of_a_rare_value_and_a_class_are_not_sent(tmp_path):
    """20 patients have the disease, but only 2 of the second class."""
    carriers = Patients([1.0] * 20 + [0.0] * 80, [*[0] * 18, *[1] * 42, *[0] * 40])
    args, constants, number = TWO_VALUES["label_products"]
    request = SumRequest("label_products", {**args, "targets": 2}, constants)
    assert number(ask(site(tmp_path / "on", ["features"]), request, carriers)) == 0
    sums = ask(site(tmp_path / "off", ["features"], min_count=1), request, carriers)
    assert sums["products"][1, 2:].tolist() == [18, 2]


def test_a_gradient_with_a_part_of_a_rare_class_is_not_sent(monkeypatch, tmp_path):
    """Here the gradient of the weights of each class is the mean of its inputs, as in a softmax layer."""
    patients = Patients([*range(20, 80), 83], [0] * 30 + [1] * 30 + [2])
    per_class = torch.zeros(3).double().index_add_(0, patients.rows.y, patients.rows.x[:, 0].double()) / 61
    object.__setattr__(patients.rows, "gradient", lambda: (per_class, 1.0))
    request = SumRequest("gradient", {"parameters": 3})
    assert ask(site(tmp_path / "on", ["gradients"]), request, patients)["gradient"].tolist() == [0, 0, 0]
    monkeypatch.setattr(type(SUMS["gradient"]), "group_sizes", SumKind.group_sizes)
    sent = ask(site(tmp_path / "off", ["gradients"]), request, patients)["gradient"]
    assert float(sent[2]) * 61 == pytest.approx(83)


def test_masked_counts_are_exact_unless_mask_small_is_set(monkeypatch, tmp_path):
    """The server sees only their sum over sites."""
    monkeypatch.setitem(SUMS, "means_of_classes", ClassMeans())
    assert inputs_of_the_rare_patient(site(tmp_path / "a", ["features"]), masked=True) == 83
    assert inputs_of_the_rare_patient(site(tmp_path / "b", ["features"], mask_small=True), masked=True) == 0
    patients = Patients(range(60), [0] * 3 + [1] * 9 + [2] * 48)
    assert ask(site(tmp_path / "a"), CLASSES, patients, masked=True)["counts"].tolist() == [3, 9, 48]
    assert ask(site(tmp_path / "a"), CLASSES, patients)["counts"].tolist() == [0, 0, 48]


# ---- noise --------------------------------------------------------------------------------------------------------------


def test_noise_has_the_distribution_of_epsilon_in_every_cell(seeded, tmp_path):
    policy = site(tmp_path, allow=["histograms"], epsilon=0.5)
    patients = Patients(np.repeat(np.arange(64) + 0.5, 1000), [0] * 64000)
    noise = ask(policy, histogram(0, 64), patients)["counts"][1:-1] - 1000
    assert 2.80 * (1 - 3 * (5 / 64) ** 0.5 / 2) < float(noise.double().std()) < 2.80 * (1 + 3 * (5 / 64) ** 0.5 / 2)
    assert len(noise.unique()) > 5


def test_with_noise_counts_below_min_count_are_hidden_after_the_noise(monkeypatch, tmp_path):
    """So what is hidden depends on noisy counts only, and negative ones are hidden, too."""
    monkeypatch.setattr(policy_module, "discrete_laplace", lambda epsilon, count: [-4, 8, 1][:count])
    patients = Patients(range(60), [0] * 13 + [1] * 2 + [2] * 45)
    policy = site(tmp_path, allow=["counts"], epsilon=1)
    reply = policy.reply("c" * 64, RUN, [CLASSES], patients.rows, patients.values)
    assert reply.sums[0]["counts"].tolist() == [0, 10, 46]
    assert reply.hidden == [{"counts": [0]}]
    assert ask(policy, CLASSES, patients, masked=True)["counts"].tolist() == [9, 10, 46]  # the same noise


def test_privacy_losses_add_up_and_end_the_replies(tmp_path):
    ages = SumRequest("missing", {"columns": ["age", "height", "weight"]})
    rules = {"allow": ["counts", "histograms", "missing"], "epsilon": 0.1, "total_epsilon": 0.5}
    patients = hundred()
    object.__setattr__(patients.rows, "missing", {"age": 1, "height": 2, "weight": 3})

    def spent(request, policy):
        return policy.reply("c" * 64, RUN, [request], patients.rows, patients.values).epsilon

    assert spent(CLASSES, site(tmp_path, **rules)) == pytest.approx(0.1)  # a row is in one class
    assert spent(CLASSES, site(tmp_path, **rules)) == 0
    assert spent(ages, site(tmp_path, **rules)) == pytest.approx(0.3)  # a row may miss all three values
    assert spent(histogram(0, 64), site(tmp_path, **rules)) == pytest.approx(0.1)  # 66 cells
    other = SumRequest("histogram", {"column": "height", "range": [0, 250]})
    patients.rows.__dict__["columns"], patients.rows.__dict__["numbers"] = ("age", "height"), np.ones((100, 2))
    with pytest.raises(ConfigError, match=r"would be 0.6, more than total_epsilon=0.5"):
        spent(other, site(tmp_path, **rules))
    assert spent(CLASSES, site(tmp_path, **rules)) == 0  # what was sent can be sent again
    assert spent(other, site(tmp_path, **{**rules, "total_epsilon": 0.6})) == pytest.approx(0.1)


def test_a_message_that_exceeds_the_budget_costs_nothing(tmp_path):
    patients, policy = hundred(), site(tmp_path, allow=["counts", "histograms"], epsilon=1, total_epsilon=1.5)
    with pytest.raises(ConfigError, match="total_epsilon"):
        policy.reply("c" * 64, RUN, [CLASSES, histogram(0, 64)], patients.rows, patients.values)
    assert policy.ledger.read().spent == 0
    assert ask(policy, histogram(0, 64), patients)


def test_a_server_cannot_fill_the_disk_of_a_site(monkeypatch, tmp_path):
    monkeypatch.setattr(policy_module, "MOST", 2)
    policy = site(tmp_path)
    squares = [
        SumRequest("column_squares", {"columns": ["age"]}, {"mean": torch.tensor([m]).double()}) for m in range(3)
    ]
    for request in (*squares[:2], *squares[:2]):
        ask(policy, request, hundred())
    with pytest.raises(ConfigError, match="has sent 2 statistics"):
        ask(policy, squares[2], hundred())


def test_each_label_of_a_row_costs_epsilon(tmp_path):
    patients = hundred()
    object.__setattr__(patients.rows, "y", torch.ones(100, 3))
    reply = site(tmp_path, allow=["counts"], epsilon=1).reply("c" * 64, RUN, [CLASSES], patients.rows, patients.values)
    assert reply.epsilon == 3


def test_exact_sums_are_not_sent_next_to_noise(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"remove moments from statistics\.allow, or epsilon"):
        site(tmp_path, ["moments"], epsilon=1)
    monkeypatch.setitem(SUMS, "means_of_classes", ClassMeans(permission="counts"))
    with pytest.raises(ConfigError, match="can be added to counts only"):
        ask(site(tmp_path, ["counts"], epsilon=1), SumRequest("means_of_classes", {"classes": 3}), hundred())


# ---- what is stored -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["write", "log"])
def test_noise_is_not_drawn_again_after_a_crash(last, monkeypatch, tmp_path):
    """Power fails after the reply was stored, and before it has left; or before it was stored, so it never leaves."""
    write, log = StatisticsLedger.write, StatisticsLedger.log

    class PowerFailure(BaseException):
        pass

    def then_fail(function):
        def failing(self, argument):
            function(self, argument)
            raise PowerFailure

        return failing

    rules = {"allow": ["counts"], "epsilon": 0.1, "min_count": 1}
    with (ledger := site(tmp_path, **rules).ledger).locked():
        ledger.read()
    monkeypatch.setattr(StatisticsLedger, last, then_fail({"write": write, "log": log}[last]))
    with pytest.raises(PowerFailure):
        ask(site(tmp_path, **rules), CLASSES, hundred())
    monkeypatch.undo()
    records = StatisticsLedger(tmp_path / "state").read()
    assert records.spent == (0.1 if last == "write" else 0)
    sent = ask(site(tmp_path, **rules), CLASSES, hundred(), masked=True)["counts"]
    if last == "write":
        stored = StatisticsLedger(tmp_path / "state").tensors(records.replies[0].sums)
        assert torch.equal(sent, stored["sums/counts"])
    assert StatisticsLedger(tmp_path / "state").read().spent == 0.1


def test_every_reply_is_in_the_chained_log(tmp_path):
    policy, patients = site(tmp_path, allow=["counts"], epsilon=0.5), hundred()
    for _ in range(2):
        ask(policy, CLASSES, patients)
    events, _ = read_events(tmp_path / "state" / "statistics.jsonl", verify=True)
    assert [event["epsilon"] for event in events] == [0.5, 0]
    first = {name: events[0][name] for name in ("event", "run", "experiment", "kind", "request", "masked")}
    assert first == {
        "event": "sent",
        "run": RUN,
        "experiment": "c" * 64,
        "kind": "class_counts",
        "request": CLASSES.digest,
        "masked": False,
    }
    assert events[0]["hidden"] == events[1]["hidden"] >= 0


def test_only_the_owner_can_read_what_is_stored(tmp_path):
    ask(site(tmp_path), CLASSES, hundred())
    state = tmp_path / "state"
    for path in (state, state / "statistics"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = [state / "statistics.jsonl", *(state / "statistics").iterdir()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_hashes_of_rows_need_the_key_of_the_site(tmp_path):
    for name in "ab":
        ask(site(tmp_path / name), CLASSES, hundred())
    ledgers = [StatisticsLedger(tmp_path / name / "state") for name in "ab"]
    one, other = (ledger.tensors(ledger.read().data[0])["rows/age"] for ledger in ledgers)
    assert not set(one.tolist()) & set(other.tolist())
