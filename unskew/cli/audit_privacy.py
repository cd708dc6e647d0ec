"""``unskew audit-privacy``: empirical epsilon of a private run, from canary clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import AsJson, TrustCode, console_for, print_json
from unskew.filesystem import check_run, parse_path


def audit_privacy(
    run: Annotated[Path, typer.Argument(parser=parse_path)],
    canaries: Annotated[int, typer.Option(min=5)] = 50,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Repeat a private run with canary clients and compare its epsilon with what the model reveals of them.

    Options:
        run: Run folder of a run with dp.
        canaries: Number of canaries; at most half of the clients.
    """
    check_run(run)
    from unskew.cli.fit_table import ReflowTable
    from unskew.cli.progress import progress_while_waiting
    from unskew.runs.privacy_audit import audit_privacy as audit

    with progress_while_waiting("audit-privacy"):
        result = audit(run, canaries, trust_code)
    if as_json:
        print_json(result.as_dict())
        return
    console = console_for()
    table = ReflowTable()
    for title in ("promised epsilon", "estimate", "lower bound (95 %)", "delta", "canaries"):
        table.add_column(title, justify="right")
    promised = "none" if result.epsilon is None else f"{result.epsilon:.3g}"
    table.add_row(
        promised, f"{result.estimate:.3g}", f"{result.lower_bound:.3g}", f"{result.delta:.2g}", str(result.canaries)
    )
    console.print(table)
    if result.epsilon is not None and result.lower_bound > result.epsilon:
        console.print(
            "The lower bound exceeds the promised epsilon: the guarantee does not hold. Please report this run."
        )
    elif result.epsilon is None:
        console.print("The run adds no noise, so its model reveals who took part.")
    else:
        console.print(
            "The lower bound is below the promised epsilon, as it must be; this does not prove the guarantee."
        )
