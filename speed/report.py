"""Write the measurements in ``results/`` into the documentation: ``python -m speed.report``."""

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
    """Return the measurement section of the page on speed."""
    info = figures["machine"]
    text = [
        f"Measured on {info['cores']} cores ({info['cpu']}), Python {info['python']}, torch {info['torch']}, with "
        f"{figures['images']} images, by `make bench`. The numbers are medians; the loops are measured in turn, each in its "
        "own process. A round does not include evaluation. The speed of this virtual machine varies: on other days the same "
        "loops ran up to 2.2 times as many rounds per second. Compare only ratios within one table. FedAvg with CNN-A "
        '("together": several clients as one network):',
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
        "Memory is the PSS of a loop and its workers. It hardly includes the data, which all loops share; see "
        "[above](#memory) for the memory of whole runs.",
        "",
    ]
    text += [
        "(a) is a typical research loop: a DataLoader and a deep copy of the model per client. (b) is tuned by hand without "
        "a framework: tensors in memory, one reused model, channels-last, fused SGD. (c) is a handwritten forward pass of "
        "this model (`speed/handmade.py`), also with five clients as one network of grouped convolutions.",
        "",
        "Effect of the number of registered clients, with a cohort of 10 (setting A). Memory is the PSS of the run and its "
        "workers after 20 rounds, with the growth during those rounds in parentheses:",
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
        "SCAFFOLD stores a control variate for each client that has participated. Its memory grows with the participating "
        "clients, not with the registered ones.",
        "",
        "Rounds per second of each engine, from little to much work per client:",
        "",
        markdown(
            ["work", "`inline`", "`processes`", "`processes`, together", "`vectorized`"],
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
        "With one client at a time, `processes` is the fastest engine if clients take more than one step. Several clients as "
        "one network are faster with a small CNN and small batches. The best choice depends on the machine, so `auto` "
        "measures it.",
        "",
        "`vectorized` is intended for GPUs, but has been measured on a CPU only.",
    ]
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    page = ROOT / "docs" / "results" / "speed.md"
    figures = json.loads((ROOT / "results" / "speed-cpu.json").read_text())
    before = page.read_text().split("<!-- measurements -->")[0]
    page.write_text(before + "<!-- measurements -->\n\n" + measurements(figures))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
