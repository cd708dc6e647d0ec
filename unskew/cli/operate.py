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

    console_for().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _age(seconds: float | None) -> str:
    return "never" if seconds is None else f"{max(0.0, time.time() - seconds):.0f} s ago"


def status(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show the round of a running deployed run, who is connected, who is missing since when, and the last warning."""
    found = _status(folder)
    if as_json:
        print_json(found)
        return
    names = {one["client"]: f"{one['site']} (client {one['client']})".strip() for one in found["sites"]}
    lists = {
        what: ", ".join(names[one["client"]] for one in found["sites"] if one[what])
        for what in ("connected", "awaited")
    }
    _line(f"round         {found['round']}, {found['phase']}" + (found["stopping"] and f", stops {found['stopping']}"))
    _line(f"connected     {lists['connected'] or 'none'}")
    for one in [one for one in found["sites"] if not one["connected"]]:
        reason = f"; last failure: {one['error']}" if one["error"] else ""
        _line(f"missing       {names[one['client']]}, since {_age(one['since'])}{reason}")
    _line(f"awaited       {lists['awaited'] or 'none'}")
    _line(f"last warning  {found['last_warning'] or 'none'}")


def sites(folder: RunFolder, as_json: AsJson = False) -> None:
    """Show each site of a running deployed run: key, version, last contact, rounds answered, faults."""
    from rich.table import Table

    found = _status(folder)["sites"]
    if as_json:
        print_json(found)
        return
    table = Table("client", "site", "key", "unskew", "connected", "last answer", "rounds", "faults", "excluded")
    for one in found:
        words = [str(one["client"]), one["site"], one["key"], one["version"], "yes" if one["connected"] else "no"]
        table.add_row(*words, _age(one["seen"]), str(one["answered"]), str(one["faults"]), "yes" * one["excluded"])
    console_for().print(table)


def log(
    folder: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", help="Print new events until the run ends.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no event was changed, removed or added.")
    ] = False,
) -> None:
    """Print the audit log of a deployed run, or check its chain of digests."""
    from unskew.deployment.server.audit_log import FILE, read_events
    from unskew.deployment.server.control import FILE as SOCKET

    shown, running = 0, True
    while running:
        running = follow and not verify and (folder / SOCKET).exists()
        events, last = read_events(folder / FILE, verify)
        for event in [] if verify else events[shown:]:
            head = f"{event.pop('time', '')}  round {event.pop('round', '')}  {event.pop('event', '')}"
            _line("  ".join([head, *(f"{name}={value}" for name, value in event.items() if name != "previous")]))
        shown = len(events)
        if running:
            time.sleep(1.0)
    if verify:
        _line(
            f"{shown} events, none altered. Lines cut off at the end show only in this digest of the last one: {last}"
        )


def stop(
    folder: RunFolder,
    now: Annotated[bool, typer.Option("--now", help="Give up the current round, too.")] = False,
) -> None:
    """End a running deployed run after its current round, with a checkpoint; unskew resume continues it."""
    from unskew.deployment.server.control import send_command

    send_command(folder, "stop", now=now)
    _line(f"The run ends {'now' if now else 'after this round'}. Continue it with: unskew resume {folder}")


def exclude(folder: RunFolder, site: Annotated[str, typer.Argument(help="Name or client number of the site.")]) -> None:
    """Leave a site out of a running deployed run: the current round no longer waits for it, later ones do not ask it."""
    from unskew.deployment.server.control import send_command

    _line(f"{send_command(folder, 'exclude', site=site)['name']} is excluded.")


def register(
    keys: Annotated[list[Path], typer.Argument(help="Public keys of all sites.", metavar="KEY.pub...", exists=True)],
    superlink: Annotated[str, typer.Option("--superlink", help="Host and port of the SuperLink.")],
    folder: Annotated[
        Path, typer.Option("--folder", parser=parse_path, metavar="PATH", help="The deployment's folder.")
    ] = Path(),
) -> None:
    """Wait until the SuperLink listens, then register all sites with it, in one call of Flower."""
    from unskew.deployment.flower.superlinks import STARTING, RemoteSuperLink

    there = RemoteSuperLink(folder.absolute(), superlink).superlink
    there.configure()
    there.wait(STARTING)
    there.control(*(there.registering(key.absolute()) for key in keys))
    _line(f"Registered {len(keys)} sites.")
