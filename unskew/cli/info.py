"""Commands that show information: ``methods``, ``models``, ``partition``, and ``--version``."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import AsJson, ConfigFile, Sets, config_values, console_for, given_on_command_line, print_json
from unskew.cli.flags import SERVER
from unskew.cli.verbosity import LOUDNESS
from unskew.errors import ConfigError, UnskewError
from unskew.filesystem import user_cache, write_atomic


def methods(
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: AsJson = False,
) -> None:
    """List all methods with slots, options and papers, including plugins of other packages; or describe one method.

    Options:
        name: Method to describe: its options, and methods that it conflicts with.
    """
    from unskew.cli.plugin_listing import plugin_data_and_partitions, plugin_methods
    from unskew.cli.tables import methods_table, print_method
    from unskew.methods.conflicts import conflicts, grouped_conflicts
    from unskew.methods.descriptions import describe_method
    from unskew.methods.registry import COMPOSITIONS

    if name is not None:
        row = describe_method(name)
        if as_json:
            print_json({**row, "conflicts": conflicts(name)})
        else:
            print_method(console_for(), row, grouped_conflicts(name))
        return
    registered = described()
    rows = [*registered, *plugin_methods()]
    if as_json:
        print_json([*rows, *composition_rows(registered)])
        return
    console = console_for()
    console.print(methods_table(rows))
    for name, (expression, paper) in COMPOSITIONS.items():
        console.print(f"{name} is a name for {expression} ({paper}).", highlight=False)
    for line in plugin_data_and_partitions():
        console.print(line, highlight=False)


def composition_rows(registered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe the names of published compositions like methods, with the ``expression`` that each name stands for.

    Args:
        registered: Rows of the registered methods.
    """
    from unskew.methods.registry import COMPOSITIONS

    rows: list[dict[str, Any]] = []
    row_of = {row["name"]: row for row in registered}
    for name, (expression, paper) in COMPOSITIONS.items():
        parts = [row_of[part.partition(":")[0]] for part in expression.split("+")]
        rows.append(
            {
                "name": name,
                "slots": list(dict.fromkeys(slot for part in parts for slot in part["slots"])),
                "summary": f"a name for {expression}",
                "needs": "individual" if any(part["needs"] == "individual" for part in parts) else "sum",
                "tasks": [task for task in parts[0]["tasks"] if all(task in part["tasks"] for part in parts)],
                "delays": all(part["delays"] for part in parts),
                "options": {},
                "meanings": {},
                "paper": paper,
                "expression": expression,
            }
        )
    return rows


def described() -> list[dict[str, Any]]:
    """Return ``unskew.methods.descriptions.describe_all()``, cached in the user's cache until the source files change.

    Without the cache, the classes must be imported, and with them PyTorch, which takes most of the time.
    """
    package = Path(__file__).parents[1]
    sources = sorted([*(package / "methods").rglob("*.py"), *(package / "protocol").glob("*.py")])
    stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sources]
    key = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]
    cache = user_cache()
    cache_file = cache / f"methods-{key}.json"
    try:
        rows: list[dict[str, Any]] = json.loads(cache_file.read_bytes())
        return rows
    except (OSError, ValueError):
        from unskew.methods.descriptions import describe_all

        rows = json.loads(json.dumps(describe_all()))
    with contextlib.suppress(OSError, UnskewError):
        cache.mkdir(parents=True, exist_ok=True)
        for former in cache.glob("methods-*.json"):
            former.unlink()
        write_atomic(cache_file, json.dumps(rows).encode())
    return rows


