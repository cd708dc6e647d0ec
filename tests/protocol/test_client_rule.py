"""Rules of one's own: the same on every engine, and what they say and return is checked where it enters."""

import pytest
import torch
from support.federations import blobs

import unskew
from unskew.errors import ConfigError
from unskew.testing import assert_engines_agree


def train(rule, engine="inline", **options):
    torch.manual_seed(0)
    filled = {"rounds": 3, "lr": 0.05, "batch_size": 8, "local_epochs": 1, "precision": "fp64", **options}
    return unskew.run(blobs([12, 20, 9]), model="logistic", method=rule, engine=engine, workers=2, **filled)


class Own(unskew.ClientRule):
    name, summary, paper = "own", "for tests", "none"


class ErrorFeedback(Own):
    """The largest entries are sent, the rest is added to the next update."""

    def transform_update(self, ctx, carry, delta):
        whole = delta + ctx.state.get("rest", torch.zeros_like(delta))
        sent = torch.where(whole.abs() >= whole.abs().topk(20).values[-1], whole, 0.0)
        ctx.state["rest"] = whole - sent
        ctx.upload["count"] = (sent != 0).sum().to(delta.dtype)
        return sent


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_what_is_sent_may_write_what_it_keeps_and_uploads_on_every_engine(engine):
    reference = train(ErrorFeedback())
    other = train(ErrorFeedback(), engine)
    assert_engines_agree(other.vector, reference.vector)
    assert other.summary["bytes_up"] == reference.summary["bytes_up"] == train("fedavg").summary["bytes_up"] + 3 * 3 * 8
    forgetful = type("Forgetful", (ErrorFeedback,), {"end": lambda self, ctx, carry, v: ctx.state.clear()})
    assert not torch.allclose(train(forgetful()).vector, reference.vector)


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
@pytest.mark.parametrize("way", ["begin", "gradient"])
def test_writing_too_early_is_refused_on_every_engine(engine, way):
    def begin(self, ctx):
        ctx.state["x"] = ctx.v_global
        return {}

    def gradient(self, grad_fn, ctx, carry):
        ctx.upload.update(x=ctx.v_global)
        return grad_fn

    hasty = type("Hasty", (Own,), {way: {"begin": begin, "gradient": gradient}[way]})
    with pytest.raises(ConfigError, match="before the last step"):
        train(hasty(), engine)


def with_attributes(base=Own, **attributes):
    return type("Declared", (base,), attributes)()


class Server(unskew.ServerRule):
    name, summary, paper = "server", "for tests", "none"

    def step(self, state, updates):
        return {"v": state["v"] + updates.aggregate.delta}


