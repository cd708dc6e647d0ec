"""A federation whose classes and clients have names that a page could take for its own mark-up."""

import numpy as np

from unskew.data.federation import Federation

CLASSES = ("<script>alert(1)</script>", "b & c", "100 %")
CLIENTS = ("</script><img src=x onerror=alert(2)>", "St. Mary's", "%{x} <b>", "South")


def federation():
    draws = np.random.default_rng(0)

    def sample(n, most=3):
        y = draws.integers(0, most, n)
        return draws.normal(size=(n, 3)).astype(np.float32) + 2 * np.eye(3, dtype=np.float32)[y], y

    clients = [sample(n, most) for n, most in ((12, 3), (20, 2), (30, 3), (16, 1))]
    names = {"class_names": CLASSES, "client_names": CLIENTS}
    return Federation.from_arrays(clients, test=sample(60), classes=3, holdout=0.25, **names)
