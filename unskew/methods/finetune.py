"""Fine-tuning: at the end of the run, each client trains once more from the final global model to get its personal model.

Personalized accuracy is often measured in this way, for example by Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage,
"Federated Evaluation of On-device Personalization", 2019, arXiv:1910.10252, and as "FedAvg+FT", "FedProx+FT" and "FedCOG+FT"
in the FedCOG paper (arXiv:2312.05966): each client's model is evaluated after local training from the global model.

Fine-tuning is the local training of one round: the method's own client rules with their client state, the run's budget, and
new batches. Nothing is sent or aggregated, so all metrics except the personal ones are the same as without ``ft``. The
personal models of the evaluated clients are stored in the run folder.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from unskew.protocol.rules import ClientRule


@dataclass(frozen=True)
class FineTune(ClientRule):
    """Local training of each evaluated client from the final model, for its personal model."""

    name: ClassVar[str] = "ft"
    summary: ClassVar[str] = "evaluates clients after local training from the final model"
    paper: ClassVar[str] = "Wang et al. 2019, arXiv:1910.10252"
    needs = ("final_training",)