class Part(unskew.SyncRule):
    name, summary, paper = "part", "for tests", "none"

    def exchanged_slices(self, state, round, client, last, spec):
        return self.pieces, (slice(0, spec.size),)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (with_attributes(name="a/b"), "needs a name of letters"),
        (with_attributes(name=""), "needs a name of letters"),
        (with_attributes(name="fedprox"), "Declared has the name 'fedprox' of a built-in method"),
        (with_attributes(loss=lambda self, loss_fn, ctx, carry: None), "loss must return a function .* not None"),
        (with_attributes(gradient=lambda self, grad_fn, ctx, carry: 1), "gradient must return a function .* not 1"),
        (with_attributes(gradient=lambda self, *_: lambda v, batch: 1.0), r"shape \(219,\), not 1.0"),
        (with_attributes(gradient=lambda self, *_: lambda v, batch: v.sum()), r"shape \(219,\), not one of shape \(\)"),
        (with_attributes(loss=lambda self, *_: lambda v, batch: 1.0), "a tensor with one number, not 1.0"),
        (with_attributes(loss=lambda self, *_: lambda v, batch: v), r"one number, not one of shape \(219,\)"),
        (with_attributes(needs="individual"), r"such as needs = \('individual',\)"),
        (with_attributes(needs=("indvidual",)), "Did you mean 'individual'"),
        (with_attributes(weights="sample"), "weights must be 'samples'"),
        (with_attributes(Server, steps_without="update"), "steps_without must be"),
        (with_attributes(unskew.ServerRule, name="idle"), "must define the method 'step'"),
        (with_attributes(unskew.SyncRule, name="still"), "must define the method 'exchanged_slices'"),
        (with_attributes(Server, updates_per_step=0), "a positive integer number of updates"),
        (with_attributes(Server, step=lambda self, state, updates: {}), "with the model 'v'"),
        (
            with_attributes(Server, step=lambda self, state, updates: {"v": state["v"].float()}),
            "there is torch.float32",
        ),
        (
            with_attributes(Server, step=lambda self, state, updates: {"v": state["v"][:7]}),
            r"server.step must .* \(219,\); there is torch.float64 \(7,\)",
        ),
        (
            with_attributes(Server, step=lambda self, state, updates: {"v": state["v"], "b": state["v"]}),
            r"server.step must return .* statistics 'b'",
        ),
        (with_attributes(Server, updates_per_step="2"), "a positive integer number of updates"),
        (
            with_attributes(Server, step=lambda self, state, updates: {"v": state["v"], "evaluated": state["v"][:3]}),
            r"server.step must return .* the evaluated model 'evaluated', .* \(219,\)",
        ),
        (
            with_attributes(has_personal_model=True, end=lambda self, ctx, carry, v: ctx.state.update(personal=v[:3])),
            r"own\.end writes ctx\.state\['personal'\], .* \(219,\)",
        ),
        (
            with_attributes(
                has_personal_model=True, end=lambda self, ctx, carry, v: ctx.state.update(personal_buffers=v)
            ),
            r"own\.end writes ctx\.state\['personal_buffers'\], .* buffers of a personal model \(0,\)",
        ),
        (
            with_attributes(end=lambda self, ctx, carry, v: ctx.state.update(personal=v)),
            "rules with has_personal_model = True",
        ),
        (
            with_attributes(Server, init=lambda self, v, facts: {"v": v[:7]}),
            r"server.init must .* \(219,\); there is torch.float64 \(7,\)",
        ),
        (
            with_attributes(Server, metrics=lambda self, state, round, spec: {"accuracy": 1.0}),
            r"metrics gives 'accuracy', which every",
        ),
        (
            with_attributes(Server, metrics=lambda self, state, round, spec: [1.0]),
            r"server.metrics must return a dictionary of metrics.*\[1.0\]",
        ),
        (with_attributes(transform_update=lambda self, ctx, carry, delta: delta[:3]), r"not torch.float64 \(3,\)"),
        (with_attributes(transform_update=lambda self, ctx, carry, delta: delta.float()), "not torch.float32"),
        (with_attributes(Part, pieces=(slice(0, 9), slice(5, 20))), "without overlap"),
        (with_attributes(Part, pieces=(slice(9, 20), slice(0, 5))), "in ascending order"),
        (with_attributes(Part, pieces=(slice(0, 10**6),)), "of the 219 parameters"),
        (with_attributes(Part, pieces=(slice(None, 20),)), "with start and stop"),
        (with_attributes(Part, pieces=(slice(0, 20, 2),)), "without a step"),
    ],
)
def test_what_a_rule_says_and_returns_is_checked(rule, words):
    with pytest.raises(ConfigError, match=words):
        train(rule)


@pytest.mark.parametrize(("told", "count"), [(None, 0), ("be careful", 1), (["one", "two"], 2), ((), 0)])
def test_a_check_may_return_a_sentence_several_or_nothing(told, count):
    rule = with_attributes(check=lambda self, run: told)
    if count:
        with pytest.warns(UserWarning) as warned:  # noqa: PT030
            train(rule)
        assert len(warned) == count
    else:
        train(rule)


