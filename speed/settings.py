"""Settings A and B of FedAvg with CNN-A, and the normalization of CIFAR-10. Needs nothing, so that JAX can use it."""

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

SETTINGS = {
    "A": {"clients": 100, "per_client": 500, "cohort": 10, "steps": 8, "batch": 64, "lr": 0.05, "seed": 1},
    "B": {"clients": 1000, "per_client": 50, "cohort": 50, "steps": 5, "batch": 10, "lr": 0.05, "seed": 1},
}
