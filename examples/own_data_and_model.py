"""Your own arrays and your own module: four hospitals that examine different patients.

The table comes with scikit-learn: 569 patients, 30 measurements each, and whether the tumour is benign. Each hospital
sees tumours of another size, so neither the inputs nor the labels are spread evenly.

    python examples/own_data_and_model.py
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from torch import nn

import unskew


class Net(nn.Module):
    """Any module from inputs to logits will do; it needs no base class."""

    def __init__(self, features, classes):
        super().__init__()
        self.verdict = nn.Linear(16, classes)
        self.embed = nn.Sequential(nn.Linear(features, 16), nn.ReLU())

    def forward(self, x):
        return self.verdict(self.embed(x))


def hospitals(x, y, number):
    """Sort the patients by tumour size (the first column) and cut: each hospital gets one run of sizes."""
    return [(x[rows], y[rows]) for rows in np.array_split(np.argsort(x[:, 0]), number)]


if __name__ == "__main__":
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:114], order[114:]
    x = (x - x[train].mean(0)) / x[train].std(0)

    fed = unskew.Federation.from_arrays(
        clients=hospitals(x[train], y[train], 4),
        test=(x[test], y[test]),
        classes=2,
        class_names=["malignant", "benign"],
        name="hospitals",
    )
    for client, counts in enumerate(fed.class_counts()):
        print(f"hospital {client} trains on {counts[0]:3} malignant and {counts[1]:3} benign tumours")

    # The head is the last linear layer that a forward pass uses; naming it makes that certain.
    model = Net(features=30, classes=2)
    for method in ["fedavg", "fedprox:mu=0.1+scaffold"]:
        result = unskew.run(fed, model=model, head="verdict", method=method, rounds=20, local_epochs=2, lr=0.1)
        print(f"{method}: test accuracy {result.summary['accuracy']:.1%}")
