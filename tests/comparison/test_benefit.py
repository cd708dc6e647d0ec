"""Whether federated training helps: client by client against training alone and a constant, by plain NumPy loops."""

import json

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, log_loss
from support.html_page import Page
from support.running import TINY, call

import unskew
from unskew.comparison.benefit import assess_benefit
from unskew.comparison.benefit_text import benefit_sentences, benefit_title
from unskew.comparison.significance import difference, holm
from unskew.tasks.intervals import wilson_interval

pytestmark = pytest.mark.usefixtures("undrawn")
QUICK = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "lr": 0.1, "engine": "inline"}


def row(client, hits, n, name=None, **more):
    low, high = wilson_interval(hits, n)
    names = {} if name is None else {"name": name}
    fields = {"accuracy": hits / n, "accuracy_low": low, "accuracy_high": high, "num_held_out": n}
    return {"client": client, "samples": 9 * n, **names, **fields, "loss": 1.0, **more}


def summary(seed, accuracy, partition="p", **more):
    return {"seed": seed, "partition_hash": partition, "accuracy": accuracy, "objective": "accuracy", **more}


N = 60
HITS = {  # of each client, in two seeds
    "fedavg": [[50, 52, 44, 30, 58, 40], [52, 50, 46, 30, 60, 38]],
    "local": [[20, 30, 44, 33, 59, 52], [24, 28, 46, 33, 57, 56]],
}


@pytest.fixture
def benefit():
    summaries = {"prox": [summary(0, 0.7), summary(1, 0.7)], "fedavg": [summary(0, 0.8), summary(1, 0.9)]}
    summaries |= {"local": [summary(0, None), summary(1, None)]}
    clients = {
        method: [[row(k, hits, N, f"site {k}", constant_accuracy=0.5) for k, hits in enumerate(seed)] for seed in of]
        for method, of in HITS.items()
    }
    return assess_benefit(summaries, clients | {"prox": clients["local"]})


def test_the_differences_to_training_alone_are_those_of_a_plain_loop(benefit):
    assert (benefit.labels["federated"], benefit.candidates["federated"]) == ("fedavg", 2)
    shares = {method: np.mean(hits, 0) / N for method, hits in HITS.items()}
    minus = shares["fedavg"] - shares["local"]
    mean = benefit.over_clients("federated", "local")
    assert mean.value == pytest.approx(minus.mean())
    assert mean.interval == pytest.approx(stats.t.interval(0.95, 5, minus.mean(), stats.sem(minus)), abs=1e-6)
    ends = {m: np.array([[wilson_interval(h, N) for h in seed] for seed in of]).mean(0) for m, of in HITS.items()}
    p = []
    for a, b, low, high in zip(shares["fedavg"], shares["local"], ends["fedavg"], ends["local"], strict=True):
        wide = np.hypot(a - low[0], high[1] - b) if a > b else np.hypot(low[1] - a, b - high[0])
        p.append(2 * stats.norm.sf(abs(a - b) / (wide / stats.norm.ppf(0.975))))
    assert [pair.p for pair in benefit.at_clients("federated", "local")] == pytest.approx(holm(p))
    gain = sum(q <= 0.05 and d > 0 for q, d in zip(holm(p), minus, strict=True))
    loss = sum(q <= 0.05 and d < 0 for q, d in zip(holm(p), minus, strict=True))
    assert (gain, loss) == (2, 1)
    first = benefit.overview()[0]
    assert [first[name] for name in ("gain", "tie", "loss")] == [2, 3, 1]
    assert (first["minus_local"], first["minus_local_low"]) == (mean.value, mean.interval[0])
    sentence = benefit_sentences(benefit)[0]
    assert sentence.startswith(
        "It is undecided whether federated training helps: fedavg, the best of 2 methods, is ahead"
    )
    assert (
        "at 3 of 6 clients (2 significantly) and behind at 2 (1 significantly); on average, the accuracy is 9.4 points higher"
        in sentence
    )
    assert sentence.endswith("paired over 6 clients).")
    rows = benefit.rows()
    assert [entry["client"] for entry in rows] == [f"site {k}" for k in np.argsort(minus)]
    assert [entry["federated_minus_local_p"] for entry in rows] == pytest.approx(
        [holm(p)[k] for k in np.argsort(minus)]
    )


