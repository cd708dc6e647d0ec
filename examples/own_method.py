"""A method of your own: one class, run alone and combined with a built-in method.

A client that holds two classes soon gives every sample to one of them with great confidence. The confidence penalty
(Pereyra et al. 2017, arXiv:1701.06548) works against that; it subtracts the entropy of the outputs from the loss,

    loss - beta * H(softmax(logits)).

    python examples/own_method.py
    unskew run --method examples.own_method.Humble:beta=0.5+scaffold --rounds 10
"""

from dataclasses import dataclass
from typing import ClassVar

import unskew


@dataclass(frozen=True)
class Humble(unskew.ClientRule):
    name, summary, paper = "humble", "penalizes confidence", "Pereyra et al. 2017, arXiv:1701.06548"

    spaces: ClassVar = {"beta": "0.01:1:log"}  # for unskew tune

    beta: float = 0.5

    def loss(self, loss_fn, ctx, carry):
        def penalized(v, batch):
            log_p = ctx.model(v, batch.x, batch.track).logits.log_softmax(dim=-1)
            entropy = -(log_p.exp() * log_p).sum(dim=-1).mean()
            return loss_fn(v, batch) - self.beta * entropy

        return penalized


if __name__ == "__main__":
    result = unskew.compare(
        methods=["fedavg", Humble(), "scaffold", [Humble(), "scaffold"]],
        seeds=2, rounds=12, local_steps=10, batch_size=16, lr=0.1, model="mlp", model_options={"hidden": [64]},
        references=False,
    )  # fmt: skip
    for row in result.rows():
        print(f"{row['method']:15} test accuracy {row['accuracy']:.1%} ± {row['accuracy_std']:.1%}")
