"""``unskew deploy diagnose``: statistics of real sites, their skew, and advice, before anything is trained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unskew.cli.common import (
    AsJson,
    DeploymentFolder,
    LocalSites,
    Sets,
    SuperLinkAddress,
    TrustCode,
    config_values,
    console_for,
    given_on_command_line,
    print_json,
    shorten_name,
    unused_path,
)

if TYPE_CHECKING:
    from rich.console import Console

    from unskew.deployment.server.diagnose import SitesDiagnosis

HIDDEN = "fewer than 10"
"""Shown instead of a small number of samples under secure aggregation."""


@given_on_command_line("method", "seed")
def diagnose(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument()] = None,
    file: Annotated[Path | None, typer.Option("--config")] = None,
    sets: Sets = None,
    local: LocalSites = None,
    folder: DeploymentFolder = None,
    superlink: SuperLinkAddress = None,
    own_data: bool = False,
    statistics: str = "",
    traffic: Annotated[str | None, typer.Option("--max-traffic")] = None,
    server_data: Annotated[int | None, typer.Option(min=1)] = None,
    privacy: str | None = None,
    startup_timeout: float = 600.0,
    max_message_mb: float = 2048.0,
    out: Path | None = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure the skew between real sites and recommend methods, from sums over the sites. Nothing is trained.

    Options:
        config: The experiment that the sites have agreed to.
        file: Same as the argument CONFIG.
        own_data: The sites use their own data instead of parts of the experiment's data.
        statistics: Names of the statistics to ask for: counts, missing, histograms, moments, features, gradients, survival;
            by default all that the experiment can use.
        traffic: Maximum traffic of a run, up and down, over all sites: 100MB.
        server_data: Number of labeled samples at the server.
        privacy: Privacy budget of data that sites generate and share: epsilon=5.
        startup_timeout: Seconds to wait until all sites are connected.
        max_message_mb: Largest accepted message from a site, in MB.
        out: Folder for statistics.json and diagnosis.json; runs/DATA-seedN-diagnosis by default.
    """
    from unskew.cli.advice import print_advice
    from unskew.cli.common import escape_lines
    from unskew.cli.diagnose import COMPARED
    from unskew.comparison.folder_name import folder_name
    from unskew.config.loader import experiment, load_yaml
    from unskew.deployment.flower.superlinks import RunLocation
    from unskew.deployment.server.config import Deployment
    from unskew.deployment.server.diagnose import diagnose_sites, write_diagnosis
    from unskew.diagnosis.features import AdviceLimits
    from unskew.expressions import parse_names

    limits: dict[str, Any] = {"traffic": traffic, "server_data": server_data, "privacy": privacy}
    AdviceLimits.read(**limits)  # report mistakes before sites are asked
    checked = experiment(config_values(config, context))
    location = RunLocation(local, folder, superlink)
    location.check()
    deployment = Deployment.of(own_data=own_data, startup_timeout=startup_timeout, max_message_mb=max_message_mb)
    where = out or unused_path(Path("runs") / folder_name(f"{shorten_name(checked)}-seed{checked.seed}-diagnosis"))
    console = console_for(as_json)

    def tell(text: str) -> None:
        console.print(escape_lines(text), highlight=False)

    diagnosis = diagnose_sites(checked, deployment, where, parse_names(statistics), tell, tell, location)
    advice = diagnosis.report.advice(**limits)
    if own_data:
        run = ["unskew", "deploy", "run", str(config), *location.options, "--own-data"]
        methods = [name for name in advice.methods if name != "local"]
        command = "\n".join(shlex.join([*run, "--method", name]) for name in methods)
    else:
        command = advice.command(COMPARED, config, None if config is None else load_yaml(config))
    result = {**diagnosis.as_json(), "advice": {**advice.as_json(), "command": command}}
    write_diagnosis(where, result)
    if as_json:
        print_json(result)
        return
    print_diagnosis(console, diagnosis)
    print_advice(console, advice, command)
    console.print(f"statistics in {where}", highlight=False, soft_wrap=True)


def print_diagnosis(console: Console, diagnosis: SitesDiagnosis) -> None:
    """Print the statistics of the sites, and a sentence on their skew.

    Args:
        console: Console to print to.
        diagnosis: Diagnosis of the sites.
    """
    from unskew.cli.diagnose import SITES_SHOWN
    from unskew.cli.fit_table import table_of
    from unskew.cli.tables import heterogeneity_tables, log_rank_text, shorten, sites_table

    report = diagnosis.report
    overview = report.details
    console.print(
        f"{overview['data']}, {overview['partition']}, {overview['clients']} sites, {overview['model']} with "
        f"{overview['parameters']:,} parameters",
        highlight=False,
    )
    if report.sites.rows:
        console.print(sites_table(report.sites, SITES_SHOWN))
    elif survival := report.sites.pooled.get("survival"):
        known = [f"S({time}) {share:.1%}" for time, share in survival.items() if share is not None]
        events = ", ".join((f"All sites: {report.sites.pooled['events']:,} events", *known))
        console.print(f"{events}. {log_rank_text(report.sites.test)}", highlight=False)
    if diagnosis.classes:
        rows = [(name, HIDDEN if n is None else f"{n:,}") for name, n in diagnosis.classes.items()]
        console.print(table_of(("class", "samples"), rows, "Classes, all sites"))
    if diagnosis.columns:
        names = list(dict.fromkeys(name for row in diagnosis.columns for name in row))
        cells = [[str(row["column"]), *(shorten(row.get(name)) for name in names[1:])] for row in diagnosis.columns]
        console.print(table_of(names, cells, "Columns, all sites"))
    console.print(report.summary(), highlight=False)
    for table in heterogeneity_tables(report.as_json()):
        console.print(table)
    for note in diagnosis.notes:
        console.print(note, highlight=False)
