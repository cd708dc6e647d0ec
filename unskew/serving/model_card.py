"""Model card: ``README.md`` in the format of the Hugging Face hub, from the data of the run folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from unskew.methods.registry import METHODS, rule_class
from unskew.records.recorder import privacy_sentences, strip_warning_prefix
from unskew.records.result import read_about
from unskew.runs.predictor import shape_text
from unskew.serving.card_metrics import (
    KEPT,
    client_metrics,
    client_test_data,
    global_metrics,
    has_several_models,
    summaries,
    table_row,
)
from unskew.serving.load import OpenedRun
from unskew.serving.portable_model import input_dtype, input_shape
from unskew.simulation.checkpoint import checkpoint_errors
from unskew.tasks.formatting import format_megabytes
from unskew.tasks.primary_metric import SCORES, primary_metric_name

PIPELINES = {"uint8": "image-classification", "tokens": "text-classification", "float": "tabular-classification"}
LIBRARIES = {"torch": "pytorch", "torchscript": "pytorch", "onnx": "onnx", "transformers": "transformers"}
MOST_CLASSES = 100
USES = {
    "torch": 'program = torch.export.load("model.pt2").module()\nprobabilities = program(inputs)',
    "torchscript": 'model = torch.jit.load("model.pt")\nprobabilities = model(inputs)',
    "onnx": 'session = onnxruntime.InferenceSession("model.onnx")\nprobabilities = session.run(None, {"inputs": inputs})[0]',
}
WITHOUT_TOKENIZER = {
    "bytes": "The folder has no tokenizer: token ids are the bytes of the text, preceded by 256. ",
    None: "The folder has no tokenizer: the model was trained on arrays of token ids. ",
}

SIMULATED = "The model was trained in a simulation: the clients were parts of one data set on one machine."
UNKNOWN = "No metrics of this model are known."


def model_card_text(opened: OpenedRun, kind: str) -> str:
    """Return the text of the model card.

    Args:
        opened: Run with its model.
        kind: Format of the export.

    Raises:
        CheckpointError: If the summary of the run is corrupted.
    """
    with checkpoint_errors(opened.folder / "summary.json"):
        return _text(opened, kind)


def _text(opened: OpenedRun, kind: str) -> str:
    runs = summaries(opened.folder)
    own = runs[0]
    personal = opened.client is not None and not opened.note
    rows = client_metrics(opened, own) if personal else global_metrics(opened, runs)
    title = f"{opened.config.model} on {own['data']}, trained with {own['method']}"
    # Programs that do not know front matter show it as Markdown, where entities would be part of a name.
    name, data = (re.sub(r"[^\w .,;:%()'=/+-]", " ", value) for value in (title, str(own["data"])))
    seeds = len(runs)
    metrics = [{"type": row.key, "name": row.title, "value": round(row.mean, 6)} for row in rows]
    result = {"task": {"type": hub_task(opened)}, "dataset": {"name": data, "type": data}, "metrics": metrics}
    index = {"model-index": [{"name": name, "results": [result]}]} if rows else {}
    front: dict[str, Any] = {
        "library_name": LIBRARIES[kind],
        "pipeline_tag": hub_task(opened),
        "tags": ["federated-learning", "unskew", *re.findall(r"[a-z][\w-]*(?=$|[:+])", str(own["method"]))],
        **index,
    }
    whose = "the global model"
    several = f"mean and standard deviation over {seeds} runs of different seeds"
    which = "of the kept round" if KEPT in own else "after the last round"
    measured = f"Global model {which}: {several if seeds > 1 else 'one run, so no spread is known'}."
    if opened.client is not None:
        client = escape_markdown(opened.client.name)
        if personal:
            whose = f"the personal model of client {client}"
            measured = f"This model on {client_test_data(opened.client.row)}: one run, so no spread is known."
        elif has_several_models(own):
            whose = f"the initial model of the architecture of client {client}"
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {escape_markdown(title)}",
        f"This is {whose} of a federation, trained with unskew {escape_markdown(unskew_version(opened.folder))}.",
        "## Data",
        data_text(opened, own),
        "## Training",
        training_text(opened, own),
        "## Metrics",
        *(
            [measured, "| metric | mean | std |\n|---|---|---|\n" + "\n".join(map(table_row, rows))]
            if rows
            else [UNKNOWN]
        ),
        "## Use",
        use_text(opened, kind),
        "## Limitations",
        "\n".join(f"- {text}" for text in limitations_text(opened, own, kind, seeds)),
    ]
    return "\n\n".join(lines) + "\n"


def hub_task(opened: OpenedRun) -> str:
    """Return the task name of the Hugging Face hub."""
    task = opened.inputs.objective
    if task.pixels:
        return "image-segmentation"
    numbers = "tabular-regression" if task.numeric_labels else PIPELINES[opened.inputs.kind]
    return "text-generation" if task.tokens else numbers


def escape_markdown(text: object) -> str:
    """Write text from a file on one line, so that neither Markdown nor HTML finds markup or a link in it.

    All other characters than those of plain sentences become numeric entities, which every Markdown dialect shows as they
    are. Control characters and those that change the direction of writing become spaces.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return re.sub(r"_|[^\w .,;:%()'=/+-]|:(?=//)|(?<=www)\.", lambda match: f"&#{ord(match[0])};", line, flags=re.I)


