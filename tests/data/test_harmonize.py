"""ComBat: equal to the published algorithm in plain loops; what it removes, what it preserves, and when it removes signal."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from unskew.data.harmonize import Harmonization, fit_harmonization
from unskew.data.spec import HarmonizeSpec
from unskew.errors import DataError
from unskew.sums.base import ClientRows
from unskew.sums.exchange import SimulatedExchange


def published(x, sites, z, empirical_bayes=True, mean_only=False):
    """ComBat as Johnson et al. (2007) and Fortin et al. (2018) state it, with a pooled regression and loops."""
    names, n = np.unique(sites), len(x)
    design = np.column_stack([*((sites == name).astype(float) for name in names), *z.T])
    b = np.linalg.lstsq(design, x, rcond=None)[0]
    b += np.linalg.lstsq(design, x - design @ b, rcond=None)[0]  # without most of the rounding error
    sizes = np.array([(sites == name).sum() for name in names])
    common = sizes @ b[: len(names)] / n + z @ b[len(names) :]
    sigma = np.sqrt(np.square(x - design @ b).mean(0))
    s = (x - common) / sigma
    out = np.empty_like(x)
    for name in names:
        own = s[sites == name]
        rows, columns = own.shape
        g_hat = own.mean(0)
        d_hat = np.ones(columns) if mean_only else own.var(0, ddof=1)
        g, d = g_hat.copy(), d_hat.copy()
        g_bar, t2 = g_hat.mean(), g_hat.var(ddof=1)
        if empirical_bayes and mean_only:
            g = (t2 * g_hat + g_bar) / (t2 + 1)
        elif empirical_bayes:
            m, s2 = d_hat.mean(), d_hat.var(ddof=1)
            alpha, beta = (2 * s2 + m**2) / s2, (m * s2 + m**3) / s2
            change = 1.0
            while change > 1e-4:
                g_new, d_new = np.empty(columns), np.empty(columns)
                for j in range(columns):
                    g_new[j] = (rows * t2 * g_hat[j] + d[j] * g_bar) / (rows * t2 + d[j])
                    d_new[j] = (0.5 * ((own[:, j] - g_new[j]) ** 2).sum() + beta) / (rows / 2 + alpha - 1)
                change = max((abs(g_new - g) / g).max(), (abs(d_new - d) / d).max())
                g, d = g_new, d_new
        out[sites == name] = sigma * (own - g) / np.sqrt(d)
    return out + common


def cohort(seed=0, sizes=(40, 80, 12, 60), columns=6):
    """Columns with shifts and scales of sites, and effects of two whole-number covariates."""
    rng = np.random.default_rng(seed)
    sites = np.repeat(np.arange(len(sizes)), sizes)
    n = len(sites)
    z = np.column_stack([rng.integers(20, 90, n), rng.integers(0, 2, n)]).astype(float)
    noise = rng.normal(size=(n, columns)) * rng.gamma(4, 0.3, (len(sizes), columns))[sites]
    shifts = rng.normal(size=(len(sizes), columns))[sites] + 5 * rng.normal(size=columns)
    return noise + shifts + z @ (rng.normal(size=(2, columns)) * [[0.03], [1]]), sites, z


def client_rows(x, sites, z):
    names = tuple(f"x{j}" for j in range(x.shape[1])), tuple(f"z{j}" for j in range(z.shape[1]))
    for name in np.unique(sites):
        yield ClientRows(columns=sum(names, ()), numbers=np.column_stack([x, z])[sites == name])


def fitted(x, sites, z, **options):
    exchange = SimulatedExchange(lambda: client_rows(x, sites, z))
    columns, covariates = [f"x{j}" for j in range(x.shape[1])], [(f"z{j}", ()) for j in range(z.shape[1])]
    return fit_harmonization(exchange, "site", HarmonizeSpec(method="combat", **options), columns, covariates)


def combat(x, sites, z=None, **options):
    z = np.zeros((len(x), 0)) if z is None else z
    fit, out = fitted(x, sites, z, **options), np.empty_like(x)
    for name in np.unique(sites):
        own = sites == name
        out[own] = fit.apply(x[own], z[own], fit.estimate(x[own], z[own], str(name)))
    return out


@pytest.mark.parametrize("mean_only", [False, True])
@pytest.mark.parametrize("empirical_bayes", [True, False])
@pytest.mark.parametrize("covariates", [0, 2])
def test_equals_the_published_algorithm(empirical_bayes, mean_only, covariates):
    options = {"empirical_bayes": empirical_bayes, "mean_only": mean_only}
    for seed in range(5):
        x, sites, z = cohort(seed)
        z = z[:, :covariates]
        np.testing.assert_allclose(
            combat(x, sites, z, **options), published(x, sites, z, **options), rtol=0, atol=5e-14
        )


def test_the_sums_over_sites_are_a_pooled_regression_with_site_intercepts():
    x, sites, z = cohort()
    design = np.column_stack([np.eye(4)[sites], z])
    b, squares = np.linalg.lstsq(design, x, rcond=None)[:2]
    fit = fitted(x, sites, z)
    np.testing.assert_allclose(fit.beta, b[4:], rtol=1e-10)
    np.testing.assert_allclose(fit.alpha, np.bincount(sites) @ b[:4] / len(x), rtol=1e-10)
    np.testing.assert_allclose(fit.sigma, np.sqrt(squares / len(x)), rtol=1e-10)


def test_sites_with_equal_moments_are_unchanged_up_to_their_degrees_of_freedom():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)) * [1, 2, 3, 4] + [5, 6, 7, 8]
    sites, both = np.repeat([0, 1], 50), np.concatenate([x, x])
    np.testing.assert_allclose(combat(both, sites, empirical_bayes=False, mean_only=True), both, atol=1e-13)
    # A site's variance is divided by n - 1, the pooled one by n.
    expected = x.mean(0) + (x - x.mean(0)) * np.sqrt(49 / 50)
    np.testing.assert_allclose(combat(both, sites, empirical_bayes=False)[:50], expected, atol=1e-13)


def test_a_shift_and_scale_of_a_site_is_removed_exactly():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    sites, both = np.repeat([0, 1], 60), np.concatenate([x, 3 * x + [1, 2, 3, 4, 5]])
    result = combat(both, sites, empirical_bayes=False)
    np.testing.assert_allclose(result[:60], result[60:], atol=1e-13)


def test_effects_of_covariates_remain():
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.integers(20, 50, 200), rng.integers(40, 90, 200)]).astype(float)[:, None]
    sites = np.repeat([0, 1], 200)
    x = z * [0.1, -0.2, 0.3] + rng.normal(size=(400, 3)) + np.array([0.0, 4.0])[sites][:, None]
    with_age = combat(x, sites, z)
    assert np.polyfit(z[:, 0], with_age[:, 2], 1)[0] == pytest.approx(0.3, abs=0.02)
    assert (
        np.polyfit(z[:, 0], combat(x, sites)[:, 2], 1)[0] < 0.2
    )  # without the covariate, age is removed with the site


@pytest.mark.parametrize(
    ("prevalence", "shifted", "unshifted"),
    [((50, 50, 50, 50), 0.943, 0.943), ((20, 40, 60, 80), 0.871, 0.872), ((5, 35, 65, 95), 0.768, 0.769)],
)
def test_different_prevalence_of_the_sites_is_removed_with_their_shift(prevalence, shifted, unshifted):
    pooled, within, shifts_of = [], [], ([], [])
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sites = np.repeat(np.arange(4), 200)
        y = (np.arange(800) % 200 < 2 * np.array(prevalence)[sites]).astype(int)
        x = rng.normal(size=(800, 20)) + 0.5 * y[:, None]
        shift, scale = rng.normal(0, 0.5, (4, 20)), np.exp(rng.normal(0, 0.1, (4, 20)))
        for which, values in enumerate((x * scale[sites] + shift[sites], x)):
            score = combat(values, sites).sum(1)
            shifts_of[which].append(roc_auc_score(y, score))
            within += [roc_auc_score(y[sites == k], score[sites == k]) for k in range(4)]
        pooled.append(roc_auc_score(y, x.sum(1)))
    assert np.mean(pooled) == pytest.approx(0.943, abs=0.01)
    assert np.mean(within) == pytest.approx(0.943, abs=0.01)
    assert np.mean(shifts_of[0]) == pytest.approx(shifted, abs=0.015)
    assert np.mean(shifts_of[1]) == pytest.approx(unshifted, abs=0.015)


def test_rejects_dependent_and_constant_covariates():
    x, sites, z = cohort()
    with pytest.raises(DataError, match="z0, z1 are linearly dependent within the sites"):
        fitted(x, sites, np.column_stack([z[:, 0], 2 * z[:, 0] + sites]))
    with pytest.raises(DataError, match="z1 is constant within every site"):
        fitted(x, sites, np.column_stack([z[:, 0], 0.1 + sites]))


def test_rejects_columns_that_do_not_vary():
    x, sites, z = cohort()
    x[:, 1] = 0.1 + sites
    with pytest.raises(DataError, match="'x1' does not vary within the sites"):
        fitted(x, sites, z)
    x, sites, z = cohort()
    x[sites == 2, 1] = 0.1
    own = sites == 2
    with pytest.raises(DataError, match=r"Oslo: the column 'x1' is constant.*mean_only"):
        fitted(x, sites, z).estimate(x[own], z[own], "Oslo")
    with pytest.raises(DataError, match="Oslo: there is one row"):
        fitted(x, sites, z).estimate(x[:1], z[:1], "Oslo")
    assert fitted(x, sites, z, mean_only=True).estimate(x[:1], z[:1], "Oslo").delta == (1.0,) * 6


def test_few_rows_warn(capsys):
    x, sites, z = cohort()
    fitted(x, sites, z).estimate(x[:9], z[:9], "Oslo")
    assert "Oslo has 9 rows" in capsys.readouterr().err
    fitted(x, sites, z).estimate(x[:10], z[:10], "Oslo")
    assert not capsys.readouterr().err


def test_json_keeps_every_bit():
    x, sites, z = cohort()
    fit = fitted(x, sites, z)
    fit = fit.model_copy(update={"sites": {"Oslo": fit.estimate(x[:40], z[:40], "Oslo")}})
    assert Harmonization.model_validate_json(fit.model_dump_json()) == fit
