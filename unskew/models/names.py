"""Parser for model names, available without loading PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HUB = "hf:"


def parse_model(model: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Return the name and the options of a model that is given as a mapping.

    Args:
        model: Mapping with the key ``hf`` or ``name``, and options.

    Raises:
        ValueError: If the mapping does not name a model.

    >>> parse_model({"hf": "facebook/opt-125m", "lora": {"r": 4}})
    ('hf:facebook/opt-125m', {'lora': {'r': 4}})
    """
    kinds = [kind for kind in ("hf", "name") if kind in model]
    name = model[kinds[0]] if len(kinds) == 1 else None
    if not isinstance(name, str):
        raise ValueError("a mapping must contain the model as hf: NAME (on the Hugging Face Hub) or as name: NAME")
    options = {key: value for key, value in model.items() if key != kinds[0]}
    return HUB + name if kinds[0] == "hf" else name, options


def split_models(model: str) -> list[str]:
    """Return the names of the models of a run, which are separated by commas if clients have different ones.

    Args:
        model: One or several names.

    >>> split_models("cnn, hf:facebook/opt-125m")
    ['cnn', 'hf:facebook/opt-125m']
    """
    return [name.strip() for name in model.split(",")]


def parse_models(models: Sequence[object]) -> tuple[str, list[dict[str, object]]]:
    """Return the names of a list of models as text, and the options of each.

    Args:
        models: Names, or mappings as in ``parse_model``.

    Raises:
        ValueError: If the list is empty, or an entry is not one model.

    >>> parse_models(["cnn", {"name": "mlp", "hidden": [84]}])
    ('cnn,mlp', [{}, {'hidden': [84]}])
    """
    names: list[str] = []
    options: list[dict[str, object]] = []
    for entry in models:
        name, own = parse_model(entry) if isinstance(entry, Mapping) else (entry, {})
        if not isinstance(name, str) or "," in name:
            raise ValueError("each entry of a list of models must be one name, or a mapping of name or hf and options")
        names.append(name)
        options.append(own)
    if not names:
        raise ValueError("a list of models must not be empty")
    return ",".join(names), options