def test_a_method_compared_with_itself_ties_at_all_clients():
    summaries = {"fedavg": [summary(0, 0.5)], "local": [summary(0, None)]}
    rows = [row(k, hits, 50) for k, hits in enumerate((3, 50, 0, 25, 44))]
    found = assess_benefit(summaries, {"fedavg": [rows], "local": [rows]})
    assert {pair.decision(False) for pair in found.at_clients("federated", "local")} == {"tie"}
    assert found.over_clients("federated", "local").value == 0
    assert "ahead of training alone at 0 of 5 clients (0 significantly) and behind at 0" in benefit_sentences(found)[0]


@pytest.mark.parametrize(
    ("sign", "answer"), [(1, "Federated training helps"), (-1, "Federated training does not help")]
)
def test_the_answer_is_yes_or_no_if_the_interval_excludes_zero(sign, answer):
    rows = {name: [row(k, 50 + way * sign * (20 + k), 100) for k in range(5)] for name, way in (("a", 1), ("local", 0))}
    found = assess_benefit(
        {"a": [summary(0, 0.5)], "local": [summary(0, None)]}, {name: [own] for name, own in rows.items()}
    )
    assert benefit_sentences(found)[0].startswith(f"{answer}: a is ahead")


def test_lower_is_better_for_a_loss():
    own = [{"client": k, "num_held_out": 20, "loss": 0.2 + k / 100, "accuracy": 0} for k in range(4)]
    alone = [{**entry, "loss": 0.6} for entry in own]
    summaries = {"a": [summary(0, 0, objective="loss", loss=1)], "local": [summary(0, 0, objective="loss")]}
    found = assess_benefit(summaries, {"a": [own], "local": [alone]})
    text = benefit_sentences(found)[0]
    assert text.startswith("Federated training helps: a is ahead of training alone at 4 of 4 clients")
    assert "on average, the loss is 0.3850 lower, and lower is better (95 % interval" in text


def test_clients_of_seeds_with_other_partitions_are_other_clients():
    rows = [row(k, 30 + 5 * k, 60) for k in range(4)]
    lower = [row(k, 20 + 3 * k, 60) for k in range(4)]
    found = {}
    for hashes in ("pp", "pq"):
        summaries = {name: [summary(s, 0.5, p) for s, p in enumerate(hashes)] for name in ("a", "local")}
        found[hashes] = assess_benefit(summaries, {"a": [rows, rows], "local": [lower, lower]})
    same, other = found.values()
    assert (same.same_clients, other.same_clients) == (True, False)
    assert [client.label for client in other.clients][::4] == ["client 0 of seed 0", "client 0 of seed 1"]
    means = [each.over_clients("federated", "local") for each in (same, other)]
    assert (means[0].interval, means[0].clients) == (pytest.approx(means[1].interval), means[1].clients / 2)


def test_undefined_and_small_clients_are_counted_and_named_and_attackers_and_unseen_clients_left_out():
    rows = [row(0, 40, 50, "A"), row(1, 3, 4, "B"), row(2, 5, 50, "C"), row(3, 9, 50, "D"), row(4, 9, 50, "E")]
    rows[2]["accuracy"] = None
    rows[3]["attacker"] = True
    rows[4]["unseen"] = True
    found = assess_benefit({"a": [summary(0, 0.5)], "local": [summary(0, None)]}, {"a": [rows], "local": [rows]})
    assert [client.label for client in found.clients] == ["A", "B"]
    assert [pair.decision(False) for pair in found.at_clients("federated", "local")] == ["tie", "untested"]
    sentences = " ".join(benefit_sentences(found))
    assert "Accuracy is undefined at 1 of 3 clients, which are left out: C." in sentences
    assert "1 of 3 clients have fewer than 10 held-out samples" in sentences
    assert "It is not tested, but part of the means, because fewer than two other clients are left: B." in sentences
    mean = found.over_clients("federated")
    assert (mean.clients, mean.value) == (2, pytest.approx((40 / 50 + 3 / 4) / 2))


