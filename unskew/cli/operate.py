"""``unskew deploy status``, ``sites``, ``log``, ``stop``, ``exclude`` and ``register``: operate a deployed run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.cli.common import AsJson, console_for, print_json
from unskew.filesystem import parse_path

RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.", parser=parse_path, metavar="RUN")]


def _status(folder: Path) -> dict[str, Any]:
    from unskew.deployment.server.control import send_command

    return dict(json.loads(send_command(folder, "status")["json"]))


def _line(text: str) -> None:
    from unskew.deployment.wire.tensor_codec import printable

    console_for().print(printable(text), highlight=False, soft_wrap=True)


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{max(0.0, time.time() - seconds):.0f} s ago"


def status(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show the round of a running deployed run, its connected and missing sites, and the last warning."""
    status_report = _status(folder)
    if as_json:
        print_json(status_report)
        return
    names = {site["client"]: f"{site['site']} (client {site['client']})".strip() for site in status_report["sites"]}
    lists = {
        what: ", ".join(names[site["client"]] for site in status_report["sites"] if site[what])
        for what in ("connected", "awaited")
    }
    _line(
        f"round         {status_report['round']}, {status_report['phase']}"
        + (status_report["stopping"] and f", stops {status_report['stopping']}")
    )
    _line(f"connected     {lists['connected'] or 'none'}")
    for site in [site for site in status_report["sites"] if not site["connected"]]:
        reason = f"; last failure: {site['error']}" if site["error"] else ""
        _line(f"missing       {names[site['client']]}, since {_age(site['since'])}{reason}")
    _line(f"awaited       {lists['awaited'] or 'none'}")
    _line(f"last warning  {status_report['last_warning'] or 'none'}")


def sites(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show each site of a running deployed run: key, version, last reply, number of rounds, invalid replies."""
    from rich.table import Table

    site_reports = _status(folder)["sites"]
    if as_json:
        print_json(site_reports)
        return
    table = Table("client", "site", "key", "unskew", "connected", "last reply", "rounds", "invalid replies", "excluded")
    for site in site_reports:
        words = [str(site["client"]), site["site"], site["key"], site["version"], "yes" if site["connected"] else "no"]
        table.add_row(
            *words, _age(site["seen"]), str(site["updates_received"]), str(site["faults"]), "yes" * site["excluded"]
        )
    console_for().print(table)


def log(
    folder: RunFolder,
    follow: bool = False,
    verify: bool = False,
) -> None:
    """Print the audit log of a deployed run, or check its chain of digests.

    Options:
        follow: Print new events until the run ends.
        verify: Check that no event was changed, removed or added.
    """
    from unskew.deployment.common.audit_log import FILE, read_events
    from unskew.deployment.server.control import socket_path

    shown, running = 0, True
    while running:
        running = follow and not verify and socket_path(folder).exists()
        events, last = read_events(folder / FILE, verify)
        for event in [] if verify else events[shown:]:
            head = f"{event.pop('time', '')}  round {event.pop('round', '')}  {event.pop('event', '')}"
            _line("  ".join([head, *(f"{name}={value}" for name, value in event.items() if name != "previous")]))
        shown = len(events)
        if running:
            time.sleep(1.0)
    if verify:
        _line(
            f"{shown} events, none changed. To detect events removed at the end, compare the digest of the last "
            f"event: {last}"
        )


def stop(folder: RunFolder, now: bool = False) -> None:
    """Stop a running deployed run after its current round, with a checkpoint; unskew resume continues it.

    Options:
        now: Discard the current round.
    """
    from unskew.deployment.server.control import send_command

    send_command(folder, "stop", now=now)
    _line(
        f"The run stops {'now' if now else 'after this round'}. To resume it, run: unskew resume {folder}, with --local, or "
        "--folder and --superlink, as before"
    )


def exclude(folder: RunFolder, site: str) -> None:
    """Exclude a site from a running deployed run; the current round stops waiting for it.

    Options:
        site: Name or client number of the site.
    """
    from unskew.deployment.server.control import send_command

    _line(f"{send_command(folder, 'exclude', site=site)['name']} is excluded.")


def register(
    keys: Annotated[list[Path], typer.Argument(metavar="KEY.pub...", exists=True)],
    superlink: Annotated[str, typer.Option()],
    folder: Path = Path(),
) -> None:
    """Wait until the SuperLink is reachable, and register all sites with it.

    Options:
        keys: Public keys of all sites.
        superlink: Host and port of the SuperLink.
        folder: Deployment folder.
    """
    from unskew.deployment.flower.superlinks import STARTING, RemoteSuperLink, RunLocation

    RunLocation(folder=folder, address=superlink).check()
    remote_superlink = RemoteSuperLink(folder.absolute(), superlink).superlink
    remote_superlink.wait(STARTING)
    remote_superlink.control(*(remote_superlink.registering(key.absolute()) for key in keys))
    _line(f"Registered {len(keys)} sites.")
