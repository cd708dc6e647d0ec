"""Survival times at a site: it sends cells of enough rows, on one grid, and terms of the log-rank test only in sums."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.policy import StatisticsPolicy
from unskew.errors import ConfigError
from unskew.sums.base import ClientRows, SumRequest

UNTIL = 400.0
TABLE = SumRequest("survival_table", {"until": UNTIL, "cuts": []})


class Patients:
    """A hundred patients: 30 die on day 50, 40 on day 100, 5 on day 200, and 25 are alive on day 400."""

    def __init__(self):
        days = [*[50.0] * 30, *[100.0] * 40, *[200.0] * 5, *[UNTIL] * 25]
        self.rows = ClientRows(y=torch.tensor([[day, float(day < UNTIL)] for day in days], dtype=torch.float64))
        self.values = {"days": days}


def ask(folder, request, masked=False, **rules):
    config = SiteConfig.model_validate({"name": "clinic", "client": 0, "statistics": {"allow": ["survival"], **rules}})
    patients = Patients()
    policy = StatisticsPolicy(config, folder, [].append)
    return policy.reply("c" * 64, "a" * 16, [request], patients.rows, patients.values, masked)


def term(hazard):
    hazards = torch.full((256,), hazard, dtype=torch.float64)
    return SumRequest("log_rank_term", TABLE.args, {"hazard": hazards})


def test_cells_with_few_rows_are_not_sent(tmp_path):
    reply = ask(tmp_path, TABLE)
    counts = reply.sums[0]["counts"]
    # The single hidden cell would follow from the number of rows, so that the next smallest is hidden, too.
    assert sorted(counts[counts > 0].tolist()) == [30, 40]
    assert len(reply.hidden[0]["counts"]) == 2
    assert ask(tmp_path / "masked", TABLE, masked=True).sums[0]["counts"].sum() == 100


def test_noise_in_all_cells_costs_epsilon_once(tmp_path):
    assert ask(tmp_path, TABLE, epsilon=0.5).epsilon == 0.5


def test_a_second_grid_of_the_times_is_rejected(tmp_path):
    ask(tmp_path, TABLE)
    with pytest.raises(ConfigError, match="already counted survival times"):
        ask(tmp_path, SumRequest("survival_table", {"until": UNTIL + 1, "cuts": []}))
    with pytest.raises(ConfigError, match="already counted survival times"):
        ask(tmp_path, SumRequest("survival_table", {"until": UNTIL, "cuts": [99.9]}))


def test_chosen_hazards_cannot_reveal_rows_at_risk(tmp_path):
    with pytest.raises(ConfigError, match="log_rank_term only under secure aggregation"):
        ask(tmp_path, term(0.01))
    expected = 0.01 * sum(np.ceil(day * 256 / UNTIL) for day in Patients().values["days"])
    sent = ask(tmp_path, term(0.01), masked=True).sums[0]["term"].tolist()
    assert sent == pytest.approx([(75 - expected) ** 2 / expected, 1])
    with pytest.raises(ConfigError, match="already sent statistics with other hazard for log_rank_term"):
        ask(tmp_path, term(0.02), masked=True)


def test_a_histogram_of_the_times_is_a_second_grid(tmp_path):
    """A patient who dies on day 99.5 would be the difference of the cells until 99.6 of one grid and until 100 of another."""
    config = SiteConfig.model_validate(
        {"name": "clinic", "client": 0, "statistics": {"allow": ["survival", "histograms"]}}
    )
    policy, patients = StatisticsPolicy(config, tmp_path, [].append), Patients()
    other = ClientRows(columns=("days",), numbers=patients.rows.y[:, :1].numpy(), y=patients.rows.y[:, 1].long())
    histogram = SumRequest("histogram", {"column": "days", "range": [36.0, 100.0]})

    def reply(request, rows):
        return policy.reply("c" * 64, "a" * 16, [request], rows, patients.values)

    reply(TABLE, replace(patients.rows, labels=("days", "dead")))
    with pytest.raises(ConfigError, match="already counted days"):
        reply(histogram, other)
    another = replace(patients.rows, labels=("weeks", "dead"))  # another column has a grid of its own
    reply(SumRequest("survival_table", {"until": UNTIL + 1, "cuts": []}), another)
