"""``unskew export``: write a trained model for other programs, with a model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.data.readers.tokenization import make_tokenizer
from unskew.errors import ConfigError, unknown_name
from unskew.filesystem import make_folder, parse_path, write_atomic
from unskew.folder_locks import is_occupied, unmake_folder
from unskew.runs.build_model import ModelLike
from unskew.serving.load import OpenedRun, check_trained, open_run
from unskew.serving.model_card import model_card_text
from unskew.serving.portable_model import write_model

FILES = {"torch": "model.pt2", "onnx": "model.onnx", "torchscript": "model.pt", "transformers": "model.safetensors"}
"""File name of each format."""


@dataclass(frozen=True)
class ExportedModel:
    """Written files of an export.

    Attributes:
        folder: Folder of the files.
        file: File of the model; its model card is ``README.md`` in the same folder.
        apart: Largest difference from the original's probabilities, or from its numbers in standard deviations; None if the
            weights were written unchanged.
    """

    folder: Path
    file: Path
    apart: float | None


def export(
    run: str | Path,
    format: str = "onnx",
    *,
    out: str | Path | None = None,
    client: str | None = None,
    client_number: int | None = None,
    model: ModelLike | None = None,
    trust_code: bool = False,
) -> ExportedModel:
    """Export the trained model of a run, with its preprocessing and a model card.

    Args:
        run: Run folder.
        format: ``torch`` (a program of ``torch.export``), ``onnx``, ``torchscript``, or ``transformers`` for text models.
        out: Folder to write, new or empty; None writes to the run folder.
        client: Name of a client whose personal model to export.
        client_number: Number of this client instead of its name, from 0. Without both, the global model is exported.
        model: The model, if it was passed to the run in Python.
        trust_code: Whether custom code that the run's ``config.yaml`` names may be imported and run.

    Raises:
        ConfigError: If the format is unknown, the model cannot be exported to it, ``out`` is not empty, or no client is
            chosen and the method trains no global model.
        CheckpointError: If the folder contains no finished run, or the disk is full.
    """
    if format not in FILES:
        raise ConfigError(unknown_name("format", str(format), FILES))
    opened = open_run(run, client, client_number, model, trust_code)
    check_trained(opened)
    if opened.inputs.harmonization is not None:
        raise ConfigError(
            f"The inputs of {opened.folder} are harmonized for each site, which an exported model cannot do. Use unskew "
            "predict."
        )
    # A name may contain characters that file systems reject, or differ from another one only in case.
    whose = "" if opened.client is None else f"-client-{opened.client.number}"
    folder = parse_path(out) if out is not None else opened.folder / f"export-{format}{whose}"
    if is_occupied(folder) or (out is None and folder.is_symlink()):
        raise ConfigError(f"{folder} already exists; choose another folder with --out.")
    added = make_folder(folder)
    try:
        file = folder / FILES[format]
        difference = None
        if format == "transformers":
            save_pretrained(opened, folder)
        else:
            difference = write_model(opened, format, file)
        write_atomic(folder / "README.md", model_card_text(opened, format).encode())
    except BaseException:
        unmake_folder(folder, added)
        raise
    return ExportedModel(folder, file, difference)


def save_pretrained(opened: OpenedRun, folder: Path) -> None:
    """Write a folder that ``transformers`` can load, with the tokenizer unless tokens are bytes or come from arrays.

    Generation with a model of prompts and answers stops at the token that ends answers in training.

    Args:
        opened: Run with its model.
        folder: Folder to write.

    Raises:
        ConfigError: If the model is not a text model of ``transformers``.
    """
    net: Any = getattr(opened.module, "net", None)
    if opened.inputs.kind != "tokens" or not hasattr(opened.module, "save") or net is None:
        raise ConfigError(
            f"The format transformers supports only text models of transformers (hf:NAME); this is {opened.config.model!r} "
            f"on {'texts' if opened.inputs.kind == 'tokens' else 'other data'}. Use onnx, torch or torchscript."
        )
    names = opened.inputs.names
    if not opened.inputs.objective.tokens:
        net.config.id2label, net.config.label2id = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    tokens = None if opened.inputs.tokenizer is None else make_tokenizer(opened.inputs.tokenizer)
    if tokens is not None and opened.config.text.answer is not None and opened.inputs.objective.tokens:
        net.config.eos_token_id = net.generation_config.eos_token_id = tokens.answers([""])[0][-1]
    opened.module.save(folder)  # type: ignore[operator]
    tokenizer: Any = getattr(tokens, "tokenizer", None)
    if tokenizer is not None:  # otherwise the model card states what tokens are
        tokenizer.model_max_length = opened.inputs.block
        tokenizer.save_pretrained(folder)
