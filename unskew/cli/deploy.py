"""``unskew deploy``: run a simulated experiment across real sites with Flower."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli import diagnose_sites, operate
from unskew.cli.common import (
    AsJson,
    ConfigFile,
    DeploymentFolder,
    LocalSites,
    Rounds,
    Sets,
    SuperLinkAddress,
    TrustCode,
    config_values,
    console_for,
    exit_on_signal,
    given_on_command_line,
    print_json,
    shorten_name,
    unused_path,
)
from unskew.cli.flags import DocumentedCommands
from unskew.errors import ConfigError
from unskew.filesystem import parse_path

deploy = DocumentedCommands(
    help="Train across real sites with Flower, with the same methods and run folders as in simulation.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


for command in (
    diagnose_sites.diagnose,
    operate.status,
    operate.sites,
    operate.log,
    operate.stop,
    operate.exclude,
    operate.register,
):
    deploy.command()(command)


@deploy.command()
@given_on_command_line("method", "seed")
def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(parser=parse_path, metavar="FOLDER")],
    config: ConfigFile = None,
    sets: Sets = None,
    trust_code: TrustCode = False,
) -> None:
    """Write the files of a deployment: app, site configuration, scripts for keys, systemd units, Docker Compose.

    Options:
        folder: Folder to write.
    """
    from unskew.config.loader import experiment
    from unskew.deployment.flower.project_files import init_project as write_folder
    from unskew.deployment.server.site_clients import check_deployable

    if config is None:
        raise ConfigError("Set --config to the experiment that was simulated, such as --config experiment.yaml.")
    checked = experiment(config_values(config, context))
    check_deployable(checked)
    files = write_folder(folder, checked)
    console = console_for()
    for file in files:
        console.print(str(file), highlight=False, soft_wrap=True)
    console.print(f"Start with {files[0]}.", highlight=False, soft_wrap=True)


@deploy.command()
def check(
    file: Annotated[Path, typer.Argument(parser=parse_path, metavar="SITE.yaml")],
    as_json: AsJson = False,
) -> None:
    """Check a site before it connects: read its data, show what will be sent, and test certificates and clock.

    Options:
        file: The site's configuration, site.yaml.
    """
    from dataclasses import asdict

    from rich.text import Text

    from unskew.cli.fit_table import table_of
    from unskew.deployment.site.check import check_site as findings_of

    findings = list(findings_of(file))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        words = {True: "ok", False: "WRONG", None: ""}
        rows = [(finding.what, words[finding.ok], Text(finding.text)) for finding in findings]
        console_for().print(table_of(("check", "", "result"), rows, f"{file}"))
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(2)


@deploy.command()
def site(
    file: Annotated[Path, typer.Argument(parser=parse_path, metavar="SITE.yaml")],
) -> None:
    """Run the process of a site that has the data and trains; the site's SuperNode forwards messages to it.

    Options:
        file: The site's configuration, site.yaml.
    """
    from unskew.deployment.site.listener import serve_site

    serve_site(file)


@deploy.command()
def forget(
    file: Annotated[Path, typer.Argument(parser=parse_path, metavar="SITE.yaml")],
) -> None:
    """Forget the statistics that a site has sent, so that it replies again after a change of few rows.

    Options:
        file: The site's configuration, site.yaml.
    """
    from unskew.deployment.site.config import load_site_config
    from unskew.deployment.site.ledger import FILE as LEDGER
    from unskew.deployment.site.ledger import SumsLedger
    from unskew.deployment.site.statistics_ledger import StatisticsLedger

    state = load_site_config(file).path("state", file.parent.absolute())
    forgotten = StatisticsLedger(state).forget()
    SumsLedger(state / LEDGER, "").forget()
    grids = ", ".join(forgotten.grids) or "no column"
    lines = (
        f"Forgotten: {len(forgotten.replies)} stored replies, hashes of {len(forgotten.data)} data sets, the data schema of "
        f"inputs, and the grids of {grids}, with lists of classes and constants of masked sums. Not forgotten: the privacy "
        f"losses, {forgotten.spent:g} in total.",
        "The site now computes requested statistics again. Whoever has the earlier replies can compare: the difference shows "
        "the rows that have changed since, even a single one; noise that is drawn again can be averaged; two grids of a "
        "column show finer cells, two data schemas smaller groups. Masked sums of statistics may be over other clients.",
    )
    for line in lines:
        console_for().print(line, highlight=False, soft_wrap=True)


@deploy.command()
@given_on_command_line("method", "seed")
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument()] = None,
    file: Annotated[Path | None, typer.Option("--config")] = None,
    rounds: Rounds = None,
    sets: Sets = None,
    local: LocalSites = None,
    folder: DeploymentFolder = None,
    superlink: SuperLinkAddress = None,
    own_data: bool = False,
    startup_timeout: float = 600.0,
    round_timeout: float | None = None,
    min_updates: Annotated[int, typer.Option(min=1)] = 1,
    on_timeout: str = "wait",
    asynchronous: bool = False,
    quorum: Annotated[int | None, typer.Option(min=1)] = None,
    max_invalid_replies: Annotated[int, typer.Option(min=1)] = 3,
    max_message_mb: float = 2048.0,
    max_norm: float = 1e6,
    exact: bool = False,
    out: Path | None = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment across sites, and write the same run folder as unskew run.

    Options:
        config: The experiment that was simulated; flags override it.
        file: Same as the argument CONFIG.
        own_data: The sites use their own data instead of parts of the experiment's data.
        startup_timeout: Seconds to wait until all sites are connected.
        round_timeout: Seconds to wait for updates in a round; no limit by default.
        min_updates: Minimum number of updates per round.
        on_timeout: With fewer updates after the timeout: wait, continue or abort.
        asynchronous: Accept updates whenever they arrive, also in later rounds.
        quorum: Start with this number of sites; others may join and leave between rounds.
        max_invalid_replies: Exclude a site after this many invalid replies.
        max_message_mb: Largest accepted message from a site, in MB.
        max_norm: Largest accepted norm of a tensor from a site.
        exact: Reject sites with other versions or CPU instructions than the server's.
        out: Run folder; runs/DATA-METHOD-seedN-sites by default.
    """
    from unskew.config.loader import experiment

    values = config_values(config, context)
    if rounds is not None:
        values["rounds"] = rounds
    checked = experiment(values)
    from unskew.cli.common import show
    from unskew.cli.progress import ProgressLine, make_progress
    from unskew.comparison.folder_name import folder_name
    from unskew.deployment.flower.superlinks import RunLocation
    from unskew.deployment.server.config import Deployment, RoundPolicy
    from unskew.deployment.server.run import run as run_deployed

    location = RunLocation(local, folder, superlink)
    location.check()
    deployment = Deployment.of(
        own_data=own_data,
        startup_timeout=startup_timeout,
        round_policy=RoundPolicy(round_timeout, min_updates, on_timeout, max_invalid_replies),  # type: ignore[arg-type]
        asynchronous=asynchronous,
        quorum=quorum,
        max_message_mb=max_message_mb,
        max_norm=max_norm,
        exact=exact,
    )
    name = folder_name(f"{shorten_name(checked)}-{checked.method}-seed{checked.seed}-sites")
    where = out or unused_path(Path("runs") / name)
    console = console_for(as_json)
    again = shlex.join(["unskew", "resume", str(where), *location.options, *(["--trust-code"] if trust_code else [])])

    def tell(text: str) -> None:
        console.print(text, highlight=False)

    with exit_on_signal(where, again), make_progress(console) as progress:
        follower: Any = ProgressLine(progress, checked.method, columns=True)
        result = run_deployed(checked, deployment, where, [follower], tell, location)
    show(result, where, console, as_json)


