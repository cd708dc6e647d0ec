"""unskew: federated learning for skewed data.

>>> import unskew
>>> fed = unskew.load_federation("digits", partition="dirichlet:0.5", clients=4)
>>> result = unskew.run(fed, model="logistic", method="fedprox+scaffold", rounds=2, lr=0.05, engine="inline")
>>> len(result.history)
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "Batch": "unskew.models.trainable",
    "ClientData": "unskew.data.federation",
    "ClientRule": "unskew.methods.rules",
    "Comparison": "unskew.comparison",
    "Context": "unskew.methods.rules",
    "DataRule": "unskew.methods.rules",
    "Experiment": "unskew.config",
    "Federation": "unskew.data.federation",
    "Method": "unskew.methods.rules",
    "ModelSpec": "unskew.models.vector",
    "Normalisation": "unskew.data.normalisation",
    "Result": "unskew.records.result",
    "ServerData": "unskew.data.federation",
    "ServerRule": "unskew.methods.rules",
    "Sync": "unskew.methods.rules",
    "UnskewError": "unskew.errors",
    "Updates": "unskew.methods.rules",
    "compare": "unskew.comparison",
    "diagnose": "unskew.diagnosing",
    "load_federation": "unskew.data.load",
    "method": "unskew.methods.catalogue",
    "resume": "unskew.runs",
    "run": "unskew.runs",
}

__all__ = [
    "Batch",
    "ClientData",
    "ClientRule",
    "Comparison",
    "Context",
    "DataRule",
    "Experiment",
    "Federation",
    "Method",
    "ModelSpec",
    "Normalisation",
    "Result",
    "ServerData",
    "ServerRule",
    "Sync",
    "UnskewError",
    "Updates",
    "compare",
    "diagnose",
    "load_federation",
    "method",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from unskew.comparison import Comparison, compare
    from unskew.config import Experiment
    from unskew.data.federation import ClientData, Federation, ServerData
    from unskew.data.load import load_federation
    from unskew.data.normalisation import Normalisation
    from unskew.diagnosing import diagnose
    from unskew.errors import UnskewError
    from unskew.methods.catalogue import method
    from unskew.methods.rules import ClientRule, Context, DataRule, Method, ServerRule, Sync, Updates
    from unskew.models.trainable import Batch
    from unskew.models.vector import ModelSpec
    from unskew.records.result import Result
    from unskew.runs import resume, run


def __getattr__(name: str) -> Any:
    """Names are imported when first used: ``import unskew`` itself stays light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
