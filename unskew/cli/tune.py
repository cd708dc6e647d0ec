"""``unskew tune``: tune several methods with equal budgets, then compare them on fresh seeds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.common import (
    SEEDS,
    AsJson,
    ConfigFile,
    References,
    Sets,
    TrustCode,
    config_values,
    confirm_resume_target,
    console_for,
    exit_on_signal,
    given_on_command_line,
    is_config_file,
    parse_seeds,
    print_json,
    repeat_command,
    shorten_name,
    unused_path,
)
from unskew.cli.flags import PANELS
from unskew.cli.report import report_after_runs
from unskew.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from unskew.records.recorder import Callback
    from unskew.tuning.results import TuningResult


@given_on_command_line(*PANELS, without=("method", "early_stopping", "target", "save_samples", "synthetic"))
def tune(
    context: typer.Context,
    methods: list[str],
    trials: int = 20,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help=f"Fresh seeds for the comparison, 3 by default: {SEEDS}")
    ] = None,
    space: list[str] | None = None,
    pruning: bool = True,
    parallel: Annotated[str | None, typer.Option(metavar="N|stacked")] = None,
    references: References = None,
    config: ConfigFile = None,
    sets: Sets = None,
    out: Path | None = None,
    again: Annotated[bool, typer.Option("--resume")] = False,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Tune methods with equal budgets on the clients' held-out samples, then compare them on fresh seeds.

    Options:
        methods: Methods or compositions such as fedprox+scaffold, and optionally a configuration file (.yaml).
        trials: Number of trials per method.
        space: lr=0.001:0.3:log, fedprox.mu=0.01|0.1, batch_size=32, or a .yaml file. Repeatable.
        pruning: Stop trials early if they are worse than most.
        parallel: Processes that run trials, or N@HOST:PORT on a Ray cluster; stacked: train the fresh seeds together with
            the engine vectorized, the default on a GPU (1 switches it off).
        out: Output folder (default: runs/tune-DATA).
        again: Continue the study in --out, also in parallel with another process.
    """
    from unskew.config.loader import experiment
    from unskew.methods.registry import check_expression

    for name in methods:  # report mistakes before PyTorch is loaded
        check_expression(name)
    confirm_resume_target(again, out)
    values = config_values(config, context, ignored=("method",))
    values.pop("method", None)
    checked = experiment(values)
    spaces, fresh = parse_spaces(space or [], trust_code), 3 if seeds is None else parse_seeds(seeds, checked.seed + 1)
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.tuning.tune import tune as tune_methods

    folder = out or unused_path(Path("runs") / f"tune-{shorten_name(checked)}")
    console = console_for(as_json)
    started = time.perf_counter()
    go_on = repeat_command(*([] if out else ["--out", str(folder)]), *([] if again else ["--resume"]))
    with exit_on_signal(folder, go_on), make_progress(console) as progress:

        def follow(title: str) -> list[Callback]:
            trial = ", trial " in title
            return [ProgressLine(progress, title, trial, not trial, named=True, held_out=trial)]

        result = tune_methods(
            methods=methods,
            trials=trials,
            seeds=fresh,
            search_space=spaces,
            out=folder,
            resume=again,
            parallel=int(parallel)
            if parallel is not None and parallel.isdecimal() and len(parallel) < 10
            else parallel,
            pruning=pruning,
            references=references,
            callback_factory=follow,
            **values,
        )
    rows = result.comparison.rows()
    if as_json:
        tuned_methods = {name: tuned.as_json() for name, tuned in result.tuned.items()}
        print_json(
            {
                "folder": str(folder),
                "tuned": tuned_methods,
                "trials": result.trials,
                "rows": rows,
                "notes": result.notes(),
            }
        )
    else:
        from unskew.cli.comparison_tables import clients_table, comparison_tables, metrics_table, print_benefit

        ranked = [row for row in rows if not row["reference"]]
        compared = (*comparison_tables(rows, tuned=True), metrics_table(rows), clients_table(ranked))
        tables = (tuned_table(result), importance_table(result), *compared)
        print_benefit(console, result.comparison)
        for note in result.notes():
            console.print(f"{note}\n")
        for table in filter(None, tables):
            console.print(table)
        for name, tuned in result.tuned.items():
            if isinstance(tuned.importance, str):
                console.print(f"Importance of the options of {name}: {tuned.importance}.", soft_wrap=True)
        seconds = time.perf_counter() - started
        text = f"The tuned configurations are in {folder}/tuned, all trials in {folder}/trials.csv. {seconds:.0f} s."
        console.print(text, highlight=False, soft_wrap=True)
    report_after_runs(console, [folder / "compare"])


def parse_spaces(texts: list[str], trust_code: bool) -> dict[str, Any]:
    """Parse the search spaces of ``--space``: assignments ``NAME=SPACE``, and YAML files of search spaces.

    Args:
        texts: Values of the option.
        trust_code: Whether files may name code to import.

    Raises:
        ConfigError: If a value is not a search space, or an option has two search spaces.
    """
    from unskew.config.loader import load_yaml
    from unskew.config.trust import TRUST, check_spaces

    spaces: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals and not is_config_file(text):
            raise ConfigError(
                f"--space {text!r} is not a search space. Write lr=0.001:0.3:log, batch_size=16|32, or a .yaml file."
            )
        named_spaces = {key: value} if equals else load_yaml(Path(text))
        if not equals and not trust_code:
            check_spaces(named_spaces, text, TRUST)
        for name, space in named_spaces.items():
            if name in spaces:
                raise ConfigError(f"--space sets {name} twice. Remove one of them.")
            spaces[str(name)] = space
    return spaces


def tuned_table(result: TuningResult) -> Table:
    """Build the table of the tuned options of each method."""
    from unskew.cli.comparison_tables import MethodRows

    metric_names = {tuned.judged_by for tuned in result.tuned.values()}
    title = f"Tuned on {', '.join(sorted(metric_names))}"
    table = MethodRows(
        title, list(result.tuned), "as configured", "tuned", "finished", "ended early", "failed", "options"
    )
    table.columns[-1].justify = "left"
    for name, tuned in result.tuned.items():
        options = "\n".join(f"{key}={value}" for key, value in tuned.options.items())
        values = ("-" if value is None else f"{value:.4f}" for value in (tuned.configured, tuned.value))
        table.add_row(name, *values, *map(str, tuned.trials.values()), options)
    return table


def importance_table(result: TuningResult) -> Table | None:
    """Build the table of hyperparameter importances, for the methods for which they are known."""
    from unskew.cli.comparison_tables import MethodRows

    known = {name: tuned.importance for name, tuned in result.tuned.items() if isinstance(tuned.importance, dict)}
    if not known:
        return None
    table = MethodRows("Hyperparameter importance (%)", list(known), "option", "importance")
    table.columns[1].justify = "left"
    for name, shares in known.items():
        for key, share in shares.items():
            table.add_row(name, key, f"{100 * share:.0f}")
    return table