def test_a_hook_that_is_nearly_called_like_one_is_told():
    rule = with_attributes(los=lambda self, loss_fn, ctx, carry: loss_fn, helper=lambda self: 1)
    with pytest.warns(UserWarning, match="did you mean 'loss'") as warned:
        train(rule)
    assert len(warned) == 1


class Deals(unskew.DataRule):
    name, summary, paper = "deals", "for tests", "none"


@pytest.mark.parametrize(
    ("base", "hook", "value"),
    [
        *(
            (Own, hook, value)
            for hook in ("server_init", "download", "server_update", "client_info", "begin")
            for value in (None, [1])
        ),
        (Own, "server_init", {"a": 1}),
        (Own, "begin", {1: torch.ones(2)}),
        (Own, "adapt", None),
        (Own, "adapt", torch.nn.Linear(2, 2)),
        (Own, "trainable_mask", torch.ones(3, dtype=torch.bool)),
        (Own, "trainable_mask", torch.ones(219)),
        (Own, "conflict_with", True),
        (Server, "step", None),
        (Server, "init", 3),
        (Server, "metrics", {"a": torch.ones(2)}),
        (Server, "metrics", {1: 2.0}),
        (Own, "report", {"epsilon": 1.0}),
        (Part, "exchanged_slices", None),
        (Part, "exchanged_slices", (1, 2)),
        (Part, "local_slices", None),
        (Part, "metrics", 3),
        (Deals, "client_payload", None),
        (Deals, "server_payload", {}),
    ],
)
def test_a_hook_that_returns_something_else_is_named_with_its_rule(base, hook, value):
    def returning(self, *arguments, **named):
        return value

    given = {hook: returning, "pieces": (slice(0, 9),)}
    rule = with_attributes(base, **given)
    with pytest.raises(ConfigError, match=rf"{rule.name}\.{hook} must return"):
        unskew.method([rule, "fedprox"]) if hook == "conflict_with" else train(rule, rounds=1)


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
@pytest.mark.parametrize("place", ["state", "upload"])
def test_what_a_rule_writes_must_be_tensors(engine, place):
    def end(self, ctx, carry, v):
        getattr(ctx, place)["a"] = 5

    with pytest.raises(ConfigError, match=rf"own\.end may write only tensors to ctx\.{place}"):
        train(with_attributes(end=end), engine, rounds=1)


@pytest.mark.parametrize("engine", ["inline", "processes", "vectorized"])
@pytest.mark.parametrize("within", [False, True])
def test_stop_iteration_never_ends_a_round_silently(engine, within):
    """Of three clients the second one's iterator has no more values, in a hook or in the function that it returns."""
    values = iter(range(1))

    def loss(self, loss_fn, ctx, carry):
        def own(v, batch):
            next(values)
            return loss_fn(v, batch)

        return own if within else (next(values), loss_fn)[1]

    with pytest.raises(unskew.errors.UnskewError, match="StopIteration"):
        train(with_attributes(loss=loss), engine, rounds=1, clients_per_group=1) if engine != "vectorized" else train(
            with_attributes(loss=loss), engine, rounds=1
        )


@pytest.mark.parametrize("base", [unskew.ClientRule, unskew.ServerRule, unskew.SyncRule, unskew.DataRule])
def test_a_base_class_is_no_method(base):
    for rule in (base(), f"{base.__module__}.{base.__name__}"):
        with pytest.raises(ConfigError, match=f"{base.__name__} needs a name"):
            unskew.method(rule)


class Meddles:
    """A callback that changes what it gets."""

    def start(self, config, rounds_done):
        config.clear()

    def round(self, row):
        row["accuracy"] = 99
        row.pop("loss")

    def end(self, summary):
        summary.clear()


def test_a_callback_cannot_change_the_result():
    plain, meddled = train("fedavg"), train("fedavg", callbacks=[Meddles(), Meddles()])
    assert meddled.summary["best_accuracy"] == plain.summary["best_accuracy"] <= 1
    assert [row["loss"] for row in meddled.history] == [row["loss"] for row in plain.history]
