"""Harmonized federations: training, held-out, test and unseen rows, confounding with the label, and errors."""

import csv

import numpy as np
import pytest

import unskew
from unskew.config.loader import experiment, read_yaml
from unskew.data.harmonized_source import share_between
from unskew.data.load import load_partitioned
from unskew.data.spec import DataSpec
from unskew.deployment.server.site_clients import check_deployable
from unskew.errors import ConfigError, DataError

NUMBERS = ["a", "b", "c", "d"]
SITES = {"Oslo": 90, "Bergen": 70, "Rome": 50}


def write_table(path, prevalence=(0.5, 0.5, 0.5), seed=0, **replaced):
    """Write a table of three hospitals whose columns differ in shift and scale."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", "age", "sex", *NUMBERS, "sick", "cost"])
        for k, (name, n) in enumerate(SITES.items()):
            for i in range(n):
                age, sex, sick = int(rng.integers(20, 90)), int(rng.integers(0, 2)), int(i < prevalence[k] * n)
                values = rng.normal(size=4) * (1 + 0.5 * k) + k * np.array([1, -1, 2, 0]) + 0.02 * age + sick
                row = [name, age, "fm"[sex], *np.round(values, 4), ["no", "yes"][sick], round(10 * k + values[0], 2)]
                writer.writerow(replaced.get(f"row{i}_{name}", row))
    return str(path)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("harmonized") / "wards.csv")


def options(table, **changes):
    chosen = {"label": "sick", "exclude": "cost", "partition": "natural:hospital", "features": NUMBERS, "holdout": 0.2}
    return {"data": table, **chosen, "harmonize": "combat", **changes}


def line_through(before, after):
    """Slope and intercept of each column of an affine map."""
    slope = (after[1] - after[0]) / (before[1] - before[0])
    return slope, after[0] - slope * before[0]


@pytest.mark.parametrize("form", ["combat", {"method": "combat", "empirical_bayes": False}])
def test_held_out_and_test_rows_get_the_parameters_of_their_site(table, form):
    raw = load_partitioned(DataSpec(**options(table, harmonize="none")), 0)
    fed = unskew.load_federation(**options(table, harmonize=form))
    tested = 0
    for k, name in enumerate(fed.client_names):
        first, held_out = (part.x.numpy() for part in raw.client(k))
        slope, intercept = line_through(first, fed.clients[k].x.numpy())
        np.testing.assert_allclose(fed.clients[k].x, slope * first + intercept, atol=1e-4)
        np.testing.assert_allclose(fed.clients[k].x_test, slope * held_out + intercept, atol=1e-4)
        rows = raw.test.columns["hospital"] == name
        tested += rows.sum()
        np.testing.assert_allclose(fed.test[0][rows], slope * raw.test.x.numpy()[rows] + intercept, atol=1e-4)
        if form != "combat":
            moments = fed.clients[k].x.double().mean(0), fed.clients[k].x.double().std(0)
            np.testing.assert_allclose(moments[0], fed.harmonization.alpha, atol=1e-6)
            np.testing.assert_allclose(moments[1], fed.harmonization.sigma, atol=1e-6)
    assert tested == len(fed.test[1])


def test_standardization_uses_moments_of_harmonized_rows(table):
    fed = unskew.load_federation(**options(table))
    rows = np.concatenate([client.x.numpy() for client in fed.clients]).astype(float)
    np.testing.assert_allclose([encoder.mean for encoder in fed.encoders], rows.mean(0), atol=1e-6)
    np.testing.assert_allclose([encoder.std for encoder in fed.encoders], rows.std(0), atol=1e-6)


def test_traffic_is_that_of_the_sums(table):
    plain = unskew.load_federation(**options(table, harmonize="none", missing="mean", features=["age", *NUMBERS]))
    fed = unskew.load_federation(**options(table, features=["age", *NUMBERS], harmonize={"covariates": ["age"]}))
    sent = 8 * (1 + 4) + 8 * (1 + 4 + 4)
    assert (fed.stats_traffic - plain.stats_traffic).tolist() == [[sent, 8 * 4]] * 3


def test_categories_and_numbers_are_covariates_and_are_not_changed(table):
    features, changes = ["age", "sex", *NUMBERS], {"covariates": "age,sex"}
    raw = unskew.load_federation(**options(table, features=features, categories="sex", harmonize="none"))
    fed = unskew.load_federation(**options(table, features=features, categories="sex", harmonize=changes))
    assert fed.harmonization.covariates == (("age", ()), ("sex", ("f", "m")))
    assert fed.clients[0].x[:, :2].equal(raw.clients[0].x[:, :2])
    sizes = [len(client.y) for client in raw.clients]
    rows = np.concatenate([client.x.numpy() for client in raw.clients]).astype(float)
    design = np.column_stack([np.repeat(np.eye(3), sizes, 0), rows[:, 0], rows[:, 1] == 2])
    b = np.linalg.lstsq(design, rows[:, 2:], rcond=None)[0]
    np.testing.assert_allclose(fed.harmonization.beta, b[3:], rtol=1e-6)


def test_unseen_clients_get_parameters_from_their_own_rows(table, tmp_path):
    changes = {"method": "combat", "empirical_bayes": False}
    fed = unskew.load_federation(**options(table, harmonize=changes, unseen=["Rome"]))
    all_sites = unskew.load_federation(**options(table, harmonize=changes))
    assert fed.harmonization.alpha != all_sites.harmonization.alpha
    rows = fed.unseen[0].x.double()
    np.testing.assert_allclose(rows.mean(0), fed.harmonization.alpha, atol=1e-6)
    np.testing.assert_allclose(rows.std(0), fed.harmonization.sigma, atol=1e-6)
    assert set(fed.harmonization.sites) == set(SITES)
    assert len(fed.stats_traffic) == 2


def test_variance_between_sites_is_removed(table):
    fed = unskew.load_federation(**options(table))
    before, after = fed.harmonization.between
    assert before > 0.2
    assert after < 0.01
    assert after == pytest.approx(share_between([client.x.numpy() for client in fed.clients]), abs=1e-6)
    report = unskew.diagnose(fed, model="logistic", samples=5, curvature=False, synthetic_fractions=[0])
    assert report.details["harmonization"] == str(fed.harmonization)
    assert report.labels["harmonized_between_after"] == after
    assert f"{before:.1%} of their variance was between sites, {after:.1%} is left" in str(fed.harmonization)


def test_labels_that_differ_between_sites_raise_an_error_from_the_limit(tmp_path, capsys):
    strong = write_table(tmp_path / "strong.csv", (0.2, 0.5, 0.8))
    with pytest.raises(ConfigError, match=r"more than by chance \(limit 0.10\).*harmonize.confounded"):
        unskew.load_federation(**options(strong))
    fed = unskew.load_federation(**options(strong, harmonize={"confounded": "allow"}))
    sick = [client.y.double().mean().item() for client in fed.clients]
    pooled = np.average(sick, weights=fed.sizes)
    chance = np.sqrt(2 / np.pi * pooled * (1 - pooled)) * np.mean(np.sqrt(1 / fed.sizes - 1 / fed.sizes.sum()))
    assert fed.harmonization.label_distance == pytest.approx(np.mean(np.abs(sick - pooled)) - chance)
    assert "Harmonization may remove a part of the label" in capsys.readouterr().err
    weak = write_table(tmp_path / "weak.csv", (0.37, 0.5, 0.65))
    assert 0.05 <= unskew.load_federation(**options(weak)).harmonization.label_distance < 0.10
    assert "Harmonization may remove a part of the label" in capsys.readouterr().err


def test_numbers_to_predict_are_compared_above_and_below_the_median(table):
    with pytest.raises(ConfigError, match=r"limit 0.10"):  # the costs of the hospitals differ by 10 and more
        unskew.load_federation(**options(table, label="cost", exclude="sick", task="regression"))


def test_vectors_are_harmonized_by_their_positions(tmp_path):
    rng = np.random.default_rng(0)
    site = np.repeat(["a", "b"], 60)
    x = (rng.normal(size=(120, 5)) + (site == "b")[:, None]).astype("float32")
    np.savez(tmp_path / "vectors.npz", x=x, y=np.arange(120) % 2, site=site)
    chosen = {"data": f"npz:{tmp_path}/vectors.npz", "partition": "natural:site"}
    fed = unskew.load_federation(**chosen, harmonize={"columns": ["input 0", "input 2", "input 4"]})
    raw = unskew.load_federation(**chosen)
    assert fed.harmonization.columns == ("input 0", "input 2", "input 4")
    assert fed.clients[0].x[:, [1, 3]].equal(raw.clients[0].x[:, [1, 3]])
    means = np.array([client.x.mean(0).numpy() for client in fed.clients])
    assert (np.abs(means[0] - means[1]) < 0.5).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "iid", "clients": 3}, "requires partition=natural:COLUMN"),
        ({"partition": "sorted:hospital", "clients": 3}, "requires partition=natural:COLUMN"),
        ({"server_data": 10}, "cannot be combined with server_data"),
        ({"shift": "noise:1"}, "cannot be combined with shift"),
        ({"harmonize": {"covariates": ["sick"]}}, "contains the label 'sick'"),
        ({"harmonize": {"covariates": ["ages"]}}, "no input column 'ages'"),
        ({"harmonize": {"columns": ["hospital", "b", "c"]}}, "harmonize.columns.*'hospital'"),
        ({"harmonize": {"columns": ["b", "c"]}}, "2 columns to harmonize.*empirical_bayes"),
        ({"harmonize": "magic"}, "harmonize.method='magic' is not valid"),
        ({"harmonize": {"covariate": "age"}}, "harmonize.covariate"),
    ],
)
def test_rejects_options_that_contradict_harmonization(table, changes, message):
    with pytest.raises(ConfigError, match=message):
        unskew.load_federation(**options(table, **changes))


def test_rejects_images_and_texts(tmp_path):
    with pytest.raises(ConfigError, match=r"requires a table or feature vectors.*fedbn"):
        unskew.load_federation("digits", partition="natural:x", harmonize="combat")
    (tmp_path / "texts.csv").write_text("site,text,label\na,one,x\nb,two,y\n" * 9)
    with pytest.raises(ConfigError, match="not texts"):
        unskew.load_federation(
            f"text:{tmp_path}/texts.csv", partition="natural:site", label="label", harmonize="combat"
        )


def test_rejects_missing_values_of_harmonized_columns(tmp_path):
    row = ["Oslo", 40, "f", "", 1, 2, 3, "no", 1]
    table = write_table(tmp_path / "gaps.csv", row2_Oslo=row, row3_Oslo=row)
    with pytest.raises(DataError, match=r"'a' of the harmonization has no known value in . of .* rows"):
        unskew.load_federation(**options(table, missing="mean"))
    fed = unskew.load_federation(**options(table, missing="mean", harmonize={"columns": ["b", "c", "d"]}))
    assert fed.missing.sum() > 0


def test_rejects_a_site_with_one_row(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 2
    np.savez(tmp_path / "v.npz", x=x, y=y, site=np.array(["a", *["b"] * 45, *["c"] * 44]))
    changes = {"method": "combat", "confounded": "allow"}
    with pytest.raises(DataError, match="The client a: there is one row"):
        unskew.load_federation(f"npz:{tmp_path}/v.npz", partition="natural:site", harmonize=changes)


def test_new_sites_of_the_test_set_need_twenty_rows(tmp_path):
    folder = tmp_path / "split"
    folder.mkdir()
    write_table(folder / "train.csv")
    lines = (folder / "train.csv").read_text().splitlines()
    (folder / "test.csv").write_text("\n".join([lines[0], *[f"Paris{line[4:]}" for line in lines[1:20]]]))
    chosen = options(f"table:{folder}")
    with pytest.raises(
        DataError, match="the test rows: hospital 'Paris' is not among the training rows and has 19 rows"
    ):
        unskew.load_federation(**chosen)
    (folder / "test.csv").write_text("\n".join([lines[0], *[f"Paris{line[4:]}" for line in lines[1:31]]]))
    changes = {"method": "combat", "empirical_bayes": False}
    fed = unskew.load_federation(**{**chosen, "harmonize": changes})
    np.testing.assert_allclose(fed.test[0].double().mean(0), fed.harmonization.alpha, atol=1e-6)
    (folder / "test.csv").write_text("\n".join(line.partition(",")[2] for line in lines[:31]))
    with pytest.raises(DataError, match="the test rows need the column 'hospital'"):
        unskew.load_federation(**chosen)


def test_short_and_long_forms_are_equal():
    long = {"method": "combat", "columns": [], "covariates": ["age", "sex"], "confounded": "error"}
    text = "harmonize: {covariates: [age, sex]}"
    assert experiment({"harmonize": long}) == experiment(read_yaml(text))
    assert experiment({"harmonize": "combat"}).harmonize == experiment({"harmonize": {"method": "combat"}}).harmonize
    names = read_yaml("harmonize: {columns: [1, 2020-01-01], covariates: [3]}")["harmonize"]
    assert names == {"columns": ["1", "2020-01-01"], "covariates": ["3"]}


def test_deployed_runs_reject_harmonization(table):
    with pytest.raises(ConfigError, match="available in simulations only"):
        check_deployable(experiment(options(table)))
