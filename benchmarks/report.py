"""Write the measurements in ``results/`` into the documentation: ``python -m benchmarks.report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unskew.reproduction.tables import markdown

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "A": "A: 100 clients x 500 samples, 10 per round, 8 steps of batch 64",
    "B": "B: 1000 clients x 50 samples, 50 per round, 5 steps of batch 10",
}


def measurements(figures: dict[str, Any]) -> str:
    """Return the measurement section of the page on engines."""
    m = figures["machine"]
    text = [
        f"Measured on {m['cores']} cores ({m['cpu']}), Python {m['python']}, torch {m['torch']}, with "
        f"{figures['images']} images, by `make bench`: medians, the loops measured in turn, each in a process of its own. "
        "Evaluation is not part of a round here. The machine is a virtual one whose speed changes with its neighbours: on "
        "other days the same loops made up to 2.2 times as many rounds. So compare figures of one table only, and ratios at "
        "that. "
        "FedAvg with CNN-A:",
        "",
    ]
    loops = list(dict.fromkeys(row["loop"] for row in figures["speed"]))
    by = {(row["setting"], row["loop"]): row for row in figures["speed"]}
    rows = [
        [loop]
        + [f"{by[s, loop]['rounds_per_s']:.2f} ({by[s, loop]['of_tuned']:.2f})" for s in SETTINGS]
        + [" / ".join(f"{by[s, loop]['mb']:.0f}" for s in SETTINGS)]
        for loop in loops
    ]
    header = ["rounds per second (relative to the better (b))", *SETTINGS.values(), "memory in MiB, A / B"]
    text += [markdown(header, rows), ""]
    text += [
        "Memory is the PSS of a loop and its workers. The data as given are shared by all loops here and hardly count; the "
        "table [above](#memory) is that of whole runs.",
        "",
    ]
    text += [
        "(a) is what a researcher writes: a DataLoader per client, a deep copy of the model per client. (b) is tuned by hand "
        "without a framework: tensors in memory, one reused model, channels-last, fused SGD. (c) writes out the forward pass "
        "of this one model (`benchmarks/handmade.py`); with five clients as one network of grouped convolutions it shows "
        "what grouping gains by hand.",
        "",
        "Registered clients, at the same cohort of 10 (setting A). Memory is that of the run and its workers, shared pages "
        "counted once, after 20 rounds; in brackets what those rounds added:",
        "",
        markdown(
            ["method", "registered clients", "seconds per round", "memory in MiB"],
            [
                [
                    f"`{r['method']}`",
                    f"{r['clients']:,}",
                    f"{r['seconds']:.3f}",
                    f"{r['mb']:.0f} ({r['growth_mb']:+.0f})",
                ]
                for r in figures["clients"]
            ],
        ),
        "",
        "SCAFFOLD keeps a variate for each client that took part, which is the method's own cost: it grows with the clients "
        "seen, not with the clients registered.",
        "",
        "Rounds per second of each engine, from tiny to large work per client:",
        "",
        markdown(
            ["work", "`inline`", "`processes`", "and together", "`vectorized`"],
            [
                [
                    r["case"],
                    *(
                        f"{r[e]:.2f}" if e in r else "-"
                        for e in ("inline", "processes", "clients_per_group", "vectorized")
                    ),
                ]
                for r in figures["engines"]
            ],
        ),
        "",
        "One client at a time, `processes` is the fastest where a client takes more than one step. Several clients as one "
        "network are faster with a small CNN and small batches, and which is best changes with the machine. So `auto` "
        "measures.",
        "",
        "There are no figures for a GPU yet: `vectorized` is meant for one, but has been measured on a CPU only.",
    ]
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    page = ROOT / "docs" / "engines.md"
    figures = json.loads((ROOT / "results" / "speed-cpu.json").read_text())
    before = page.read_text().split("<!-- measurements -->")[0]
    page.write_text(before + "<!-- measurements -->\n\n" + measurements(figures))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
