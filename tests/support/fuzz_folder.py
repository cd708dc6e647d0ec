"""What the fuzzer damages: tables, and a small federation."""

import json

import numpy as np

import unskew

draws = np.random.default_rng(0)
ROWS = [
    {"x0": round(float(draws.normal()), 3), "x1": n % 4, "kind": "abc"[n % 3], "label": ("no", "yes", "maybe")[n % 3]}
    for n in range(24)
]
CSV = "x0,x1,kind,label\n" + "".join(",".join(map(str, row.values())) + "\n" for row in ROWS)
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
X, Y = draws.normal(size=(18, 4)).astype("float32"), np.arange(18) % 3
TINY = {"model": "logistic", "rounds": 1, "local_steps": 1, "batch_size": 4, "engine": "inline", "eval_clients": 1}


def federation():
    clients = [(X[k : k + 6], Y[k : k + 6]) for k in (0, 6, 12)]
    return unskew.Federation.from_arrays(clients, test=(X, Y), server=(X[:5], Y[:5]), classes=3)