@deploy.command()
def evaluate(
    run: Annotated[Path, typer.Argument(parser=parse_path, metavar="RUN")],
    models: str = "global",
    cross: bool = False,
    metrics: str = "",
    level: float = 0.95,
    local: LocalSites = None,
    folder: DeploymentFolder = None,
    superlink: SuperLinkAddress = None,
    out: Path | None = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate the models of a finished run at its sites; only metrics leave a site, no predictions.

    Options:
        run: Folder of a finished run.
        models: Models to evaluate, separated by commas: global, local (trained at each site alone), personal.
        cross: Also evaluate the model that each site has trained alone at every other site.
        metrics: Metrics to report, separated by commas, such as accuracy,auroc; all by default.
        level: Level of the intervals.
        out: Write the metrics to this JSON file; evaluation.json in the run folder by default.
    """
    from unskew.cli.evaluate import site_tables
    from unskew.deployment.flower.superlinks import RunLocation
    from unskew.deployment.server.evaluation import POOLED, EvaluationPlan, evaluate_run

    location, console = RunLocation(local, folder, superlink), console_for(as_json)
    location.check()
    names, chosen = ([name.strip() for name in text.split(",") if name.strip()] for text in (models, metrics))

    def tell(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if "pooled" in names:
        tell(POOLED)
    plan = EvaluationPlan(tuple(name for name in names if name != "pooled"), cross, tuple(chosen), level)
    rows = evaluate_run(run, plan, location, tell, out, trust_code)
    if as_json:
        print_json(rows)
        return
    for table in site_tables(rows):
        console.print(table)
