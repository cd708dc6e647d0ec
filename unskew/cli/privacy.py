"""Command ``privacy``: epsilon of a private run, or the noise for an epsilon."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from unskew.cli.common import AsJson, console_for, print_json
from unskew.errors import ConfigError, unknown_name

SAMPLING = ("poisson", "fixed")
TITLES = {
    "rdp": "RDP",
    "prv": "PRV, upper bound",
    "exact": "exact, without amplification",
    "skellam": "RDP, noise at the sites",
}
ASSUMES = {
    "rdp": "Poisson cohorts",
    "prv": "Poisson cohorts",
    "exact": "any cohorts, also predictable ones",
    "skellam": "honest clients add their noise",
}
NEIGHBORS = "Neighboring data sets differ in one client, added or removed."
WITHOUT_DATA = "Neighboring data sets differ in one client, whose data are replaced by none."


def privacy(
    clients: Annotated[int, typer.Option(min=2)],
    rounds: Annotated[int, typer.Option(min=1)],
    cohort: Annotated[int | None, typer.Option(min=1)] = None,
    participation: float | None = None,
    noise: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    sampling: str = "poisson",
    parameters: Annotated[int | None, typer.Option(min=1)] = None,
    honest: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Compute epsilon of client-level differential privacy, or the noise that an epsilon needs.

    Options:
        clients: Number of clients K.
        rounds: Communication rounds.
        cohort: Clients per round; the mean number if Poisson.
        participation: Share of clients per round, instead of --cohort.
        noise: Noise multiplier, for which epsilon is computed.
        epsilon: Privacy budget, for which the noise multiplier is computed.
        delta: Delta of the guarantee. [default: K^-1.1]
        sampling: Cohorts: poisson or fixed (of equal size).
        parameters: Number of model parameters, to show the norm of the noise.
        honest: Noise at the sites: clients of every sum that add theirs.
    """
    if sampling not in SAMPLING:
        raise ConfigError(unknown_name("sampling", sampling, SAMPLING))
    if (noise is None) == (epsilon is None):
        raise ConfigError("Use either --noise, to compute epsilon, or --epsilon, to compute the noise.")
    from unskew.privacy.accounting import LARGEST_NOISE, check_delta, default_delta

    if noise is not None and not 0 < noise <= LARGEST_NOISE:
        raise ConfigError(f"--noise is {noise:g}; it must be above 0 and at most {LARGEST_NOISE:g}.")
    size = cohort_size(clients, cohort, participation, sampling)
    if honest is not None and (sampling != "fixed" or parameters is None or honest > size):
        raise ConfigError(
            "--honest (noise at the sites) needs --sampling fixed, at least that number of clients per round, and "
            "--parameters, because rounding depends on their number."
        )
    delta = default_delta(clients) if delta is None else delta
    check_delta(delta, clients)
    setting = {
        "clients": clients,
        "cohort": size,
        "sampling": sampling,
        "rounds": rounds,
        "delta": delta,
        "noise": noise,
        "target_epsilon": epsilon,
        "parameters": parameters,
        "honest": honest,
    }
    rows = privacy_rows(setting)
    notes = privacy_notes(setting, rows)
    if as_json:
        print_json({**setting, "rows": rows, "notes": notes})
        return
    console = console_for()
    console.print(privacy_table(setting, rows))
    for note in notes:
        console.print(note, highlight=False)


def cohort_size(clients: int, cohort: int | None, participation: float | None, sampling: str) -> float:
    """Return the number of clients per round, or the mean number with Poisson cohorts.

    Args:
        clients: Number of clients.
        cohort: Clients per round, or None.
        participation: Share of clients per round, or None.
        sampling: ``poisson`` or ``fixed``.

    Raises:
        ConfigError: If not exactly one of ``cohort`` and ``participation`` is set, or it is out of its range.
    """
    if participation is None:
        if cohort is None:
            raise ConfigError("Set the clients per round with --cohort, or their share with --participation.")
        if cohort > clients:
            raise ConfigError(f"--cohort {cohort} is larger than the number of clients, {clients}.")
        return cohort
    if cohort is not None:
        raise ConfigError("--cohort and --participation set the same quantity. Remove one of them.")
    if not 0 < participation <= 1:
        raise ConfigError(f"--participation is {participation:g}; it must be above 0 and at most 1.")
    return participation * clients if sampling == "poisson" else max(1, round(participation * clients))


