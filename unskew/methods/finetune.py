"""Fine-tuning: at the end of the run every client trains once more from the final global model, and is served by the result.

This is how personalised accuracy is most often measured, for instance by Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage,
"Federated Evaluation of On-device Personalization", 2019, arXiv:1910.10252, and as "FedAvg+FT", "FedProx+FT" and "FedCOG+FT"
by the FedCOG paper (arXiv:2312.05966): each client's model after local training from the global model is evaluated.

The training is that of a round: the method's own client rules with what they kept at the client, the run's budget, fresh
batches. Nothing of it is sent or aggregated, so everything but the personal figures is as without ``ft``. The models of the
clients that are evaluated are kept in the run folder.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from unskew.protocol.rules import ClientRule, Method


@dataclass(frozen=True)
class FineTune(ClientRule):
    """One more local training at the end, for the client alone."""

    name: ClassVar[str] = "ft"
    summary: ClassVar[str] = "evaluates clients after local training from the final model"
    paper: ClassVar[str] = "Wang et al. 2019, arXiv:1910.10252"
    needs = ("final_training",)

    def conflict_with(self, method: Method) -> str | None:
        """A client is served by one model: not beside a rule that keeps a personal one."""
        other = next((rule.name for rule in method.client if type(rule).personal is not ClientRule.personal), None)
        if other is None:
            return None
        return f"{other} keeps a personal model for each client and ft trains another one; leave out one of the two."
