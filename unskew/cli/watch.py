"""``unskew watch``: show runs in progress on a local page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import console_for
from unskew.filesystem import parse_path


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", parser=parse_path)],
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    once: Path | None = None,
) -> None:
    """Show runs in progress and finished runs on a local page: curves, clients, traffic, time left and log.

    Options:
        folder: Run folder, or folder that contains run folders; new runs appear automatically.
        port: Port of the page; 0 chooses a free one.
        once: Write the page as it is now to this HTML file, and start no server.
    """
    from unskew.reporting.live_page import LiveRuns, PageServer, write_live_page

    console = console_for()
    runs = LiveRuns(folder)
    if once is not None:
        write_live_page(runs, once)
        console.print(f"The page is {once}. Open it in a browser.", highlight=False, soft_wrap=True)
        return
    with PageServer(runs, port) as server:
        text = (
            f"Open {server.address} in a browser on this machine. Ctrl-C ends the command; it does not affect the runs."
        )
        console.print(text, highlight=False, soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
