"""The configuration of an engine."""

import pickle
import warnings
from threading import Lock

import pytest
from support.federations import SmallBatchNorm, blobs

import unskew
from unskew.engines.inline import InlineEngine
from unskew.records.recorder import Callback


def test_it_can_be_sent_to_another_process_without_the_callbacks_of_this_one(monkeypatch):
    setups, create = [], InlineEngine.__init__
    monkeypatch.setattr(InlineEngine, "__init__", lambda self, *given: setups.append(given[0]) or create(self, *given))
    screen = Callback()
    screen.lock = Lock()
    unskew.run(blobs([5, 6]), model=SmallBatchNorm(), rounds=1, engine="inline", callbacks=[screen])
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(setups[0])
    assert pickle.loads(pickle.dumps(setups[0].without_callbacks())).warn is warnings.warn
