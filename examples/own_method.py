"""A method of your own: one class, run alone and added to a method of the catalogue.

On skewed data a client forgets the classes it does not hold. Distillation works against that: beside its labels, a client
also learns from what the global model it received says about its samples,

    loss + gamma * KL(softmax(global logits) || softmax(local logits)),

the idea of learning without forgetting (Li and Hoiem 2016, arXiv:1606.09282) with the global model as the teacher.

    python examples/own_method.py
    unskew run --method examples.own_method.Distil:gamma=0.5+scaffold --rounds 10
"""

from dataclasses import dataclass

import torch.nn.functional as F

import unskew


@dataclass(frozen=True)
class Distil(unskew.ClientRule):
    name, summary, paper = "distil", "learn from the global model", "Li and Hoiem 2016, arXiv:1606.09282"

    gamma: float = 0.3

    def loss(self, loss_fn, ctx, carry):
        def distilled(v, batch):
            teacher = F.log_softmax(ctx.model(ctx.v_global, batch.x, track=False).logits, dim=-1)
            student = F.log_softmax(ctx.model(v, batch.x).logits, dim=-1)
            return loss_fn(v, batch) + self.gamma * F.kl_div(student, teacher, reduction="batchmean", log_target=True)

        return distilled


if __name__ == "__main__":
    fed = unskew.load_federation("digits", partition="dirichlet:0.1", clients=10)
    for method in ["fedavg", Distil(), "scaffold", [Distil(), "scaffold"]]:
        result = unskew.run(fed, method=method, model="logistic", rounds=15, local_steps=10, batch_size=16, lr=0.1)
        print(f"{result.summary['method']:16} test accuracy {result.summary['accuracy']:.1%}")