@pytest.mark.parametrize(("hits", "words"), [(50, "better"), (32, "not clearly better"), (29, "no better")])
def test_a_model_is_compared_with_a_constant(hits, words):
    low, high = wilson_interval(30, 60)
    ends = {"constant_accuracy": 0.5, "constant_accuracy_low": low, "constant_accuracy_high": high}
    rows = [row(k, hits + 3 * (k - 1), 60, **ends) for k in range(3)]
    (_, text) = benefit_sentences(assess_benefit({"a": [summary(0, 0.5)]}, {"a": [rows]}))
    assert text.startswith(f"a is {words} than a constant (each client's most frequent class, 50.0 %): ahead of it at")


def test_clients_that_hold_nothing_out_are_not_called_small():
    found = assess_benefit({"a": [summary(0, 0.5)]}, {"a": [[{**row(k, 1, 9), "num_held_out": 0} for k in (0, 1)]]})
    assert found.small == []


def test_few_events_make_a_client_small_for_metrics_of_a_class_only():
    def rows(name):
        counts = [{"0": 95, "1": 5}, {"0": 20, "1": 80}]
        return [
            {**row(k, 50, 100), name: 0.5, "class_counts": {"0": 1, "1": 1}, "support": count}
            for k, count in enumerate(counts)
        ]

    for name, small, events in (("auroc", ["client 0"], [5, 80]), ("accuracy", [], [5, 80])):
        found = assess_benefit({"a": [summary(0, 0.5, objective=name, auroc=0.5)]}, {"a": [rows(name)]})
        assert found.small == small
        assert [client.events for client in found.clients] == events


@pytest.mark.parametrize("support", [[20, 40], [20, 30, 10]])
def test_events_are_shown_for_two_classes_only(support):
    counts = {str(c): n for c, n in enumerate(support)}
    rows = [[row(k, 30, 60, support=counts) for k in range(3)] for _ in range(2)]
    summaries = {name: [summary(0, 0.5), summary(1, 0.5)] for name in ("fedavg", "local")}
    found = assess_benefit(summaries, dict.fromkeys(summaries, rows))
    if len(support) == 2:
        assert [shown["events"] for shown in found.rows()] == [20] * 3
        assert benefit_title(found).endswith("; n and events are means over seeds")
    else:
        assert not any("events" in shown for shown in found.rows())
        assert benefit_title(found).endswith("; n is a mean over seeds")


def test_without_local_the_sentence_says_what_to_add_and_without_clients_there_is_none():
    assert assess_benefit({"a": [summary(0, 0.5)]}, {"a": [[]]}) is None
    found = assess_benefit({"a": [summary(0, 0.5)]}, {"a": [[row(0, 1, 20)]]})
    assert "training alone (local) was not compared" in benefit_sentences(found)[0]


# ---- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores():
    """Sales that differ by store only, so that one model for all is no better than a constant."""
    draws = np.random.default_rng(3)
    levels = [0.0, 100.0, 40.0, -60.0]
    return [(draws.normal(size=(60, 2)).astype("float32"), level + draws.normal(size=60)) for level in levels]


