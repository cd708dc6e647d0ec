"""Parser for model names, available without loading PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

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
