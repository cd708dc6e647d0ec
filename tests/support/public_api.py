"""Public interface of unskew as JSON, and the changes that break code, configurations or scripts of users.

``PYTHONPATH=tests python -m support.public_api`` writes the interface to ``tests/docs/public_api.json``.
"""

import inspect
import json
from pathlib import Path

import click

import unskew
from unskew import plugins
from unskew.cli.app import commands
from unskew.config.experiment import Experiment
from unskew.data.partition.parsing import PARTITIONS
from unskew.data.sources.registry import SOURCES
from unskew.methods.descriptions import describe_all
from unskew.models.registry import MODELS

FILE = Path(__file__).parents[1] / "docs" / "public_api.json"


def parameters(function):
    """Names of a function's parameters; an asterisk marks those with a default."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        )  # fmt: skip
        names.append(parameter.name + ("*" if optional else ""))
    return names


def members(cls):
    """Public methods of a class with their parameters, and its other public attributes."""
    result = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("unskew"):
            continue
        for name, value in {**getattr(base, "__dataclass_fields__", {}), **vars(base)}.items():
            if name.startswith(("_", "model_")):
                continue
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            result.setdefault(name, parameters(function) if inspect.isfunction(function) else [])
    return result


def command_options(command, path=""):
    """Options and arguments of a command and its subcommands."""
    found = {}
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for name, inner in command.commands.items():
            found |= command_options(inner, f"{path} {name}".strip())
    names = sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    return found | {path or "unskew": names}


def fields(section):
    """Fields of a section of the configuration."""
    result = {}
    for name, field in section.model_fields.items():
        inner = next(
            (a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(a, "model_fields")),
            None,
        )
        result[name] = {} if inner is None else fields(inner)
    return result


def interface():
    """The public interface."""
    objects = {}
    for name in unskew.__all__:
        value = getattr(unskew, name)
        objects[name] = members(value) if inspect.isclass(value) else {"()": parameters(value)}
    return {
        "python": objects,
        "commands": command_options(commands()),
        "configuration": fields(Experiment),
        "methods": {entry["name"]: sorted(entry["options"]) for entry in describe_all()},
        "models": sorted(MODELS),
        "sources": sorted(SOURCES),
        "partitions": sorted(PARTITIONS),
        "plugins": list(plugins.GROUPS),
    }  # fmt: skip


def breaking(old, new, path=""):
    """Paths of what ``new`` lacks or changes; more entries and more optional parameters break nothing."""
    if isinstance(old, dict):
        gone = [f"{path}/{name} is gone" for name in old if name not in new]
        return gone + [text for name in old if name in new for text in breaking(old[name], new[name], f"{path}/{name}")]
    if "/python/" in path:
        required = [name for name in new if not name.endswith("*") and name not in old]
        order = [name.rstrip("*") for name in new if name.rstrip("*") in {other.rstrip("*") for other in old}]
        texts = [f"{path} requires {name}" for name in required if name + "*" not in old]
        texts += [f"{path} requires {name}" for name in new if name + "*" in old]
        if order != [name.rstrip("*") for name in old]:
            texts.append(f"{path} has other parameters: {new} instead of {old}")
        return texts
    return [f"{path}/{name} is gone" for name in old if name not in new]


if __name__ == "__main__":
    FILE.write_text(json.dumps(interface(), indent=1, sort_keys=True) + "\n")