def test_the_constant_of_a_regression_is_the_mean_of_each_client_and_the_verdict_says_so(stores, tmp_path, monkeypatch):
    for module in ("page", "report"):
        monkeypatch.setattr(f"unskew.reporting.{module}.plotly_script", lambda: "var drawn = 1;")
    test = tuple(np.concatenate([store[part][:20] for store in stores]) for part in (0, 1))
    fed = unskew.Federation.from_arrays(stores, test=test, task="regression", holdout=0.25, client_names=list("ABCD"))
    result = unskew.compare(
        fed, methods=["fedavg", "ditto"], seeds=2, out=tmp_path / "c", references=True, model="logistic", **QUICK
    )
    std, mean = fed.objective.std[0], fed.objective.mean[0]
    rows = {entry["client"]: entry for entry in result.benefit.rows()}
    for client in fed.clients:
        y, held_out = (part.numpy()[:, 0] * std + mean for part in (client.y, client.y_test))
        wanted = 1 - np.mean((held_out - y.mean()) ** 2) / std**2
        assert rows["ABCD"[client.id]]["constant"] == pytest.approx(wanted, rel=1e-6)
        assert rows["ABCD"[client.id]]["n"] == len(held_out)
    answers = result.answers()
    assert any(text.startswith("fedavg is no better than a constant (each client's own mean, ") for text in answers)
    assert answers[0].startswith("Federated training does not help: fedavg, the best of 2 methods, is ahead")
    constant = 1 - np.sum((test[1] - mean) ** 2) / np.sum((test[1] - test[1].mean()) ** 2)
    summaries = [entry["constant_r2"] for entry in result.summaries["fedavg"]]
    assert summaries == pytest.approx([constant] * 2, abs=1e-6)
    page = Page(unskew.report(result).read_text())
    headings = ("Result", "Does it help?", "Comparison")
    assert [text for text in page.texts if text in headings] == list(headings)
    first = page.texts[page.texts.index("Result") + 1 :]
    assert [text for text in first if text.strip()][: len(answers) - 1] == answers[:-1]
    assert answers[-1].startswith("Test set: fedavg scores ")
    assert "sampling error of 80 test samples); no better than a constant, which scores" in answers[-1]
    best = next(text for text in page.texts if text.startswith("fedavg and ditto are equal in every seed: "))
    assert "no better than a constant, which scores" in best
    assert "sampling error of 80 test samples" in best
    assert page.column("benefit of clients", "constant") == [100 * entry["constant"] for entry in result.benefit.rows()]
    assert page.column("benefit", "r2 within clients")[-1] == 0
    errors = [(1 - rows[name]["federated"], 1 - rows[name]["constant"]) for name in rows]
    within = 1 - sum(own for own, _ in errors) / sum(constant for _, constant in errors)
    assert page.column("benefit", "r2 within clients")[0] == pytest.approx(100 * within)
    html = result._repr_html_()
    assert answers[0].split(":")[0] in html
    assert "client_r2_mean" in html
    assert answers[0] in repr(result)


@pytest.mark.parametrize("holdout", [0.3, 0.0])
def test_the_constant_of_a_classifier_is_the_share_of_its_classes(holdout):
    draws = np.random.default_rng(0)
    clients = [(draws.normal(size=(40, 3)).astype("float32"), (draws.random(40) < p).astype(int)) for p in (0.2, 0.4)]
    test = clients[0][0], (draws.random(40) < 0.3).astype(int)
    fed = unskew.Federation.from_arrays(clients, test=test, holdout=holdout)
    metrics = ["auroc", "auprc"] if holdout else []
    result = unskew.run(fed, model="logistic", metrics=metrics, **QUICK)
    for found, client in zip(result.clients, fed.clients, strict=True):
        share, y = client.y.double().mean().item(), client.y_test.numpy()
        if not holdout:  # the test set, weighted by the client's classes
            q, total = np.array([1 - share, share]), np.bincount(test[1])
            right = q * total * (np.arange(2) == int(share > 0.5))
            assert found["constant_accuracy"] == pytest.approx(right.sum() / (q * total).sum())
            continue
        assert found["constant_accuracy"] == np.mean(y == int(share > 0.5))
        assert found["constant_auroc"] == 0.5
        assert found["constant_auprc"] == pytest.approx(average_precision_score(y, np.full(len(y), share)))
        assert found["constant_loss"] == pytest.approx(log_loss(y, np.full(len(y), share), labels=[0, 1]), rel=1e-5)
        assert found["support"] == {str(c): n for c, n in enumerate(np.bincount(y)) if n}
        assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx(
            wilson_interval(round(found["accuracy"] * len(y)), len(y))
        )
    assert result.summary["constant_accuracy"] == np.mean(test[1] == 0)
    low, high = wilson_interval(round(result.summary["accuracy"] * 40), 40)
    assert (result.summary["accuracy_low"], result.summary["accuracy_high"]) == pytest.approx((low, high))


