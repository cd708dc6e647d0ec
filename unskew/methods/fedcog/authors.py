"""FedCOG with the settings of its authors' code: labels complementary to the client's, automatic coefficients, 500 steps.

Ye, Du, Ni, Chen, Wang, "Fake It Till Make It: Federated Learning with Consensus-Oriented Generation", 2023,
arXiv:2312.05966. What that code does beside these settings is not done here, or only if asked for. It

- floors the counts of labels, so that fewer than ``n`` inputs result, and divides by zero for a balanced client;
- keeps the last inputs with the best step's logits (``alias=true``);
- clamps the divergence's distributions and takes it in reverse order (``js=reversed_clamped``);
- takes a random network as the previous model of a client that never trained;
- lets the synthetic pass move the normalization statistics;
- gives a network's images, from 0 to 1, to models that are trained on normalized ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.methods.fedcog.fedcog import FedCOG
from unskew.protocol.search_space import Space


@dataclass(frozen=True)
class FedCOGAuthors(FedCOG):
    """``FedCOG`` with the defaults of the authors' code.

    The rule's name is ``fedcog`` too, so a composition can have only one of them.
    """

    summary: ClassVar[str] = "FedCOG with the settings of its authors' code"
    # Its coefficients are automatic, so there is no lambda_kd.
    spaces: ClassVar[Mapping[str, Space]] = {"lambda_dis": FedCOG.spaces["lambda_dis"]}

    g_steps: Annotated[int, Field(ge=0)] = 500
    coefficients: Literal["fixed", "auto"] = "auto"
    labels: Literal["uniform", "complementary", "explicit"] = "complementary"