def models(
    model: Annotated[str | None, typer.Argument()] = None,
    shape: str | None = None,
    classes: Annotated[int | None, typer.Option(min=1)] = None,
    split: Annotated[int | None, typer.Option(min=0)] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """List all models, or the layers of one model with their sizes and the split into body and head.

    Options:
        model: A name, hf:NAME, or package.module:factory; by default, all models are listed.
        shape: Shape of one input, channels first; 3,32,32 by default, 8 (tokens) for hf:NAME.
        classes: Number of classes; 10 by default; hf:NAME is then a language model.
        split: Number of layers in the body; all but the head by default.
    """
    from unskew.cli.model_summary import grouping_note, layer_rows, model_spec
    from unskew.cli.plugin_listing import plugin_models
    from unskew.cli.tables import layers_table, models_table
    from unskew.models.registry import MODELS

    if model is None:
        rows: list[dict[str, Any]] = [
            {
                "name": m.name,
                "description": m.description,
                "reference": m.reference,
                "groupable": not (m.pretrained or m.texts),
            }
            for m in MODELS.values()
        ]
        rows += plugin_models()
        print_json(rows) if as_json else console_for().print(models_table(rows))
        return
    spec = model_spec(model, shape, classes, sets or [])
    layers = layer_rows(spec, split)
    print_json(layers) if as_json else console_for().print(layers_table(model, layers), grouping_note(spec))


@given_on_command_line("Data", "seed", without=SERVER)
def partition(
    context: typer.Context,
    source: Annotated[str | None, typer.Argument(metavar="DATA")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    out: Path | None = None,
    clients_shown: Annotated[int, typer.Option(min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the label distribution across clients as a table and a plot, and the partition's hash.

    Options:
        source: Data source, or a configuration file (.yaml).
        out: Image file for a plot; none by default.
        clients_shown: Maximum number of clients in the table.
    """
    from unskew.config.loader import experiment

    values = config_values(config, context)
    values.pop("method", None)
    if source is not None:
        if context.params.get("data") is not None:
            raise ConfigError(
                f"The data are set twice: {source} and --data {context.params['data']}. Remove one of them."
            )
        values["data"] = source
    checked = experiment({**values, "holdout": 0.0})
    from unskew.cli.progress import progress_while_waiting
    from unskew.cli.tables import columns_table, partition_table, sites_table
    from unskew.data.leaks import find_leaks
    from unskew.data.load import federation_of
    from unskew.measurements.site_differences import site_differences
    from unskew.plots.curves import plot_clients_by_class

    with progress_while_waiting("partition"):
        fed = federation_of(checked.data_spec, checked.seed)
        if (
            fed.objective.statistics
        ):  # as in a run, default horizons are those of the training rows without held-out ones
            run = federation_of(experiment(values).data_spec, checked.seed)
            fed = replace(fed, trained_for=run.objective, classes=run.classes, class_names=run.class_names)
        leaks = find_leaks(checked.data_spec)
    counts, names = fed.label_distribution()
    # If each client has one text group, the table of clients by groups is diagonal, so sizes are sufficient.
    diagonal = fed.objective.tokens and names == fed.client_names
    shown_counts = fed.sizes[:, None] if diagonal else counts
    shown_names = ("samples",) if diagonal else names
    if out is not None:
        title = f"{fed.name}, {fed.partition}, seed {checked.seed}"
        plot_clients_by_class(
            shown_counts, shown_names, out, title, client_names=fed.client_names, exclusive=fed.objective.exclusive
        )
    numbers = fed.objective.numeric_labels
    sites = site_differences(fed, features=checked.features) if fed.columns or numbers else None
    between = sites.between if sites is not None and numbers and not fed.objective.outcome else {}
    if as_json:
        sizes = fed.sizes
        print_json(
            {
                "data": fed.name,
                "partition": fed.partition,
                "clients": len(fed.clients),
                "seed": checked.seed,
                "hash": fed.fingerprint,
                "smallest": int(sizes.min()),
                "largest": int(sizes.max()),
                "class_names": list(names),
                "client_names": list(fed.client_names),
                "counts": counts.tolist(),
                "leaks": leaks,
                **({} if sites is None else {"sites": sites.rows}),
                **({} if sites is None or sites.test is None else {"log_rank": sites.test}),
                **({"variance_between_clients": between} if between else {}),
            }
        )
        return
    console = console_for()
    if fed.columns:
        console.print(columns_table(fed.columns))
    if not numbers:
        console.print(partition_table(shown_counts, shown_names, clients_shown, fed.sizes, fed.client_names))
    if sites is not None:
        console.print(sites_table(sites, clients_shown))
    shares = [f"{share:.0%} of the variance of {name} is between clients, " for name, share in between.items()]
    plot = f"plot in {out}" if out is not None else "--out clients.png plots it"
    line = f"{''.join(shares)}partition hash {fed.fingerprint}, {plot}"
    for text in (line, *leaks):
        console.print(text, highlight=False, soft_wrap=True)


START = """unskew: federated learning on data that differ between clients

  unskew init patients.csv          write experiment.yaml for your own data
  unskew run --rounds 20            train one model with FedAvg, on a small data set
  unskew compare fedavg scaffold    compare methods on the same data
  unskew diagnose                   measure the skew and get advice
  unskew --help                     list all commands"""
"""Output of ``unskew`` without a command."""


def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version")] = False,
    quiet: bool = False,
    verbose: bool = False,
    log_json: bool = False,
) -> None:
    """Federated learning on skewed data: run, compare and resume composable methods.

    Options:
        show: Print the version.
        quiet: Print only results, warnings and errors. Allowed after any command.
        verbose: Print a line per round, and the traceback of errors.
        log_json: Print rounds, warnings and errors as JSON lines to standard error; no progress.
    """
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose cannot be combined. Use one of them.")
    if log_json and verbose:
        raise ConfigError("--log-json and --verbose cannot be combined: the JSON lines have all metrics of a round.")
    LOUDNESS.quiet, LOUDNESS.verbose = quiet or log_json, verbose
    LOUDNESS.log_json = log_json
    if show:
        from unskew.version import __version__

        print(f"unskew {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(START)