def round_up(value: float, digits: int) -> float:
    """Round a positive number to significant digits, up if necessary, so that the result is not smaller.

    Args:
        value: Number.
        digits: Number of significant digits.

    >>> round_up(9.213, 3), round_up(1.2, 4)
    (9.22, 1.2)
    """
    shown = float(f"{value:.{digits}g}")
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1) if value > 0 else 0.0
    return shown if shown >= value else float(f"{shown + unit:.{digits}g}")


def privacy_rows(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Compute epsilon or the noise with each accountant that applies.

    Args:
        setting: Options of the command; ``noise`` or ``target_epsilon`` is None.

    Returns:
        Rows with ``accountant``, ``assumes``, ``epsilon`` (None: infinite), ``epsilon_replaced`` (if a client is replaced, or
        another one takes its place; None with amplification), ``noise`` (if computed, rounded up to four digits),
        ``adaptive_noise`` (noise multiplier of the update under adaptive clipping; None: impossible), ``smallest_cohort``
        (for adaptive clipping) and ``noise_norm`` (norm of the noise in the mean update divided by the clipping norm; None:
        the number of parameters is not set).
    """
    from unskew.privacy import accounting

    if setting["honest"] is not None:
        return [_row_of_sites(setting)]
    size, rounds, delta = setting["cohort"], setting["rounds"], setting["delta"]
    rate = size / setting["clients"]
    is_amplified = setting["sampling"] == "poisson" and rate < 1
    rows = []
    for name in (*(accounting.ACCOUNTANTS if is_amplified else ()), "exact"):
        accountant, claimed = ("rdp", 1.0) if name == "exact" else (name, rate)
        noise = setting["noise"]
        if noise is None:
            noise = round_up(accounting.noise_for(setting["target_epsilon"], delta, claimed, rounds, accountant), 4)
        history = [accounting.GaussianRounds(noise, claimed, rounds)]
        spent, replaced = accounting.epsilon(history, delta, accountant), accounting.replaced_epsilon(history, delta)
        smallest, bit_noise = accounting.smallest_cohort(noise), size / accounting.COHORT_PER_BIT_NOISE
        rows.append(
            {
                "accountant": name,
                "assumes": ASSUMES[name],
                "epsilon": spent if math.isfinite(spent) else None,
                "epsilon_replaced": replaced if replaced is None or math.isfinite(replaced) else None,
                "noise": noise,
                "adaptive_noise": accounting.split_noise(noise, bit_noise) if noise < 2 * bit_noise else None,
                "smallest_cohort": smallest,
                "noise_norm": noise * math.sqrt(setting["parameters"]) / size if setting["parameters"] else None,
            }
        )
    return rows


def _row_of_sites(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the row of noise at the sites; it does not depend on the clipping norm, which is 1 here."""
    from unskew.privacy import skellam

    honest, size, parameters = setting["honest"], int(setting["cohort"]), setting["parameters"]
    delta, rounds, noise = setting["delta"], setting["rounds"], setting["noise"]
    if noise is None:
        target = setting["target_epsilon"]
        noise = round_up(skellam.skellam_noise_for(target, delta, 1.0, parameters, honest, size, rounds), 4)
    grid = skellam.skellam_grid(1.0, noise, parameters, honest, size)
    return {
        "accountant": "skellam",
        "assumes": ASSUMES["skellam"],
        "epsilon": skellam.skellam_epsilon([grid.rounds(rounds)], delta),
        "epsilon_replaced": skellam.skellam_epsilon([grid.rounds(rounds).doubled()], delta),
        "noise": noise,
        "adaptive_noise": None,
        "smallest_cohort": None,
        "noise_norm": noise * math.sqrt(parameters * size / honest) / size,
    }


def privacy_notes(setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Write the sentences below the table.

    Args:
        setting: Options of the command.
        rows: Rows of the table.
    """
    rate = setting["cohort"] / setting["clients"]
    notes = [NEIGHBORS]
    if setting["sampling"] == "fixed":
        other = rows[-1]["epsilon_replaced"]
        value = "infinite" if other is None else f"{round_up(other, 3):g}"
        notes = [f"{NEIGHBORS} If it is replaced by another one, epsilon is {value}."]
        if setting["honest"] is not None:
            notes = [f"{WITHOUT_DATA} If they are replaced by other data or another client, epsilon is {value}."]
        elif rate < 1:
            notes = [
                f"{WITHOUT_DATA} If a client is added, removed or replaced, another one takes its place in a cohort, and "
                f"epsilon is {value}."
            ]
    if setting["honest"] is not None:
        row = rows[0]
        return [
            *notes,
            f"Noise at the sites: the guarantee holds also against the server, if at least {setting['honest']} clients of "
            "every sum add their noise and do not reveal it. No amplification by sampling, no adaptive clipping.",
            f"If all {setting['cohort']:g} clients of a round add their noise, the norm of the noise in the mean update is "
            f"{row['noise_norm']:.3g} C for {setting['parameters']:,} parameters.",
        ]
    if rate == 1:
        notes.append("All clients take part in every round, so there is no amplification by sampling.")
    elif setting["sampling"] == "fixed":
        notes.append(
            "No amplification by sampling is claimed for cohorts of a fixed size; `sampling: poisson` would give it."
        )
    else:
        notes.append(
            f"Poisson cohorts: each client takes part in a round with probability {rate:.3g}, independently of the others, "
            "and nobody can predict the cohort."
        )
    if setting["noise"] is None:
        notes.append(
            "Under adaptive clipping, the update needs more noise, because the clipping bit is also released, with noise "
            "cohort / 20."
        )
    else:
        notes.append(_adaptive_note(rows[0], setting["cohort"]))
    if setting["parameters"]:
        values = "" if setting["noise"] is None else f" = {rows[0]['noise_norm']:.3g} C"
        ratio = (
            "at most C divided by this norm" if setting["noise"] is None else f"at most {1 / rows[0]['noise_norm']:.3g}"
        )
        notes.append(
            f"For d = {setting['parameters']:,} parameters and m = {setting['cohort']:g} clients per round, the norm of the "
            f"noise in the mean update is z sqrt(d) / m{values}. If every update has the clipping norm C, the "
            f"signal-to-noise ratio is {ratio}."
        )
    return notes


def _adaptive_note(row: dict[str, Any], size: float) -> str:
    if row["adaptive_noise"] is None:
        return (
            f"Adaptive clipping is not possible with cohorts of {size:g}: noise {row['noise']:g} needs a cohort of at least "
            f"{row['smallest_cohort']}."
        )
    return f"Under adaptive clipping, the noise multiplier of the update is {row['adaptive_noise']:.5g}."


def privacy_table(setting: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    """Build the table of the command.

    Args:
        setting: Options of the command.
        rows: Rows of the table.
    """
    from rich.box import SIMPLE_HEAD

    from unskew.cli.fit_table import ReflowTable

    wanted = f"epsilon {setting['target_epsilon']:g}" if setting["noise"] is None else f"noise {setting['noise']:g}"
    size = f"cohorts of {setting['cohort']:g}{' on average' if setting['sampling'] == 'poisson' else ''}"
    table = ReflowTable(
        title=f"{setting['clients']} clients, {size}, {setting['rounds']} rounds, {wanted}, delta {setting['delta']:.3g}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("accountant")
    if setting["noise"] is not None:
        table.add_column("epsilon", justify="right")
    else:
        table.add_column("noise", justify="right")
        if setting["honest"] is None:
            table.add_column("adaptive clipping", justify="right")
        if setting["parameters"]:
            table.add_column("noise norm / C", justify="right")
    table.add_column("assumes")
    for row in rows:
        if setting["noise"] is not None:
            values = ["infinite" if row["epsilon"] is None else f"{round_up(row['epsilon'], 3):g}"]
        else:
            adaptive = f"cohort >= {row['smallest_cohort']}"
            if row["adaptive_noise"] is not None:
                adaptive = f"{row['adaptive_noise']:.4g}"
            values = [
                f"{row['noise']:g}",
                *([] if setting["honest"] is not None else [adaptive]),
                *([f"{row['noise_norm']:.3g}"] if setting["parameters"] else []),
            ]
        table.add_row(TITLES[row["accountant"]], *values, row["assumes"])
    return table
