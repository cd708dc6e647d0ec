"""FedCOG with the settings of its authors' code: labels complementary to the client's, automatic coefficients, 500 steps.

Ye, Du, Ni, Chen, Wang, "Fake It Till Make It: Federated Learning with Consensus-Oriented Generation", 2023,
arXiv:2312.05966. That code differs in more ways, which are not reproduced here unless the named option is set. It

- rounds the counts of labels down, so that fewer than ``n`` inputs result, and divides by zero for a balanced client;
- stores the last inputs with the logits of the best step (``alias=true``);
- clamps the divergence's distributions and swaps its arguments (``js=reversed_clamped``);
- uses a random network as the previous model of a client that never trained;
- updates the normalization buffers in the synthetic pass;
- passes generated images with values from 0 to 1 to models that are trained on normalized ones.
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

    The rule's name is also ``fedcog``, so a composition can contain only one of them.
    """

    summary: ClassVar[str] = "FedCOG with the settings of its authors' code"
    # Its coefficients are automatic, so there is no lambda_kd.
    spaces: ClassVar[Mapping[str, Space]] = {"lambda_dis": FedCOG.spaces["lambda_dis"]}

    g_steps: Annotated[int, Field(ge=0)] = 500
    coefficients: Literal["fixed", "auto"] = "auto"
    labels: Literal["uniform", "complementary", "explicit"] = "complementary"
