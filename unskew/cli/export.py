"""``unskew export``: export a trained model for other programs, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unskew.cli.common import AsJson, TrustCode, console_for, print_json, printed_warnings
from unskew.cli.flags import ClientName, ClientNumber
from unskew.filesystem import check_run


def export(
    run: Path,
    kind: Annotated[str, typer.Option("--format")] = "onnx",
    out: Path | None = None,
    client: ClientName = None,
    client_number: ClientNumber = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Export a trained model with its preprocessing for other programs, and write a model card.

    Options:
        run: Folder of a finished run.
        kind: torch, onnx, torchscript or transformers.
        out: Folder to write the model and its card to; RUN/export-FORMAT by default.
    """
    check_run(run)
    from unskew.serving.export import export as write

    with printed_warnings():
        done = write(run, kind, out=out, client=client, client_number=client_number, trust_code=trust_code)
    if as_json:
        print_json({"folder": str(done.folder), "file": str(done.file), "apart": done.apart})
        return
    checked = (
        "" if done.apart is None else f" Its outputs differ by at most {done.apart:.1g} from those of the run's model."
    )
    text = f"The model is {done.file}; README.md next to it is its model card.{checked}"
    console_for().print(text, highlight=False, soft_wrap=True)
