"""IFCA against a loop over the paper's formulas, and in its limits."""

import numpy as np
import pytest
import torch
from support.batch_loop import CLASSES, FEATURES, initial, local, loss, run, skewed
from support.tolerance import TRAINING, assert_close

import unskew
from unskew.errors import ConfigError, MethodConflictError
from unskew.methods.ifca import IFCA
from unskew.protocol.rules import ServerRule

EXACT = 1e-12
SEED = 4
slope = torch.func.grad(loss)


def first_models(groups, spread=0.5, start=None):
    start = initial() if start is None else start
    return list(IFCA(groups=groups, spread=spread).server_init(start, None)["models"])


def choices(fed, models, cohort):
    data = {k: (fed.clients[k].x.double(), fed.clients[k].y) for k in cohort}
    return {k: int(np.argmin([float(loss(model, *data[k])) for model in models])) for k in cohort}


def paper_round(fed, models, cohort, weights):
    """New models, and the choice of each client."""
    chosen, new = choices(fed, models, cohort), []
    for j, model in enumerate(models):
        members = [k for k in cohort if chosen[k] == j]
        total = sum(weights[k] for k in members)
        ends = [weights[k] / total * local(model, cohort[k], slope) for k in members]
        new.append(sum(ends) if ends else model)
    return new, chosen


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("groups", "blocks"), [(2, "false"), (3, "false"), (3, "true")])
def test_a_run_is_the_papers_loop(groups, blocks, participation, weights):
    """Whatever the order of the models."""
    fed = skewed()
    method = unskew.method(f"ifca:groups={groups},spread=2,blocks={blocks}")
    result, cohorts = run(method, participation, fed, client_weighting=weights)
    models, counts = first_models(groups, 2.0), [0] * groups
    count = {k: client.num_samples if weights == "samples" else 1 for k, client in enumerate(fed.clients)}
    seen = set()
    for cohort in cohorts[:4]:
        models, chosen = paper_round(fed, models, cohort, count)
        seen |= set(chosen.values())
        for j in chosen.values():
            counts[j] += 1
        order = sorted(range(groups), key=lambda j: -counts[j])
        models, counts = [models[j] for j in order], [counts[j] for j in order]
    assert len(seen) > 1
    assert float((result.vector - models[0]).abs().max()) < EXACT
    assert result.history[-1]["ifca_chosen"] == counts


def test_one_group_is_fedavg_with_uniform_weights_bit_for_bit():
    assert torch.equal(run("ifca:groups=1")[0].vector, run("fedavg", client_weighting="uniform")[0].vector)


@pytest.mark.parametrize(
    "order", ["ifca:blocks=true,groups=1+smooth:beta=0.5", "smooth:beta=0.5+ifca:blocks=true,groups=1"]
)
def test_sums_contain_the_update_that_other_rules_changed(order):
    assert_close(run(order)[0].vector, run("smooth:beta=0.5", client_weighting="uniform")[0].vector, TRAINING)


class Received(unskew.ClientRule):
    """Records the model that ``begin`` finds, and the one that training starts from."""

    name, summary, paper = "received_model", "for tests", "none"

    def __init__(self):
        self.begun, self.started, self.received = [], [], []

    def begin(self, ctx):
        self.begun.append(ctx.v_global)
        self.received.append(ctx.last_received())
        return {}

    def gradient(self, grad_fn, ctx, carry):
        self.started.append(ctx.v_global)
        return grad_fn


@pytest.mark.parametrize("before", [True, False])
def test_other_rules_begin_with_the_chosen_model_in_any_order(before):
    """The teacher of FedCOG, for example, is the model that training starts from."""
    rule = Received()
    run([rule, "ifca:spread=2"] if before else ["ifca:spread=2", rule], rounds=2)
    assert len(rule.begun) >= len(rule.started) > 0
    assert all(torch.equal(v, start) for v, start in zip(rule.begun, rule.started, strict=False))
    assert any(not torch.equal(v, start) for v, start in zip(rule.received, rule.started, strict=False))


def opposite_labels():
    """Two groups of clients with the same inputs and labels that contradict each other."""
    draws = np.random.default_rng(0)
    clients = []
    for k in range(6):
        x = draws.normal(size=(40, FEATURES))
        z = x[:, :CLASSES] if k % 2 == 0 else -x[:, :CLASSES]
        clients.append((x, z.argmax(1)))
    return unskew.Federation.from_arrays(clients, test=clients[0], classes=CLASSES, holdout=0.25)


