"""``unskew export``: a trained model as files for other programs, with a card that says what it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.data.readers.tokenization import make_tokenizer
from unskew.errors import ConfigError, unknown_name
from unskew.filesystem import is_occupied, make_folder, parse_path, unmake_folder, write_atomic
from unskew.runs.build_model import ModelLike
from unskew.serving.load import OpenedRun, open_run
from unskew.serving.model_card import model_card_text
from unskew.serving.portable_model import write_model

FILES = {"torch": "model.pt2", "onnx": "model.onnx", "torchscript": "model.pt", "transformers": "model.safetensors"}
"""The formats, and the file of each."""


@dataclass(frozen=True)
class ExportedModel:
    """Written files of an export.

    Attributes:
        folder: Where.
        file: The model; ``README.md`` beside it is its card.
        apart: The largest difference of a probability to the original's, or of a number in its standard deviations; None
            where weights were written as they are.
    """

    folder: Path
    file: Path
    apart: float | None


def export(
    run: str | Path,
    format: str = "onnx",
    *,
    out: str | Path | None = None,
    client: int | str | None = None,
    model: ModelLike | None = None,
    trust_code: bool = False,
) -> ExportedModel:
    """Write the trained model of a run, with its preprocessing, and a model card.

    Args:
        run: The run folder.
        format: ``torch`` (a program of ``torch.export``), ``onnx``, ``torchscript``, or ``transformers`` for models of texts.
        out: The folder to write; in the run folder if None. It must be new or empty.
        client: The client whose own model it is; None: the global model.
        model: The model, if it was given in Python.
        trust_code: See ``unskew.load_predictor``.

    Raises:
        ConfigError: There is no such format, the model cannot be written in it, or ``out`` is not empty.
        CheckpointError: The folder holds no finished run, or the disk is full.
    """
    if format not in FILES:
        raise ConfigError(unknown_name("format", str(format), FILES))
    opened = open_run(run, client, model, trust_code)
    whose = "" if client is None else f"-client-{client}"
    folder = parse_path(out) if out is not None else opened.folder / f"export-{format}{whose}"
    if is_occupied(folder) or (out is None and folder.is_symlink()):
        raise ConfigError(f"{folder} is already there; choose another folder with --out.")
    added = make_folder(folder)
    try:
        file = folder / FILES[format]
        apart = None
        if format == "transformers":
            save_pretrained(opened, folder)
        else:
            apart = write_model(opened, format, file)
        write_atomic(folder / "README.md", model_card_text(opened, format, client).encode())
    except BaseException:
        unmake_folder(folder, added)
        raise
    return ExportedModel(folder, file, apart)


def save_pretrained(found: OpenedRun, folder: Path) -> None:
    """Write a folder that ``transformers`` loads, with the tokenizer.

    Args:
        found: Run with its model.
        folder: Folder to write.

    Raises:
        ConfigError: The model is not a text model of ``transformers``.
    """
    net: Any = getattr(found.module, "net", None)
    if found.inputs.kind != "tokens" or not hasattr(found.module, "save") or net is None:
        raise ConfigError(
            f"The format transformers is for texts and models of transformers (hf:NAME), and this is {found.config.model!r} "
            f"on {'texts' if found.inputs.kind == 'tokens' else 'other data'}; take onnx, torch or torchscript."
        )
    names = found.inputs.names
    if found.inputs.task != "language":
        net.config.id2label, net.config.label2id = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    found.module.save(folder)  # type: ignore[operator]
    tokenizer: Any = getattr(make_tokenizer(str(found.inputs.tokenizer)), "tokenizer", None)
    if tokenizer is not None:  # else texts are bytes, which the card says
        tokenizer.model_max_length = found.inputs.block
        tokenizer.save_pretrained(folder)
