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
from unskew.cli.flags import FLAGS, SERVER
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
    run: Annotated[Path | None, typer.Argument()] = None,
    config: ConfigFile = None,
    images: Annotated[Path | None, typer.Option("--synthetic")] = None,
    synthetic_fraction: str = "0,0.1,0.25,0.5,0.75,1",
    sample_clients: Annotated[int, typer.Option(min=0)] = 100,
    samples: Annotated[int, typer.Option(min=0)] = 1000,
    curvature: bool = True,
    epsilon: float | None = None,
    mu: float | None = None,
    traffic: Annotated[str | None, typer.Option("--max-traffic")] = None,
    secure_aggregation: bool = False,
    server_data: Annotated[int | None, typer.Option(min=1)] = None,
    privacy: str | None = None,
    minutes: Annotated[float | None, typer.Option("--validate-minutes", metavar="MINUTES")] = None,
    details: bool = False,
    cost: bool = True,
    sets: Sets = None,
    trust_code: TrustCode = False,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Measure the skew between clients, predict the effect of synthetic data, and recommend methods.

    Options:
        run: Run folder or a checkpoint of a run; by default, a newly initialized model.
        images: Synthetic images: a parquet file, a folder of such files, or a run that generated images.
        synthetic_fraction: Fractions of synthetic data for the prediction.
        sample_clients: Number of clients to measure; 0 for all.
        samples: Number of samples per client; 0 for all.
        curvature: Measure smoothness, which takes most of the time.
        epsilon: Accuracy for which rounds are predicted.
        mu: Strong convexity of the loss, if it is strongly convex.
        traffic: Maximum traffic of the run, up and down, over all clients: 100MB.
        secure_aggregation: The server may see only sums of updates.
        server_data: Number of labeled samples at the server.
        privacy: Privacy budget of data that clients generate and share: epsilon=5.
        minutes: Validate the advice by successive halving for this number of minutes.
        details: Print all measured quantities and the theoretical bounds.
        cost: Estimate the time of each recommended method.
        out: Image file for a plot; none by default.
    """
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
    if out is not None:
        check_place(out)
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
        if out is not None:
            report.plot(out)
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
    if overview["harmonization"]:
        console.print(overview["harmonization"], highlight=False)
    if details:
        for table in heterogeneity_tables(report.as_json()):
            console.print(table)
    else:
        console.print("--details prints all measured quantities and the theoretical bounds.", highlight=False)
    if out is not None:
        report.plot(out)
        console.print(f"plot in {out}", highlight=False, soft_wrap=True)
    print_advice(console, advice, command)
    if minutes is not None:
        with follower(console) as follow:
            trial = validate_advice(advice, minutes, follow)
        print_trial(console, trial)
