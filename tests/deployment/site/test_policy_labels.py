"""Experiments that predict other columns of the same rows get sums of their own labels, never the stored ones of another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sites import TINY, LoopPlace
from support.survival_rows import survival_experiment

from unskew.config.loader import experiment
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.data import load_site_data
from unskew.deployment.site.policy import StatisticsPolicy
from unskew.deployment.site.row_hashes import row_values
from unskew.sums.base import SumRequest
from unskew.sums.registry import PERMISSIONS

SURVIVAL = SumRequest("survival_table", {"until": 400.0, "cuts": []})
COUNTS = SumRequest("class_counts", {"classes": 2})
MEANS = SumRequest("class_means", {"classes": 2, "inputs": 1})
GRADIENT = SumRequest("gradient", {"parameters": 1})
AGES = SumRequest("histogram", {"column": "age", "range": [0, 128]})
LABELS = {"dead": 0.8, "relapse": 0.3}


@pytest.fixture
def table(tmp_path):
    """A file of 200 patients, 80 % of whom die and 30 % of whom have a relapse."""
    draws = np.random.default_rng(0)
    columns = {"age": draws.normal(60, 10, 200).round(), "days": np.ceil(draws.exponential(100, 200))}
    columns |= {name: (draws.random(200) < share).astype(float) for name, share in LABELS.items()}
    lines = [
        ",".join(columns),
        *(",".join(f"{value:.0f}" for value in row) for row in zip(*columns.values(), strict=True)),
    ]
    (tmp_path / "patients.csv").write_text("\n".join(lines))
    return tmp_path / "patients.csv", columns


def policy_of(folder):
    statistics = {"allow": [*PERMISSIONS], "min_count": 1}
    config = SiteConfig.model_validate({"name": "clinic", "client": 0, "statistics": statistics})
    return StatisticsPolicy(config, folder / "policy", [].append)


def loaded(path, **more):
    """Training rows of the only site of an experiment over a file, and the values of all of its rows."""
    values = {**TINY, "data": f"table:{path}", "partition": "iid", "max_train_samples": None, "holdout": 0.0, **more}
    folder = path.parent / "".join(word[0] for word in more["label"].split(","))  # paths of sockets are short
    place = LoopPlace(folder, values, 1, data={"source": f"table:{path}", "label": more["label"]})
    samples = load_site_data(place.sites[0].config, experiment(values), folder)
    return samples.train, samples.rows(), row_values(samples)


def survival(path, label):
    return loaded(path, **survival_experiment(path, label=f"days,{label}", partition="iid", max_train_samples=None))


def test_each_event_column_has_its_own_survival_table(table, tmp_path):
    policy, sent = policy_of(tmp_path), []
    for label in (*LABELS, "dead"):
        train, rows, values = survival(table[0], label)
        counts = policy.reply(label[0] * 64, "a" * 16, [SURVIVAL], rows, values).sums[0]["counts"]
        sent.append(int(counts[0].sum()))
        assert sent[-1] == int(train.y[train.y[:, 0] <= 400, 1].sum())
    assert sent[1] < sent[0] / 2
    assert sent[2] == sent[0]


@pytest.mark.parametrize("others", ["inputs", "excluded"])
@pytest.mark.parametrize("request_", [COUNTS, MEANS, GRADIENT], ids=lambda request: request.kind)
def test_each_label_column_has_its_own_sums(request_, others, table, tmp_path):
    """Also if the other label is no input, so that all hashed columns that both experiments have are the same."""
    path, columns = table
    policy, replies = policy_of(tmp_path), []
    for label, other in [("dead", "relapse"), ("relapse", "dead"), ("dead", "relapse")]:
        exclude = ["days", *([other] if others == "excluded" else [])]
        _, rows, values = loaded(path, label=label, exclude=exclude, clients=1)
        y = torch.from_numpy(columns[label]).long()
        x = torch.from_numpy(columns["age"]).float()[:, None]
        share = y.double().mean()[None]
        rows = replace(
            rows, x=x, y=y, class_counts=lambda y=y: torch.bincount(y), gradient=lambda share=share: (share, 0.0)
        )
        replies.append(policy.reply(label[0] * 64, "a" * 16, [request_], rows, values).sums[0])
    first, second, again = replies
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], again[name]) for name in first)
    if request_ is COUNTS:
        assert second["counts"].tolist() == [200 - columns["relapse"].sum(), columns["relapse"].sum()]


def test_sums_that_depend_on_no_label_stay_the_stored_ones(table, tmp_path):
    """Otherwise other training rows, or new noise, could be compared with the first reply."""
    path, _ = table
    policy = policy_of(tmp_path)
    for label in LABELS:
        _, rows, values = survival(path, label)
        policy.reply(label[0] * 64, "a" * 16, [AGES], rows, values)
    assert len(policy.ledger.read().replies) == 1
