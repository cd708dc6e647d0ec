"""Patients of three clinics with survival times: an experiment over a CSV file, and the rows of the file."""

import numpy as np

UNTIL = 500.0


def survival_table(path, n=360, effect=0.7):
    """Write patients of three clinics with different hazards; return their times, events, clinics and ages."""
    random = np.random.default_rng(0)
    clinic, age = np.arange(n) % 3, random.normal(60, 10, n).round()
    hazard = np.exp(effect * (age - 60) / 10 + 0.4 * clinic) / 300
    died, left = random.exponential(1 / hazard), random.uniform(50, 900, n)
    time, event = np.ceil(np.minimum(died, left)), died <= left
    lines = [
        "clinic,age,days,dead",
        *(f"{c},{a:.0f},{t:.0f},{int(e)}" for c, a, t, e in zip(clinic, age, time, event, strict=True)),
    ]
    path.write_text("\n".join(lines))
    return time, event, clinic, age


def survival_experiment(path, **more):
    """An experiment over the file, which needs no seconds."""
    return {
        "task": "survival", "data": f"table:{path}", "label": "days,dead", "partition": "natural:clinic", "clients": 3,
        "model": "proportional", "survival": {"until": UNTIL}, "rounds": 2, "local_steps": 3, "batch_size": 16, "lr": 0.05,
        "holdout": 0.0, "engine": "inline", "device": "cpu", "precision": "fp64", **more,
    }  # fmt: skip
