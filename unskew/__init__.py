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

from unskew.version import __version__ as __version__

_PLACES = {
    "AggregateRule": "unskew.protocol.rules",
    "Batch": "unskew.models.execution",
    "Callback": "unskew.records.recorder",
    "ClientData": "unskew.data.federation",
    "ClientRule": "unskew.protocol.rules",
    "ClientSampler": "unskew.protocol.client_sampler",
    "Comparison": "unskew.comparison.comparison_result",
    "Context": "unskew.protocol.rules",
    "DataRule": "unskew.protocol.rules",
    "Experiment": "unskew.config.experiment",
    "Federation": "unskew.data.federation",
    "Method": "unskew.protocol.rules",
    "ModelSpec": "unskew.models.spec",
    "Normalization": "unskew.data.normalization",
    "Result": "unskew.records.result",
    "ServerData": "unskew.data.federation",
    "ServerRule": "unskew.protocol.rules",
    "SyncRule": "unskew.protocol.rules",
    "UnskewError": "unskew.errors",
    "Updates": "unskew.protocol.rules",
    "audit_privacy": "unskew.runs.privacy_audit",
    "compare": "unskew.comparison.compare",
    "diagnose": "unskew.diagnosis.diagnose",
    "export": "unskew.serving.export",
    "load_federation": "unskew.data.load",
    "load_predictor": "unskew.serving.load",
    "method": "unskew.methods.registry",
    "report": "unskew.reporting.report",
    "resume": "unskew.runs.run",
    "run": "unskew.runs.run",
    "tune": "unskew.tuning.tune",
}

__all__ = [
    "AggregateRule",
    "Batch",
    "Callback",
    "ClientData",
    "ClientRule",
    "ClientSampler",
    "Comparison",
    "Context",
    "DataRule",
    "Experiment",
    "Federation",
    "Method",
    "ModelSpec",
    "Normalization",
    "Result",
    "ServerData",
    "ServerRule",
    "SyncRule",
    "UnskewError",
    "Updates",
    "audit_privacy",
    "compare",
    "diagnose",
    "export",
    "load_federation",
    "load_predictor",
    "method",
    "report",
    "resume",
    "run",
    "tune",
]

if TYPE_CHECKING:
    from unskew.comparison.compare import compare
    from unskew.comparison.comparison_result import Comparison
    from unskew.config.experiment import Experiment
    from unskew.data.federation import ClientData, Federation, ServerData
    from unskew.data.load import load_federation
    from unskew.data.normalization import Normalization
    from unskew.diagnosis.diagnose import diagnose
    from unskew.errors import UnskewError
    from unskew.methods.registry import method
    from unskew.models.execution import Batch
    from unskew.models.spec import ModelSpec
    from unskew.protocol.client_sampler import ClientSampler
    from unskew.protocol.rules import (
        AggregateRule,
        ClientRule,
        Context,
        DataRule,
        Method,
        ServerRule,
        SyncRule,
        Updates,
    )
    from unskew.records.recorder import Callback
    from unskew.records.result import Result
    from unskew.reporting.report import report
    from unskew.runs.privacy_audit import audit_privacy
    from unskew.runs.run import resume, run
    from unskew.serving.export import export
    from unskew.serving.load import load_predictor
    from unskew.tuning.tune import tune


def __getattr__(name: str) -> Any:
    """Import a public name on first use, which keeps ``import unskew`` fast."""
    if name not in _PLACES:
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