def test_the_interval_of_a_clients_r2_is_that_of_a_mean_over_samples(stores):
    fed = unskew.Federation.from_arrays(stores, test=stores[0], task="regression", holdout=0.25)
    result = unskew.run(fed, model="logistic", **QUICK)
    for found, client in zip(result.clients, fed.clients, strict=True):
        predicted = result.model(client.x_test).detach().double()
        each = 1 - ((predicted - client.y_test).numpy()[:, 0] ** 2)
        wanted = stats.t.interval(0.95, len(each) - 1, each.mean(), stats.sem(each))
        assert (found["r2_low"], found["r2_high"]) == pytest.approx(wanted, rel=1e-4)


def cost(y_true, scores):
    if np.ptp(scores[:, 1]) == 0:
        raise ValueError("constant scores")
    return float(scores[:, 1].mean())


def test_custom_metrics_and_language_models_have_no_constant():
    result = unskew.run(clients=3, max_train_samples=90, model="logistic", objective=cost, **QUICK)
    assert "constant_cost" not in result.summary
    assert all("constant_cost" not in found and "constant_accuracy" in found for found in result.clients)


def test_the_terminal_answers_first_and_json_has_the_clients(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = ("compare", "fedavg", *TINY, "--seeds", "0", "--rounds", 2, "--references", "--out", "c")
    lines = call(capsys, *args).out.splitlines()
    lines = [line for line in lines if line.strip() and "━" not in line]
    assert lines[0].startswith(("It is undecided whether federated", "Federated training"))
    assert sum("clients' held-out data" in line for line in lines) == 1
    found = call(capsys, *args, "--resume", "--json").json()
    stored = [json.loads(line) for line in (tmp_path / "c/fedavg/seed-0/clients.jsonl").read_text().splitlines()]
    assert {entry["client"]: entry["federated"] for entry in found["clients"]} == {
        f"client {entry['client']}": pytest.approx(entry["accuracy"]) for entry in stored
    }
    assert found["answers"][0].startswith(lines[0][:40])


def test_estimates_of_clients_without_intervals_are_compared_but_not_tested():
    rows = [{"client": k, "num_held_out": 20, "accuracy": 0.5, "macro_f1": k / 10} for k in range(3)]
    worse = [{**entry, "macro_f1": 0.0} for entry in rows]
    summaries = {name: [summary(0, 0.5, objective="macro_f1", macro_f1=0.5)] for name in ("a", "local")}
    found = assess_benefit(summaries, {"a": [rows], "local": [worse]})
    pairs = found.at_clients("federated", "local")
    assert [pair.decision(False) for pair in pairs] == ["untested"] * 3
    assert difference(found.clients[2].estimate("federated"), found.clients[2].estimate("local")).value == 0.2
    sentence = benefit_sentences(found)[0]
    assert "at 2 of 3 clients and behind at 0 (single clients are not tested)" in sentence
    assert "significantly" not in sentence


def test_small_clients_are_named_and_left_out_of_the_means():
    sizes, hits = (40, 40, 40, 3), {"a": (20, 24, 28, 0), "local": (16, 20, 24, 3)}
    clients = {
        name: [[row(k, h, n) for k, (h, n) in enumerate(zip(of, sizes, strict=True))]] for name, of in hits.items()
    }
    benefit = assess_benefit({"a": [summary(0, 0.5)], "local": [summary(0, None)]}, clients)
    assert benefit.over_clients("federated", "local").value == pytest.approx(0.1)
    text = " ".join(benefit_sentences(benefit))
    assert "the accuracy is 10.0 points higher" in text
    assert "1 of 4 clients have fewer than 10 held-out samples" in text
    assert "neither tested nor part of the means: client 3" in text


def test_a_constant_is_not_corrected_for_class_weights(tmp_path):
    draws = np.random.default_rng(0)
    pairs = [(draws.normal(size=(100, 3)).astype("float32"), (draws.random(100) < 0.15).astype(int)) for _ in range(3)]
    fed = unskew.Federation.from_arrays(pairs[:2], test=pairs[2])
    options = {
        "model": "logistic",
        "objective": "brier",
        "metrics": ["brier", "observed_expected"],
        "class_weights": "balanced",
        **QUICK,
    }
    result = unskew.run(fed, out=tmp_path / "r", **options)
    shares = np.concatenate([client.y for client in fed.clients]).mean()
    y = pairs[2][1]
    assert result.summary["constant_accuracy"] == pytest.approx(1 - y.mean())
    assert result.summary["constant_brier"] == pytest.approx(np.mean((y - shares) ** 2), rel=1e-5)
    own = json.loads((tmp_path / "r" / "clients.jsonl").read_text().splitlines()[0])
    held_out, share = fed.clients[0].y_test.numpy(), float(fed.clients[0].y.double().mean())
    assert own["constant_brier"] == pytest.approx(np.mean((held_out - share) ** 2), rel=1e-5)
    assert own["constant_observed_expected"] == pytest.approx(held_out.mean() / share, rel=1e-5)


def test_survival_has_no_words_of_classes(tmp_path):
    """The constant does not order rows, so that its concordance is 0.5 at each client and has no test."""
    draws = np.random.default_rng(0)

    def client(n=120):
        x = draws.normal(size=(n, 2)).astype("float32")
        died, left = draws.exponential(300 * np.exp(-x[:, 0])), draws.uniform(0, 1000, n)
        return x, np.stack([np.minimum(died, left), died <= left], 1)

    fed = unskew.Federation.from_arrays(
        [client() for _ in range(3)], test=client(), task="survival", options={"until": 1000}
    )
    result = unskew.compare(
        fed, methods=["fedavg"], seeds=1, out=tmp_path / "c", references=True, model="proportional", **QUICK
    )
    overview = {entry["model"]: entry for entry in result.benefit.overview()}
    assert overview["constant"]["method"] == "each client's own hazards"
    assert overview["constant"]["mean"] == 0.5
    assert {overview["constant"][name] for name in ("gain", "tie", "loss")} == {None}
    assert sum(overview["federated"][name] for name in ("gain", "tie", "loss")) == 3
    text = unskew.report(result).read_text()
    assert "Events are held-out samples whose event was observed." in text
    assert "class shares" not in text
    assert "rarest" not in text


def test_a_method_with_a_lost_seed_is_chosen_only_if_no_other_has_all_seeds():
    summaries = {"a": [summary(0, None), summary(1, 0.9)], "b": [summary(0, 0.5), summary(1, 0.6)]}
    clients = {name: [[row(k, 30 + k, N) for k in range(3)] for _ in range(2)] for name in summaries}
    found = assess_benefit(summaries, clients)
    assert (found.labels["federated"], found.candidates["federated"]) == ("b", 2)
    assert assess_benefit({"a": summaries["a"]}, clients).labels["federated"] == "a"


def test_the_r2_within_clients_is_of_the_clients_in_the_mean():
    """Two small clients, far from the others, are left out of the means and of the sum of squared errors."""
    fields = {"seed": 0, "partition_hash": "p", "objective": "r2", "r2": 0.5}
    values = [(0.8, 0.5, 40), (0.6, 0.4, 50), (-20.0, -1.0, 2), (-9.0, -3.0, 3)]
    rows = [
        {"client": k, "name": f"s{k}", "num_held_out": n, "loss": 1.0, "r2": own, "constant_r2": constant}
        for k, (own, constant, n) in enumerate(values)
    ]
    first = assess_benefit({"fedavg": [fields]}, {"fedavg": [rows]}).overview()[0]
    assert (first["clients"], first["mean"]) == (2, pytest.approx(0.7))
    assert first["r2_within_clients"] == pytest.approx(1 - (0.2 + 0.4) / (0.5 + 0.6))
