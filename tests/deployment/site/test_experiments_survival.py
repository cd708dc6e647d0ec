"""A server cannot choose the constants of a survival model so that what a site sends reveals single patients."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.sites import TINY, LoopPlace, deployed
from support.survival_rows import UNTIL, survival_experiment, survival_table

from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.site import experiments
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.tensor_codec import encode_record

RATES = {"bins": [100.0, 300.0, UNTIL], "rates": [0.002] * 3}
TIMES = tuple(np.linspace(5.0, UNTIL, 100).tolist())


class Trial:
    """A run over three sites, and messages as its server sent them, with other constants."""

    def __init__(self, folder, **more):
        self.rows = survival_table(folder / "patients.csv")
        values = {"max_train_samples": None, **survival_experiment(folder / "patients.csv", **more)}
        self.result, place = deployed(folder, LoopPlace(folder, {**TINY, **values}), **values)
        self.site = place.sites[0]
        self.sent = [frame for client, frame in place.link.sent if client == 0]
        self.constants = json.loads(self.of_kind("train").config["constants"])

    def of_kind(self, kind):
        """The first message of a kind."""
        return next(frame for frame in self.sent if frame.kind == kind)

    def ask(self, frame, **constants):
        """The site's reply to a message with other constants."""
        changed = json.dumps({**self.constants, **constants})
        return self.site.answer(replace(frame, config={**frame.config, "constants": changed}))

    def score(self, **constants):
        """The site's reply to a request for the metrics of a model of zeros."""
        config = self.of_kind("train").config
        schema = DataSchema.read(config)
        spec = self.site.experiments.trainer(config["digest"], schema).spec
        names = (*schema.config(), "digest", "rounds", "protocol", "run", "attempt")
        config = {**{name: config[name] for name in names}, "model": "global", "level": 0.95, "round": 0}
        model = encode_record("model", {"v": spec.flatten() * 0, "b": spec.flatten_buffers()})
        return self.ask(Frame("score", config, {}, model), **constants)


def event_times(reply, constants):
    """Times of events of held-out rows, which follow from the differences of predicted and observed risks."""
    offsets, cuts = np.array(constants["rates"]), np.array(constants["cuts"])
    spent = np.clip(np.array(TIMES)[:, None] - np.array([0, *cuts[:-1]]), 0, np.diff(cuts, prepend=0))
    gaps = [value for name, value in reply.metrics.items() if name.startswith("risk_gap/") and "_" not in name[9:]]
    observed = 1 - np.exp(-spent @ offsets) - np.array(gaps)
    return [TIMES[k] for k in np.flatnonzero(np.diff(observed, prepend=0) > 1e-9)]


@pytest.mark.parametrize("options", [{"until": UNTIL}, {**RATES, "horizons": [300.0]}], ids=["sums", "rates"])
def test_scores_at_many_horizons_cannot_reveal_event_times(options, tmp_path, monkeypatch):
    trial = Trial(tmp_path, survival=options, holdout=0.3)
    assert trial.score().kind == "scored"
    reply = trial.score(horizons=TIMES)
    assert reply.kind == "refused"
    assert "its horizons are not" in reply.config["reason"]
    reply = trial.score(horizons=[*TIMES, 1.0])
    assert "its data schema cannot be read" in reply.config["reason"]

    monkeypatch.setattr(experiments, "agreed_task", lambda *_: experiments.TASKS["regression"])
    reply = trial.score(horizons=TIMES)
    held = next(iter(trial.site.experiments._samples.values())).held.y.numpy()
    found, true = event_times(reply, trial.constants), held[(held[:, 1] > 0) & (held[:, 0] <= UNTIL), 0]
    assert found == sorted({TIMES[k] for k in np.searchsorted(TIMES, true)})  # the attack succeeds without the rule


@pytest.mark.parametrize("options", [{"until": UNTIL, "bins": 4}, {"bins": 4}], ids=["until", "public"])
def test_cuts_around_a_patient_are_refused(options, tmp_path):
    trial = Trial(tmp_path, survival=options)
    frame = trial.of_kind("train")
    assert trial.ask(frame).kind != "refused"
    time, _, clinic, _ = trial.rows
    last = np.sort(time[(clinic == 0) & (time <= UNTIL)])
    for cuts in ([100.0, 200.0, last[-2], last[-1]], [100.0, last[-2], last[-1], trial.constants["cuts"][-1]]):
        reply = trial.ask(frame, cuts=cuts, horizons=cuts[:1])
        assert reply.kind == "refused"
        assert "its cut points are not at most 4 of the public cells" in reply.config["reason"]


@pytest.mark.parametrize("loss", ["piecewise", "discrete"])
@pytest.mark.parametrize("options", [{"bins": [100.0, 300.0, UNTIL], "horizons": [50.0, 300.0]}, RATES, {}])
def test_constants_of_an_honest_server_are_accepted(options, loss, tmp_path):
    trial = Trial(tmp_path, survival=options, loss=loss)
    assert len(trial.result.history) == 2
    assert "its loss" in trial.ask(trial.of_kind("train"), discrete=[float(loss == "piecewise")]).config["reason"]
