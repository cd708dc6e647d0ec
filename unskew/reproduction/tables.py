"""Tables of outcomes: our numbers next to the paper's, over seeds, with paired differences to a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from unskew.comparison.summary_statistics import mean_std
from unskew.config.experiment import Experiment
from unskew.errors import ConfigError
from unskew.records.recorder import first_reaching
from unskew.reproduction.outcomes import Outcome
from unskew.reproduction.preset import MARK, Preset, PresetCell, without_mark
from unskew.reproduction.settings import has_same_model, other_setting, published_settings
from unskew.tasks.intervals import interval95

VALUES: dict[str, tuple[str, float, int]] = {
    "accuracy": ("accuracy after the last round, %", 100, 2),
    "best_last_5": ("best accuracy of the last five evaluations, %", 100, 2),
    "coefficients/positive": ("positive coefficients, mean over rounds", 1, 1),
    "coefficients/negative": ("negative coefficients, mean over rounds", 1, 1),
    "coefficients/moved": ("distance of the coefficients from the fallback, mean over rounds", 1, 4),
    "surrogate/cosine": ("cosine of surrogate and true gradient, mean over rounds", 1, 3),
    "server/gflops": ("computation of the server per round, GFLOP", 1, 2),
    "server/bytes": ("memory of the server, MB", 1e-6, 2),
    "personal_accuracy_mean": ("personalized accuracy, mean over clients, %", 100, 2),
    "macro_precision": ("C-P, %", 100, 2),
    "macro_recall": ("C-R, %", 100, 2),
    "macro_f1": ("C-F1, %", 100, 2),
    "samples_f1": ("O-F1 (of each sample, averaged), %", 100, 2),
    "loss": ("loss after the last round, nats", 1, 4),
    "perplexity": ("perplexity after the last round", 1, 3),
    "setup_seconds": ("seconds of generation per client and round", 1, 2),
    "train_seconds": ("seconds of local training per client and round", 1, 2),
    "client_seconds": ("seconds of a client over all rounds", 1, 1),
    "local_distance": ("distance of local models from their mean", 1, 3),
    "local_accuracy": ("accuracy of local models on the global test set, %", 100, 2),
    "local_personal_accuracy": ("personalized accuracy of local models, %", 100, 2),
    "bytes_per_client": ("MB up and down per client, without buffers", 1e-6, 2),
    "rounds_to_target": ("rounds to the target accuracy, over the seeds that reach it", 1, 1),
    "bytes_total": ("MB of all clients in all rounds", 1e-6, 1),
    "bytes_to_target": ("MB of all clients to the target accuracy, over the seeds that reach it", 1e-6, 1),
    "saving": ("traffic to the target saved against the first row, at least, %", 100, 1),
    "epsilon": ("epsilon spent", 1, 2),
    "epsilon_if_secret": ("epsilon spent, if noise were secret", 1, 2),
    "scalars_per_client": ("parameters up and down per client in 20,000 steps, billions", 1e-9, 4),
    "updates/cosine": ("mean cosine of a client's and the true update, mean over rounds", 1, 4),
    "updates/cosine_min": ("smallest cosine of a client's and the true update, mean over rounds", 1, 4),
    "updates/cosine_max": ("largest cosine of a client's and the true update, mean over rounds", 1, 4),
    "updates/cosine_across_rounds": ("cosine of the true updates of consecutive rounds, mean over rounds", 1, 4),
    "generalization/gap": ("generalization gap of the averaged model", 1, 4),
    "generalization/local_gap": ("generalization gap of the clients' models, mean", 1, 4),
    "generalization/ratio": (
        "gap of the averaged model / mean gap of the clients' models; leading term of the theory: 1/K²",
        1,
        4,
    ),
    "generalization/skew": ("non-iidness δ_k, mean over clients", 1, 4),
    "generalization/trend": ("trend of Theorem 4.3, mean over rounds, without constants", 1, 4),
    "consensus/": ("consensus distance of {}", 1, 4),
    "gradients/": ("{} of the clients' gradients at the server's model", 1, 4),
}
"""Values that tables show: key in a summary, title, factor and decimals."""


TO_TARGET = {"rounds_to_target": "round", "bytes_to_target": "bytes"}
"""Values of tables with a target, and the curve that each is computed from."""
MEANS = ("coefficients/", "surrogate/", "updates/")
"""Values of single rounds, of which tables show the mean over evaluated rounds."""
COUNTED_OVER = 4000  # rounds of 5 steps, to which parameter counts are scaled


def value_format(name: str) -> tuple[str, float, int]:
    """Return the title, factor and decimals of a value.

    Args:
        name: Name of the value.

    Raises:
        ConfigError: If the value is unknown.
    """
    if name in VALUES:
        return VALUES[name]
    stem, slash, rest = name.partition("/")
    if stem + slash not in VALUES:
        raise ConfigError(f"{name!r} is not a value for tables. The values are: {', '.join(VALUES)}.")
    label, factor, digits = VALUES[stem + slash]
    return label.format(rest), factor, digits


def value_of(summary: dict[str, Any], name: str, base: dict[str, Any] | None = None) -> float | None:
    """Return a value of a run in its own unit, or None if the run lacks it.

    Args:
        summary: Summary of a run.
        name: Name of the value.
        base: Summary of the run in the first row, or None.
    """
    if name == "saving":
        own_bytes = summary.get("bytes_to_target")
        if own_bytes is None or base is None:
            return None
        needed = base.get("bytes_to_target")  # a base that misses the target needs at least what it sent
        return 1.0 - float(own_bytes) / float(base["bytes_up"] + base["bytes_down"] if needed is None else needed)
    if name == "bytes_total":
        return float(summary["bytes_up"] + summary["bytes_down"])
    if name not in ("bytes_per_client", "scalars_per_client"):
        number: float | None = summary.get(name)
        return number
    counted: int = sum(summary[f"bytes_{way}"] - summary[f"buffer_bytes_{way}"] for way in ("up", "down"))
    each: float = counted / summary["clients"]
    return each if name == "bytes_per_client" else each / 4 * COUNTED_OVER / summary["rounds"]


def expand_values(values: list[str], summaries: list[dict[str, Any]]) -> list[str]:
    """Replace ``consensus/*`` by the values of the runs, in order of depth.

    Args:
        values: Names of values.
        summaries: Summaries of the runs.
    """
    names = dict.fromkeys(name for summary in summaries for name in summary)
    expanded: list[str] = []
    for value in values:
        expanded += [n for n in names if n.startswith(value[:-1])] if value.endswith("/*") else [value]
    return expanded


@dataclass(frozen=True)
class TableEntry:
    """One number of a table, over seeds, in the table's unit.

    Attributes:
        value: Name of the value, as in ``VALUES``.
        row: Row of the table.
        column: Column of the table.
        seeds: Seeds of ``mean`` and ``std``.
        mean: Mean over the seeds.
        std: Standard deviation over the seeds; 0 for a single seed.
        published: Paper's number; None if the paper has none.
        setting: Data or target of the paper's number if it is not comparable with ours; empty otherwise.
        difference: ``mean`` minus ``published``; None if the paper has no number for the same data and model.
        paired: Mean and standard deviation of the differences per seed to the table's first row, and the number of
            seeds; some seeds may lack the number.
        interval: 95 % interval of the mean of these differences, by Student's t; None for fewer than two seeds.
        against: For an entry that is the difference of two rows: the row that is subtracted.
    """

    value: str
    row: str
    column: str
    seeds: list[int]
    mean: float
    std: float
    published: float | None = None
    setting: str = ""
    difference: float | None = None
    paired: tuple[float, float, int] | None = None
    interval: tuple[float, float] | None = None
    against: str | None = None


def _over_rounds(curve: dict[str, list[float | None]]) -> dict[str, float]:
    """Return the mean over evaluated rounds of each curve that is shown as a mean."""
    measured = {name: [y for y in values if y is not None] for name, values in curve.items() if name.startswith(MEANS)}
    return {name: sum(values) / len(values) for name, values in measured.items() if values}


def to_target(outcome: Outcome, target: float | None) -> dict[str, int | None]:
    """Return rounds and bytes to a table's target; the run may have had another target, or none.

    Args:
        outcome: Outcome of a run.
        target: Target of the table, or None.
    """
    summary, curve = outcome["summary"], outcome["curve"]
    if target is None or summary.get("target") == target:
        return {name: summary.get(name) for name in TO_TARGET}
    row = first_reaching(
        (dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)), target
    )
    return {name: None if row is None else row[of] for name, of in TO_TARGET.items()}


def table_entries(preset: Preset, outcomes: Iterable[tuple[PresetCell, Outcome]]) -> list[TableEntry]:
    """Compute the numbers of a table from its runs.

    Args:
        preset: The preset.
        outcomes: Cells with the outcomes of their runs.
    """
    by: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    configs, published = dict[tuple[str, str], Experiment](), published_settings(preset)
    for cell, outcome in outcomes:
        configs[cell.column, cell.row] = cell.config
        by.setdefault((cell.column, cell.row), {})[cell.config.seed] = {
            **outcome["summary"],
            **_over_rounds(outcome["curve"]),  # the summary has only the last round's
            **to_target(outcome, cell.config.target),
        }
    table = []
    first = next(iter(preset.rows))
    for value in expand_values(preset.values, [s for runs in by.values() for s in runs.values()]):
        factor = value_format(value)[1]

        def numbers(at: tuple[str, str], value: str = value, factor: float = factor) -> dict[int, float]:
            bases = by.get((at[0], first), {}) if at[1] != first else {}
            by_seed = {seed: value_of(run, value, bases.get(seed)) for seed, run in by.get(at, {}).items()}
            return {seed: number * factor for seed, number in by_seed.items() if number is not None}

        for column, row in by:
            own_numbers, base = numbers((column, row)), numbers((column, first))
            if not own_numbers:
                continue
            mean, std = mean_std(list(own_numbers.values()))
            paper = preset.published.get(value, {}).get(column, {}).get(without_mark(row))
            config, paper_numbers = configs[column, row], published.get((without_mark(row), column))
            setting = "" if paper is None or paper_numbers is None else other_setting(value, config, paper_numbers)
            same = not setting and has_same_model(config, paper_numbers)
            difference = mean - paper if same and paper is not None else None
            entry = TableEntry(value, row, column, sorted(own_numbers), mean, std, paper, setting, difference)
            table.append(with_differences(entry, own_numbers, base) if row != first else entry)
        for (column, row), base_row in ((at, preset.pairs.get(without_mark(at[1]))) for at in by if value != "saving"):
            own_numbers, base = numbers((column, row)), numbers((column, base_row or ""))
            if seeds := sorted(set(own_numbers) & set(base)):
                mean, std = mean_std([own_numbers[s] - base[s] for s in seeds])
                entry = TableEntry(value, row, column, seeds, mean, std, against=base_row)
                table.append(with_differences(entry, own_numbers, base))
    return table


def with_differences(entry: TableEntry, ours: Mapping[int, float], base: Mapping[int, float]) -> TableEntry:
    """Return an entry with the differences to the numbers of another row.

    Args:
        entry: Entry of the table.
        ours: Number of each seed.
        base: Number of the other row for each seed.
    """
    differences = [ours[s] - base[s] for s in sorted(set(ours) & set(base))]
    paired = (*mean_std(differences), len(differences)) if differences else None
    return replace(entry, paired=paired, interval=interval95(differences))


def table_lines(
    preset: Preset, table: list[TableEntry], whole: bool = False
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of one table per value and column, or per value if there is one row.

    Args:
        preset: Preset of the table.
        table: Entries of the table.
        whole: Whether to list rows of the paper that were not run; without entries, all of them.
    """
    tables = []
    first = next(iter(preset.rows))
    single = len(preset.rows) == 1
    pairs, table = [e for e in table if e.against is not None], [e for e in table if e.against is None]
    for value in dict.fromkeys([e.value for e in table] or (preset.published if whole else ())):
        label, _, digits = value_format(value)
        columns = dict.fromkeys([e.column for e in table if e.value == value] or preset.published.get(value, {}))
        for column in [None] if single and table else columns:
            some = [e for e in table if e.value == value and column in (None, e.column)]
            settings = ", ".join(dict.fromkeys(e.setting for e in some if e.setting))
            paper_title = f"paper ({settings})" if settings else "paper"
            header = ["", "ours", "seeds", f"minus {first}, per seed", "95 % of it", paper_title, "ours minus paper"]
            rows = [_line(e.column if single else e.row, e, digits) for e in some]
            paper = preset.published.get(value, {}).get(column, {}) if whole and column is not None else {}
            if settings:
                paper = {}  # only our rows are of interest
            absent = [row for row in preset.rows if row in paper and row not in {without_mark(e.row) for e in some}]
            rows += [[row, "not run", "", "", "", f"{paper[row]:.{digits}f}", ""] for row in absent]
            # Empty columns are omitted.
            keep = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
            title = label if column is None else f"{column}: {label}"
            tables.append((title, [header[i] for i in keep], [[row[i] for i in keep] for row in rows]))
            differences = [
                _line(f"{e.row} − {e.against}", e, digits) for e in pairs if (e.value, e.column) == (value, column)
            ]
            if differences:
                rows = [[line[0], *line[2:5]] for line in differences]
                tables.append((f"{title}, differences", ["", "seeds", "per seed", "95 % of it"], rows))
    return tables


def _line(name: str, e: TableEntry, digits: int) -> list[str]:
    return [
        name,
        f"{e.mean:.{digits}f} ± {e.std:.{digits}f}" if len(e.seeds) > 1 else f"{e.mean:.{digits}f}",
        ", ".join(map(str, e.seeds)),
        "" if e.paired is None else signed_difference(*e.paired, digits=digits, seeds=len(e.seeds)),
        "" if e.interval is None else " to ".join(f"{end:+.{digits}f}" for end in e.interval),
        "" if e.published is None else f"{e.published:.{digits}f}",
        "" if e.difference is None else f"{e.difference:+.{digits}f}",
    ]


def signed_difference(mean: float, std: float, count: int, digits: int, seeds: int) -> str:
    """Format a difference over ``count`` of ``seeds``, with its sign, and with its spread if there is more than one.

    Args:
        mean: Mean difference.
        std: Standard deviation.
        count: Number of seeds with a value.
        digits: Digits after the decimal point.
        seeds: Number of seeds of the table.

    >>> signed_difference(1.234, 0.5, 3, 1, 3), signed_difference(1.234, 0.0, 1, 1, 3)
    ('+1.2 ± 0.5', '+1.2 (1 of 3)')
    """
    spread = f" ± {std:.{digits}f}" if count > 1 else ""
    return f"{mean:+.{digits}f}{spread}" + (f" ({count} of {seeds})" if count < seeds else "")


def footnotes(outcomes: Iterable[tuple[PresetCell, Outcome]]) -> list[str]:
    """Return the explanations of a table's marked rows.

    Args:
        outcomes: Cells with the outcomes of their runs.
    """
    differences = (outcome["difference"] for cell, outcome in outcomes if cell.row.endswith(MARK))
    return [f"{MARK.strip()} Measured with an earlier default: {text}." for text in dict.fromkeys(differences)]


def as_json(table: list[TableEntry]) -> list[dict[str, Any]]:
    """Return the entries as plain values."""
    return [asdict(e) for e in table]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Format a table as markdown.

    Args:
        header: Titles of the columns.
        rows: Contents of the cells.
    """
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(table + ["| " + " | ".join(row) + " |" for row in rows])