def code(text: object) -> str:
    """Format a value as code if it contains nothing but letters, digits and harmless punctuation, else as escaped text."""
    return f"`{text}`" if re.fullmatch(r"[\w.,:=+()/-]+", str(text)) else escape_markdown(text)


def unskew_version(folder: Path) -> str:
    """Return the version of unskew that created the run, or an empty string if it is unknown."""
    return str(read_about(folder).get("versions", {}).get("unskew", ""))


def data_text(opened: OpenedRun, own: dict[str, Any]) -> str:
    """Describe the training data and their partition.

    Args:
        opened: Run with its model.
        own: Summary of the run.
    """
    inputs = opened.inputs
    kinds = {"uint8": "images with values from 0 to 255", "tokens": "token ids", "float": "numbers"}
    lines = [
        f"- Data: {escape_markdown(own['data'])}, divided among {escape_markdown(own['clients'])} clients by "
        f"{code(own['partition'])}. Hash of the partition: {code(own.get('partition_hash'))}.",
        f"- Inputs: {kinds[inputs.kind]}, {shape_text(input_shape(inputs))}.",
    ]
    if inputs.features:
        lines.append(f"- Columns, in this order: {', '.join(map(escape_markdown, inputs.features))}.")
    if inputs.text:
        lines.append(f"- Texts from {', '.join(map(escape_markdown, inputs.text))}, by the tokenizer "
                     f"{code(inputs.tokenizer)}, at most {inputs.block} tokens.")  # fmt: skip
    if not inputs.objective.tokens:
        names = ", ".join(map(escape_markdown, inputs.names[:MOST_CLASSES]))
        whose = "Classes" if inputs.objective.output_kind == "probabilities" else "Targets"
        lines.append(
            f"- {whose}, in the order of the outputs: {names}{' ...' if inputs.classes > MOST_CLASSES else '.'}"
        )
    return "\n".join(lines)


def training_text(opened: OpenedRun, own: dict[str, Any]) -> str:
    """Describe the training.

    Args:
        opened: Run with its model.
        own: Summary of the run.
    """
    config, names = opened.config, re.findall(r"[a-z][\w-]*(?=$|[:+])", str(own["method"]))
    papers = dict.fromkeys(rule_class(name).paper for name in names if name in METHODS)
    amount, unit = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    work = f"{amount} {unit}{'' if amount == 1 else 's'}"
    lines = [
        f"- Method: {code(own['method'])}{' (' + '; '.join(papers) + ')' if papers else ''}.",
        f"- {escape_markdown(own['rounds'])} rounds with {100 * config.participation:g} % of the clients each, {work} per "
        f"round, batch size {config.batch_size}, {config.optimizer} with learning rate {config.lr:g}. Seed {config.seed}.",
        f"- Model: {code(config.model)}, {opened.spec.size} trained parameters. Client weighting: "
        f"{code(own['client_weighting'])}.",
        f"- Traffic of all clients: {format_megabytes(own['bytes_up'])} MB up, "
        f"{format_megabytes(own['bytes_down'])} MB down.",
    ]
    return "\n".join(lines)


