"""Compare the estimated seconds of local steps with measured ones, in about a minute: ``python -m speed.costs``

The models are those to which the constants of ``unskew/engines/costs.py`` were fitted. CPU seconds of one thread are
measured for one client and, if the model can be grouped, for eight clients as one network.
"""

from __future__ import annotations

import time

import numpy as np

from speed.auto import Workload, vectors
from speed.speed import federation_of
from unskew.engines.costs import step_seconds
from unskew.engines.cpu import keep_freed_memory, num_threads
from unskew.engines.timing import min_seconds, steps_workload
from unskew.models.grouped.context import grouped_form
from unskew.reproduction.tables import markdown

BATCHES = (1, 16, 64)
TOGETHER = 8
"""Clients that are trained as one network."""
SECONDS = 0.1
"""Estimated seconds of the steps that are measured together."""
FEATURES = {"logistic": 60, "mlp": 64, "table-mlp": 30}
MODELS = ("cnn", *FEATURES, "resnet20", "vgg11")


def main() -> None:
    """Print measured and estimated milliseconds of a local step, and their ratio."""
    keep_freed_memory()
    draws = np.random.default_rng(0)
    images, labels = draws.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8), draws.integers(0, 10, 200)
    rows: list[tuple[str, ...]] = []
    ratios: dict[int, list[float]] = {1: [], TOGETHER: []}
    for model in MODELS:
        if model in FEATURES:
            federation = vectors(1, max(BATCHES), FEATURES[model])
        else:
            federation = federation_of(images, labels, 1, max(BATCHES))
        for batch in BATCHES:
            setup = Workload(federation, model, 1, 1, batch).config()
            form = grouped_form(setup.spec)
            for clients in (1, TOGETHER) if form else (1,):
                estimate = step_seconds(setup.spec, batch, clients)
                steps = max(1, round(SECONDS / estimate))
                with num_threads(1):
                    workload = steps_workload(setup, form, clients, steps)
                    measured = min_seconds({clients: workload}, time.process_time)[clients] / steps
                ratios[clients].append(measured / estimate)
                times = (f"{1e3 * measured:.2f}", f"{1e3 * estimate:.2f}", f"{measured / estimate:.2f}")
                rows.append((model, str(batch), str(clients), *times))
    print(markdown(("model", "batch size", "clients together", "measured ms", "estimated ms", "ratio"), rows))
    for clients, values in ratios.items():
        print(f"{clients} together: {min(values):.2f} to {max(values):.2f}, median {np.median(values):.2f}")


if __name__ == "__main__":
    main()
