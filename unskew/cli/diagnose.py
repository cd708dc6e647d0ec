"""``unskew diagnose``: measure skew between clients, predict the effect of synthetic data, and recommend methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import (
    AsJson,
    ConfigFile,
    Sets,
    TrustCode,
    config_values,
    console_for,
    given_on_command_line,
    print_json,
)
from unskew.cli.flags import FLAGS, SERVER, path_option
from unskew.errors import ConfigError

COMPARED = frozenset(FLAGS) - {"method", "seed", "save_samples"}
"""Fields for which ``unskew compare`` has a flag."""
SITES_SHOWN = 30
"""Maximum number of clients in the table; ``--json`` has all of them."""


@given_on_command_line(
    *("Data", "model", "rounds", "participation", "local_steps", "local_epochs", "batch_size", "lr"),
    *("loss", "class_weights", "seed", "device"),
    without=SERVER,
)
def diagnose(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(help="Run folder or a checkpoint of a run; by default, a newly initialized model.")
    ] = None,
    config: ConfigFile = None,
    images: Annotated[
        Path | None,
        path_option(
            "--synthetic",
            help="Synthetic images: a parquet file, a folder of such files, or a run that generated images.",
        ),
    ] = None,
    synthetic_fraction: Annotated[
        str, typer.Option("--synthetic-fraction", help="Fractions of synthetic data for the prediction.")
    ] = "0,0.1,0.25,0.5,0.75,1",
    sample_clients: Annotated[
        int, typer.Option("--sample-clients", min=0, help="Number of clients to measure; 0 for all.")
    ] = 100,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Number of samples per client; 0 for all.")] = 1000,
    curvature: Annotated[
        bool, typer.Option("--curvature/--no-curvature", help="Measure smoothness, which takes most of the time.")
    ] = True,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="Accuracy for which rounds are predicted.")] = None,
    mu: Annotated[
        float | None, typer.Option("--mu", help="Strong convexity of the loss, if it is strongly convex.")
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option("--max-traffic", help="Maximum traffic of the run, up and down, over all clients: 100MB."),
    ] = None,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="The server may see only sums of updates.")
    ] = False,
    server_data: Annotated[
        int | None, typer.Option("--server-data", min=1, help="Number of labeled samples at the server.")
    ] = None,
    privacy: Annotated[
        str | None, typer.Option("--privacy", help="Privacy budget of data that clients generate and share: epsilon=5.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--validate-minutes",
            metavar="MINUTES",
            help="Validate the advice by successive halving for this number of minutes.",
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print all measured quantities and the theoretical bounds.")
    ] = False,
    cost: Annotated[
        bool, typer.Option("--cost/--no-cost", help="Estimate the time of each recommended method.")
    ] = True,
    sets: Sets = None,
    trust_code: TrustCode = False,
    out: Annotated[
        Path | None,
        path_option("--out", help="Image file for the plot; diagnosis.png by default, no plot by default with --json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the skew between clients, predict the effect of synthetic data, and recommend methods."""
    from unskew.cli.advice import follower, print_advice, print_trial
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.cli.tables import heterogeneity_tables, sites_table
    from unskew.config.loader import load_yaml
    from unskew.diagnosis.diagnose import diagnose as measure
    from unskew.diagnosis.features import AdviceLimits
    from unskew.diagnosis.successive_halving import check_minutes, validate_advice
    from unskew.plots.figure import check_place
    from unskew.progress import report_progress_to

    AdviceLimits.read(traffic, secure_aggregation, server_data, privacy)  # report mistakes before anything is measured
    if minutes is not None:
        check_minutes(minutes)
    options: dict[str, Any] = config_values(config, context)
    file_values = None if config is None else load_yaml(config)
    try:
        shares = [float(part) for part in synthetic_fraction.split(",")]
    except ValueError:
        raise ConfigError(
            f"--synthetic-fraction {synthetic_fraction!r} must be a list of fractions such as 0,0.5,1."
        ) from None
    plot = out if out is not None or as_json else Path("diagnosis.png")
    if plot is not None:
        check_place(plot)
    model_name, stored = options.pop("model", None), options.pop("synthetic", None)
    console = console_for(as_json)
    with (
        make_progress(console, transient=True) as progress,
        report_progress_to(tell := ProgressLine(progress, "diagnose").prepare),
    ):
        report = measure(
            run=run,
            model=model_name,
            synthetic=images if images is not None else stored,
            synthetic_fractions=shares,
            sample_clients=sample_clients or None,
            samples=samples or None,
            curvature=curvature,
            epsilon=epsilon,
            mu=mu,
            progress=tell,
            **options,
        )
        advice = report.advice(
            traffic=traffic, secure_aggregation=secure_aggregation, server_data=server_data, privacy=privacy
        )
        if cost:
            advice = advice.with_costs()
    command = advice.command(COMPARED, config, file_values)
    # Print the results before writing the plot, which may fail, for instance on a full disk.
    if as_json:
        output = {"summary": report.summary(), **report.as_json(), "advice": {**advice.as_json(), "command": command}}
        if minutes is not None:
            with follower(console) as follow:
                output["trial"] = validate_advice(advice, minutes, follow).as_json()
        print_json(output)
        if plot is not None:
            report.plot(plot)
        return
    overview = report.details
    console.print(
        f"{overview['data']}, {overview['partition']}, "
        f"{overview['clients_measured']} of {overview['clients']} clients, "
        f"{overview['model']} with {overview['parameters']:,} parameters",
        highlight=False,
    )
    console.print(sites_table(report.sites, SITES_SHOWN))
    for line in (report.summary(), *overview["leaks"]):
        console.print(line, highlight=False, soft_wrap=line in overview["leaks"])
    if details:
        for table in heterogeneity_tables(report.as_json()):
            console.print(table)
    else:
        console.print("--details prints all measured quantities and the theoretical bounds.", highlight=False)
    if plot is not None:
        report.plot(plot)
        console.print(f"plot in {plot}", highlight=False, soft_wrap=True)
    print_advice(console, advice, command)
    if minutes is not None:
        with follower(console) as follow:
            trial = validate_advice(advice, minutes, follow)
        print_trial(console, trial)