def use_text(opened: OpenedRun, kind: str) -> str:
    """Describe how to use the model.

    Args:
        opened: Run with its model.
        kind: Format of the export.
    """
    if kind == "transformers":
        kinds = "AutoModelForCausalLM" if opened.inputs.objective.tokens else "AutoModelForSequenceClassification"
        note = WITHOUT_TOKENIZER.get(opened.inputs.tokenizer, "") + prompt_text(opened)
        return f'```python\nmodel = transformers.{kinds}.from_pretrained("FOLDER")\n```\n\n{note}'.rstrip()
    codes = [
        f"{escape_markdown(column.name)}: "
        + ", ".join(f"{index} {escape_markdown(value)}" for index, value in enumerate(column.values, 1))
        for column in opened.inputs.columns
        if column.kind == "category"
    ]
    coded = f" Categories are numbers, 0 for all other values: {'; '.join(codes)}." if codes else ""
    days = ", ".join(escape_markdown(column.name) for column in opened.inputs.columns if column.kind == "date")
    coded += f" Dates are days since 1970: {days}." if days else ""
    coded += " Missing numbers are NaN." if any(column.fills for column in opened.inputs.columns) else ""
    padding = " Shorter texts are padded with -1." if opened.inputs.kind == "tokens" else ""
    padding += f" {prompt_text(opened)}".rstrip()
    return (
        f"Inputs are raw `{input_dtype(opened.inputs)}` values of shape n x {shape_text(input_shape(opened.inputs))}: the "
        f"preprocessing is part of the file.{padding}{coded}\n\n```python\n"
        f"{USES[kind].replace('probabilities', opened.inputs.objective.output_kind)}\n```"
    )


def prompt_text(opened: OpenedRun) -> str:
    """Describe how a model of prompts and answers, or of chats, is prompted and ends an answer; empty for other models.

    Args:
        opened: Run with its model.
    """
    text = opened.config.text
    if not opened.inputs.objective.tokens:
        return ""
    if text.messages is not None:
        return "A chat is rendered by the chat template of the tokenizer, with its generation prompt."
    if text.answer is None:
        return ""
    if opened.inputs.tokenizer == "bytes":
        return "A prompt is followed by a line break: 256, the bytes of the prompt, 10. The answer ends with the token 256."
    return (
        "A prompt is followed by a line break, without an end token after it. The answer ends with the token `eos_token` of "
        "the tokenizer."
    )


def weights_text(opened: OpenedRun, kind: str) -> list[str]:
    """Describe the class weights of the training, if there are any.

    Args:
        opened: Run with its model.
        kind: Format of the export.
    """
    inputs = opened.inputs
    if not inputs.class_weights:
        return []
    pairs = zip(inputs.names, inputs.class_weights, strict=True)
    weights = ", ".join(f"{escape_markdown(name)} {weight:.4g}" for name, weight in pairs)
    if inputs.objective.pixels:
        return [f"Pixels were weighted by class in training: {weights}. The outputs are not corrected for it."]
    remedy = "Divide the probabilities by them and normalize"
    corrected = remedy if kind == "transformers" else "The outputs are corrected"
    return [
        f"Samples were weighted by class in training: {weights}. {corrected}. The predicted class is that of the largest "
        "corrected probability times weight, so rare classes are predicted more often than they are probable."
    ]


def limitations_text(opened: OpenedRun, own: dict[str, Any], kind: str, seeds: int) -> list[str]:
    """List limitations to know before using the model.

    Args:
        opened: Run with its model.
        own: Summary of the run.
        kind: Format of the export.
        seeds: Number of runs behind the metrics.
    """
    returned = opened.inputs.objective.output_kind
    texts = [
        *([] if own.get("engine") == "flower" else [SIMULATED]),
        f"The model knows only inputs of the kind above, but returns {returned} for any inputs."
        f"{' They are not calibrated on other data.' if returned == 'probabilities' else ''}",
        *weights_text(opened, kind),
    ]
    score = primary_metric_name(own)
    is_global = opened.client is None or opened.note
    # Clients with own statistics of a normalization layer, but no other personal part, have metrics without a prefix.
    whose = "client" if is_global or f"personal_{score}_mean" not in own else "personal"
    worst, mean = own.get(f"{whose}_{score}_worst"), own.get(f"{whose}_{score}_mean")
    serves_all = opened.client is None or not has_several_models(own) or not opened.note
    if isinstance(worst, float) and isinstance(mean, float) and serves_all:
        texts.append(
            f"Performance differs between clients: in this run {SCORES[score]} was {100 * mean:.1f} % on average and "
            f"{100 * worst:.1f} % for the worst client, on {escape_markdown(own.get('clients_evaluated_on'))}."
        )
    if seeds == 1:
        texts.append("Only one seed was run, so chance may contribute much to the metrics.")
    if opened.note:
        texts.append(escape_markdown(opened.note))
    elif opened.client is not None:
        texts.append("This model was trained for one client. Its performance on the data of others is not known.")
    # A personal model has seen its client's samples without noise.
    guarantees = [f"Privacy: {escape_markdown(text)}" for text in privacy_sentences(own) if is_global]
    none = "Training gave no privacy guarantee: information on single samples may be recoverable from the model."
    texts += guarantees or [none]
    path = opened.folder / "warnings.txt"
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()[:10]
        texts += [f"Warning during training: {escape_markdown(strip_warning_prefix(line))}" for line in lines]
    return texts