class Members(ServerRule):
    """FedAvg over some clients only."""

    name, summary, paper = "members", "for tests", "none"
    needs = ("individual",)

    def __init__(self, members):
        self.members = members

    def step(self, state, updates):
        total = torch.zeros_like(state["v"])
        for update in updates:
            if update.client in self.members:
                total += update.delta
        return {"v": state["v"] + total / len(self.members)}


def network():
    """A network that the two groups of ``opposite_labels`` choose rightly from the first round on."""
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)).double()


def test_groups_that_differ_are_trained_as_two_separate_runs():
    """With stable choices, the first model is that of FedAvg over its group, bit for bit."""
    fed, chosen = opposite_labels(), []

    class Watch(IFCA):
        name = "watch"

        def server_update(self, state, updates):
            chosen.append({update.client: int(update.upload["watch"]["group"]) for update in updates})
            return super().server_update(state, updates)

    options = {"rounds": 8, "batch_size": 30, "local_epochs": None, "local_steps": 3, "precision": "fp64"}
    options |= {"lr": 0.2, "engine": "inline"}
    result = unskew.run(fed, model=network(), method=Watch(), **options)
    for choice in chosen:
        assert len({choice[k] for k in (0, 2, 4)}) == len({choice[k] for k in (1, 3, 5)}) == 1
        assert choice[0] != choice[1]
    first = [k for k in range(6) if chosen[-1][k] == 0]
    start = network()
    models = first_models(2, start=torch.nn.utils.parameters_to_vector(start.parameters()).detach())
    torch.nn.utils.vector_to_parameters(models[chosen[0][first[0]]], start.parameters())
    alone = unskew.run(fed, model=start, method=Members(first), client_weighting="uniform", **options)
    assert torch.equal(result.vector, alone.vector)
    assert result.summary["personal_accuracy_mean"] > result.summary["client_accuracy_mean"] + 0.1


def test_the_choices_do_not_depend_on_the_order_of_the_models():
    fed, rule = skewed(), IFCA(groups=3)
    models = first_models(3)
    chosen = choices(fed, models, range(4))
    permuted = choices(fed, [models[j] for j in (2, 0, 1)], range(4))
    assert {k: (2, 0, 1)[j] for k, j in permuted.items()} == chosen
    assert rule.server_init(initial(), None)["models"].shape == (3, len(initial()))


def test_a_client_is_served_by_the_final_model_that_it_would_choose():
    fed = opposite_labels()
    result, cohorts = run("ifca", 0.34, fed, rounds=3)
    models, counts = first_models(2), [0, 0]
    for cohort in cohorts:
        models, chosen = paper_round(fed, models, cohort, dict.fromkeys(range(6), 1))
        for j in chosen.values():
            counts[j] += 1
    expected = []
    for k, j in choices(fed, models, range(6)).items():
        x, y = fed.clients[k].x_test.double(), fed.clients[k].y_test
        weights = CLASSES * FEATURES
        z = x @ models[j][:weights].view(CLASSES, FEATURES).T + models[j][weights:]
        expected.append(float((z.argmax(1) == y).double().mean()))
    assert result.summary["personal_accuracy_mean"] == pytest.approx(np.mean(expected), abs=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bytes_are_those_of_the_formula(groups):
    """All models down, one model and one number up."""
    summary = run(f"ifca:groups={groups}", 0.5)[0].summary
    assert summary["bytes_down"] == 4 * 2 * 24 * 8 * groups
    assert summary["bytes_up"] == 4 * 2 * 25 * 8
    assert run(f"ifca:groups={groups},blocks=true", 0.5)[0].summary["bytes_up"] == 4 * 2 * (24 + 2) * groups * 8


def test_with_blocks_sums_suffice():
    masked = run("ifca:blocks=true", secure_aggregation="required")[0].vector
    assert torch.equal(masked, run("ifca:blocks=true", secure_aggregation="off")[0].vector)
    assert float((masked - run("ifca")[0].vector).abs().max()) < EXACT
    with pytest.raises(MethodConflictError, match="encodes one update"):
        unskew.method("ifca:blocks=true+topk")


@pytest.mark.parametrize(
    "other", ["fedrep", "fedbn", "ditto", "ft", "scaffold", "fedavgm", "median", "dp:noise=1", "dpsgd:noise=1"]
)
def test_what_needs_one_model_is_refused(other):
    with pytest.raises(MethodConflictError):
        unskew.method(f"ifca+{other}")


def test_delays_and_secure_aggregation_are_refused():
    with pytest.raises(ConfigError, match=r"network\.delay"):
        run("ifca", network={"delay": "fixed:1"})
    with pytest.raises(ConfigError, match="reads the update of each individual client"):
        run("ifca", secure_aggregation="required")
