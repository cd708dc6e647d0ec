"""Parts of pages that are generated from the code: a hook of mkdocs.

In a page, the text between ``<!-- generated: NAME ARGUMENTS -->`` and ``<!-- end -->`` is replaced when the site is built by
what the function ``NAME`` of this module returns. The text between the marks is for readers of the source, such as on
GitHub. The section of a method gets its paper, summary, options, its compatibility, and the costs that it does not state.
``python docs/generate.py PAGE`` prints a page as the site shows it, without its layout. unskew must be installed.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from unskew.attacks.registry import ATTACKS, Attack
from unskew.benchmark.suite import BenchmarkFederation, Suite
from unskew.cli.app import commands
from unskew.config.experiment import Experiment
from unskew.config.loader import experiment
from unskew.data.partition.parsing import OPTIONS, PARTITIONS
from unskew.data.sources.registry import HUB, SOURCES
from unskew.deployment.common.requests import REQUESTS
from unskew.deployment.site.config import SiteConfig
from unskew.measurements.consensus import Consensus
from unskew.measurements.gradient_dissimilarity import Gradients
from unskew.measurements.local_models import LocalModels
from unskew.measurements.server_cost import ServerCost
from unskew.measurements.update_cosines import UpdateCosines
from unskew.methods.conflicts import grouped_conflicts
from unskew.methods.descriptions import describe_all, describe_method
from unskew.methods.registry import COMPOSITIONS, METHODS, rule_class
from unskew.models.registry import MODELS, build_model
from unskew.protocol.method import SLOTS, class_slots
from unskew.protocol.requirements import NEEDS, why_tasks
from unskew.protocol.rule import Rule, WithServerHalf
from unskew.protocol.search_space import RangeSpace
from unskew.protocol.sync_rule import SyncRule
from unskew.runs.resume import RESUMABLE
from unskew.sums.registry import SUMS
from unskew.tasks.metrics import METRICS, TWO_CLASSES
from unskew.tasks.primary_metric import KNOWN_METRICS
from unskew.tasks.registry import TASKS, tasks_with
from unskew.tuning.spaces import SHARED, method_spaces

DOCS = Path(__file__).parent
BLOCK = re.compile(r"<!-- generated: (\w+)(.*?) -->.*?<!-- end -->", re.DOTALL)
TASK_TITLES = {"multilabel": "multi-label", "language": "language models"}
"""Titles of tasks that are not their names."""
SHARING = ("run", "compare", "tune", "diagnose", "partition")
"""Commands whose common options have a section of their own."""
LINKS = {
    "data": ("sources", "data.md#sources"),
    "task": ("regression", "tables.md#numbers-as-outcomes"),
    "survival.event": ("survival analysis", "survival.md#configuration"),
    "segmentation.classes": ("segmentation", "segmentation.md"),
    "categories": ("mixed columns", "tables.md#columns"),
    "label_separator": ("several labels", "data.md#several-labels-a-sample"),
    "features": ("tables", "data.md#tables"),
    "split_by": ("splits", "data.md#splits"),
    "csv.separator": ("CSV files", "data.md#csv-files"),
    "partition": ("partitions", "data.md#partitions"),
    "unseen": ("unseen clients", "data.md#unseen-clients"),
    "shift": ("feature shift", "data.md#feature-shift"),
    "text.columns": ("texts", "data.md#texts"),
    "model": ("models", "models.md"),
    "buffers": ("buffers", "models.md#buffers"),
    "method": ("methods", "methods/index.md"),
    "client_weighting": ("weights", "concepts.md#weights"),
    "ranges": ("diagnosis of sites", "deployment.md#diagnosis-before-training"),
    "sampling": ("cohorts and accounting", "methods/privacy.md#cohorts-and-accounting"),
    "lr_schedule": ("learning-rate schedules", "concepts.md#learning-rate-schedules"),
    "class_weights": ("imbalanced classes", "tables.md#imbalanced-classes"),
    "precision": ("precision", "engines.md#precision"),
    "network.delay": ("delays", "concepts.md#delays"),
    "network.uplink": ("simulated time", "concepts.md#simulated-time"),
    "attack": ("attackers", "attacks.md"),
    "coefficients": ("odds ratios", "tables.md#odds-ratios"),
    "diagnose": ("diagnostics", "configuration.md#diagnostics"),
    "base_run": ("starting from a finished run", "reproducibility.md#starting-from-a-finished-run"),
    "synthetic": ("generators", "generators.md#the-synthetic-set"),
    "engine": ("engines", "engines.md"),
    "clients_per_group": ("engines", "engines.md#several-clients-as-one-network"),
    "ray.address": ("clusters", "cluster.md"),
    "ray.data": ("clusters", "cluster.md#data-where-they-are-used"),
    "ray.state": ("clusters", "cluster.md#what-clients-keep"),
    "metrics": ("imbalanced classes", "tables.md#imbalanced-classes"),
    "positive": ("imbalanced classes", "tables.md#imbalanced-classes"),
    "objective": ("the objective", "concepts.md#the-objective"),
    "early_stopping": ("early stopping", "concepts.md#early-stopping"),
    "keep": ("the model that is kept", "concepts.md#the-model-that-is-kept"),
    "trackers": ("trackers", "run-folder.md#trackers"),
    "--trust-code": ("Security", "security.md"),
    "--parallel": ("parallel runs", "engines.md#runs-side-by-side"),
    "--references": ("references", "concepts.md#references"),
    "--leave-one-out": ("leave-one-site-out", "data.md#leave-one-site-out"),
    "--space": ("search spaces", "tuning.md#custom-search-spaces"),
    "--client": ("personal models", "concepts.md#personalization"),
    "--threshold": ("the positive class", "tables.md#imbalanced-classes"),
    "--validate-minutes": ("testing the advice", "advice.md#testing-the-advice"),
    "--local": ("deployed runs", "deployment.md#unskew-deploy-run"),
    "--quorum": ("sites that join and leave", "deployment.md#sites-that-join-and-leave"),
    "--asynchronous": ("asynchronous rounds", "deployment.md#asynchronous-rounds"),
}
"""Page on a field or an option, relative to ``docs/``. A field without an entry has no link."""


class Position:
    """Page and section of a block.

    Attributes:
        page: Path of the page, relative to ``docs/``.
        section: Title of the section of level 2.
    """

    def __init__(self, page: str, section: str) -> None:
        self.page = page
        self.section = section

    def link(self, title: str, target: str) -> str:
        """Return a link to a page.

        Args:
            title: Text of the link.
            target: Page relative to ``docs/``, with an anchor.
        """
        page, mark, anchor = target.partition("#")
        path = "" if page == self.page else os.path.relpath(page, os.path.dirname(self.page) or ".")
        return f"[{title}]({path}{mark}{anchor})"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Args:
        header: Titles of the columns.
        rows: Cells of the rows.
    """
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace(" |  |", " | |") for line in lines).replace("| --- ", "|---")


def names(words: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in words)


def default_text(value: Any) -> str:
    """Return a default value as pages write it."""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if value is None:
        return "none"
    if value and isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "empty" if str(value) in ("", "()", "[]", "{}") else f"`{value}`"


def plain(docstring: str) -> str:
    """Return the text of a docstring in Markdown, without the last period."""
    return docstring.replace("``", "`").removesuffix(".")


def paragraphs(documented: Any) -> list[str]:
    """Return the paragraphs of a docstring, each as one line."""
    return [" ".join(text.split()) for text in (inspect.getdoc(documented) or "").split("\n\n")]


def docstring_entries(documented: Any) -> dict[str, str]:
    """Return the descriptions in the section ``Args`` or ``Attributes`` of a docstring."""
    _, _, section = re.split("(Args|Attributes):\n", inspect.getdoc(documented) or "", maxsplit=1)
    found = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", section.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def sections_of_methods() -> dict[str, str]:
    """Return the page and anchor of the section on each method, relative to ``docs/``."""
    pages = sorted((DOCS / "methods").glob("*.md"))
    titles = [(page, title) for page in pages for title in re.findall("^## (.*)$", page.read_text(), re.MULTILINE)]
    return {title: f"methods/{page.name}#{title}" for page, title in titles if title in METHODS}


# ---- methods ------------------------------------------------------------------------------------------------------------


def method_table(position: Position) -> str:
    """All methods, each with a link to its section."""
    where = sections_of_methods()
    rows = [
        [position.link(f"`{m['name']}`", where[m["name"]]), ", ".join(m["slots"]), m["summary"], m["paper"]]
        for m in describe_all()
    ]
    return markdown_table(["name", "slot", "what it does", "paper"], rows)


def composition_table(position: Position) -> str:
    """The names of published compositions."""
    rows = [[f"`{name}`", f"`{expression}`", paper] for name, (expression, paper) in COMPOSITIONS.items()]
    return markdown_table(["name", "stands for", "paper"], rows)


def personal_models(cls: type[Rule]) -> str:
    """Return when clients get personal models: ``after`` the last round, ``during`` the rounds, or empty for never."""
    if "final_training" in cls().needs:
        return "after"
    kept = getattr(cls, "local_slices", SyncRule.local_slices) is not SyncRule.local_slices
    return "during" if kept or getattr(cls, "has_personal_model", False) else ""


SELECTIONS: dict[str, Callable[[type[Rule], str], bool]] = {
    "slot": lambda cls, slot: slot in class_slots(cls),
    "without_task": lambda cls, task: task not in tasks_with(cls().needs),
    "weighting": lambda cls, weights: cls.weights == weights,
    "untuned": lambda cls, _: not cls.spaces,
    "personal": lambda cls, when: personal_models(cls) == when,
}


def methods(position: Position, kind: str, value: str = "") -> str:
    """The names of the methods of one kind, such as ``slot client`` or ``without_task language``."""
    return names(name for name in METHODS if SELECTIONS[kind](rule_class(name), value))


def slot_table(position: Position) -> str:
    """The slots, each with its methods and the base class of its rules."""
    questions = {
        "data": "What data does a client have before training?",
        "client": "How does a client train, and what does it send?",
        "sync": "Which parts of the model are exchanged in which round?",
        "aggregate": "How are the updates of a round combined into one?",
        "server": "How does the combined update become the next model?",
    }
    rows = [
        [f"`{slot}`", questions[slot], methods(position, "slot", slot), f"`unskew.{base.__name__}`"]
        for slot, base in SLOTS.items()
    ]
    return markdown_table(["slot", "question", "methods", "base class for your own"], rows)


def rule_classes() -> list[tuple[str, type]]:
    """Return the base classes of rules, with the slots that each is for."""
    return [("any", Rule), ("client, sync, aggregate", WithServerHalf), *SLOTS.items()]


def hooks(position: Position) -> str:
    """The hooks of each slot, with the first sentence of their docstrings."""
    rows = []
    for slot, cls in rule_classes():
        own = {name: hook for name, hook in vars(cls).items() if name[0] != "_" and callable(hook)}
        for name, hook in own.items():
            call = f"`{name}({', '.join(list(inspect.signature(hook).parameters)[1:])})`"
            rows.append([slot, call, plain(paragraphs(hook)[0])])
    return markdown_table(["slot", "hook", "purpose"], rows)


def rule_attributes(position: Position) -> str:
    """The attributes that a rule may set, with their docstrings."""
    rows = [
        [slot, f"`{name}`", plain(text)] for slot, cls in rule_classes() for name, text in field_docstrings(cls).items()
    ]
    return markdown_table(["slot", "attribute", "meaning"], rows)


COSTS = {"Traffic": "`d` down, `d` up", "Computation": "none", "State": "none"}
"""Costs of a method that its page does not state: those of FedAvg."""
CODEC_COSTS = {
    "Traffic": "`d` down, `c` up",
    "Computation": "one pass over the update",
    "State": "client `d` with `feedback`; server `d` with `down`",
}
"""The same for methods that compress updates."""
LABELS = ("Options", "Cost", "Compatibility", "Notes")


def method_section(name: str, text: str) -> str:
    """Return the section on a method with its options, all costs, and its compatibility.

    Args:
        name: Name of the method.
        text: The section as written: formula, and under labels such as ``**Notes**`` what code does not know.
    """
    head, *parts = re.split(rf"^\*\*({'|'.join(LABELS)})\*\*\n", text, flags=re.MULTILINE)
    written = dict.fromkeys(LABELS, "") | dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
    usual = CODEC_COSTS if getattr(rule_class(name), "stage", "") == "compress" else COSTS
    costs = usual | dict(re.findall(r"^- (\w+): (.*)$", written["Cost"], re.MULTILINE))
    filled = {
        "Options": f"{options(name)}\n\n{written['Options']}",
        "Cost": "\n".join(f"- {cost}: {amount}" for cost, amount in costs.items()),
        "Compatibility": f"{compatibility(name)}\n{written['Compatibility']}",
        "Notes": written["Notes"],
    }
    bodies = [f"**{label}**\n\n{body.strip()}" for label, body in filled.items() if body]
    row = describe_method(name)
    return "\n\n".join([f"{row['paper']}: {row['summary']}.", head.strip(), *bodies]) + "\n\n"


def options(name: str) -> str:
    """Return the options of a method."""
    row = describe_method(name)
    lines = [f"- `{k}` = {default_text(v)}: {row['meanings'][k].replace('``', '`')}" for k, v in row["options"].items()]
    return "\n".join(lines) or "None."


def compatibility(name: str) -> str:
    """Return compositions, requirements, tasks and weights of a method."""
    row, cls = describe_method(name), rule_class(name)
    conflicts = [f"    - {names(others)}. {reason}" for reason, others in grouped_conflicts(name).items()]
    tasks = (
        "all" if set(row["tasks"]) == set(TASKS) else ", ".join(TASK_TITLES.get(task, task) for task in row["tasks"])
    )
    lines = [
        "- Compositions: all but" if conflicts else "- Compositions: all",
        *conflicts,
        f"- Server reads: {'single updates' if row['needs'] == 'individual' else 'sums'}",
        f"- Tasks: {tasks}{f', because {why_tasks(cls())}' if tasks != 'all' else ''}",
        f"- Delays: {'yes' if row['delays'] else 'no'}",
        *(["- Weights: uniform"] if cls.weights == "uniform" else []),
    ]
    return "\n".join(lines)


def search_spaces(position: Position) -> str:
    """The search spaces of the methods' options."""
    rows = []
    for name in METHODS:
        spaces = [f"`{key.rpartition('.')[2]}` {space_text(space)}" for key, space in method_spaces(name).items()]
        if spaces:
            rows.append([f"`{name}`", ", ".join(spaces)])
    return markdown_table(["method", "options"], rows)


def space_text(space: Any) -> str:
    """Return a search space as pages write it."""
    if isinstance(space, RangeSpace):
        return f"{space.low:g} to {space.high:g}{' (log)' if space.log else ''}"
    return " or ".join(str(value) for value in space.values)


def requirements(position: Position) -> str:
    """The words that ``needs`` of a rule may contain."""
    return markdown_table(["word", "meaning"], [[f"`{name}`", text] for name, text in NEEDS.items()])


SHAPES = {"8 × 8 gray": (1, 8, 8), "28 × 28 gray": (1, 28, 28), "32 × 32 color": (3, 32, 32)}


def model_table(position: Position) -> str:
    """The built-in models of numbers and images, with their numbers of parameters for ten classes."""
    rows = []
    for name, entry in MODELS.items():
        if not (entry.pretrained or entry.texts):
            networks = [build_model(name, shape, 10) for shape in SHAPES.values()]
            sizes = [f"{sum(p.numel() for p in network.parameters()):,}" for network in networks]
            rows.append([f"`{name}`", f"{entry.description}; {entry.reference}", *sizes])
    return markdown_table(["model", "description", *SHAPES], rows)


def model_options(position: Position) -> str:
    """The options of the built-in models, from signatures and docstrings."""
    rows = []
    for name, entry in MODELS.items():
        described = docstring_entries(entry.constructor)
        known = inspect.signature(entry.constructor).parameters.items()
        own = [
            (k, p.default) for k, p in known if p.default is not p.empty and k != "categories" and not entry.pretrained
        ]
        rows += [
            [f"`{name}`", f"`{k}`", f"`{v}`", plain(described[k]).replace('`"', "`").replace('"`', "`")] for k, v in own
        ]
    return markdown_table(["model", "option", "default", "meaning"], rows)


# ---- configuration and command line -------------------------------------------------------------------------------------


def field_docstrings(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's fields: the docstrings below them."""
    described = {name: field.description for name, field in getattr(cls, "model_fields", {}).items()}
    if all(described.values()) and described:
        return {name: " ".join(str(text).split()) for name, text in described.items()}
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == cls.__name__).body
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


@cache
def fields() -> dict[str, tuple[Any, str]]:
    """Return default and description of each field of the configuration; those of sections as ``section.field``."""
    described: dict[str, tuple[Any, str]] = {}
    defaults, texts = experiment({}).model_dump(mode="json"), field_docstrings(Experiment)
    for name, info in Experiment.model_fields.items():
        if isinstance(info.default, BaseModel):
            inner = field_docstrings(type(info.default))
            described |= {f"{name}.{part}": (value, inner[part]) for part, value in defaults[name].items()}
        else:
            described[name] = defaults[name], texts[name]
    return described


def with_link(position: Position, text: str, name: str) -> str:
    """Return a description with the link to the page on the field or option, if there is one."""
    return f"{text}; see {position.link(*LINKS[name])}" if name in LINKS else text


def configuration(position: Position) -> str:
    """All fields of the configuration."""
    rows = [
        [f"`{name}`", default_text(value), with_link(position, plain(text), name)]
        for name, (value, text) in fields().items()
    ]
    return markdown_table(["field", "default", "meaning"], rows)


def field_of(parameter: str) -> str | None:
    """Return the field that a parameter of a command sets; None if it is an option of the command."""
    known = fields()
    ends = (f".{parameter}", f"{parameter}.columns")
    return parameter if parameter in known else next((name for name in known if name.endswith(ends)), None)


def option_row(position: Position, command: str, parameter: Any) -> list[str]:
    """Return the row of an option: its names, its default, and its description."""
    field = field_of(parameter.name) if getattr(parameter, "rich_help_panel", None) else None
    help_text, _, stated = (parameter.help or "").partition(" [default: ")
    default, text = parameter.default, plain(help_text)
    if field is not None and command in SHARING:
        default, text = fields()[field]
    elif default is None and field is None:
        default = stated.removesuffix("]") or None
    if default is None or default is False:
        shown = ""
    elif default is True or default == "on":
        shown = "on"
    else:
        shown = default_text(default)
    cell = names([*parameter.opts, *parameter.secondary_opts])
    return [cell, shown, with_link(position, plain(text), field if field in LINKS else parameter.opts[0])]


def shared_by(name: str) -> tuple[str, ...]:
    """Return the commands that have an option, if it is one of those described together."""
    texts = {c: p.help for c in SHARING for p in commands().commands[c].params if name in p.opts}
    alike = {"run", "compare", "tune"} <= set(texts) and texts["run"] == texts["compare"] == texts["tune"]
    return tuple(c for c in texts if texts[c] == texts["run"]) if alike else ()


def resumable_fields(position: Position) -> str:
    """The fields that may change when a run is resumed."""
    flags = {parameter.name for parameter in commands().commands["resume"].params}
    return names(name for name in RESUMABLE if name not in flags)


def tunable_fields(position: Position) -> str:
    """The fields of a run that may be tuned."""
    return names(SHARED)


def command_table(position: Position) -> str:
    """All commands, each with a link to its section."""
    rows = [
        [position.link(f"`{name}`", f"{position.page}#unskew-{name}"), plain((command.help or "").partition("\n\n")[0])]
        for name, command in commands().commands.items()
    ]
    return markdown_table(["command", "purpose"], rows)


def flags(position: Position) -> str:
    """The options of the command of the section, without the shared ones."""
    command = position.section.removeprefix("unskew ")
    found: Any = commands()
    for word in command.split():
        found = found.commands[word]
    params = [p for p in found.params if p.opts[0].startswith("--") and p.name != "help"]
    own = [p for p in params if command not in shared_by(p.opts[0])]
    table = markdown_table(["option", "default", "meaning"], [option_row(position, command, p) for p in own])
    return table if len(own) == len(params) else f"In addition to the [shared options](#shared-options):\n\n{table}"


def shared_flags(position: Position) -> str:
    """The options that several commands have, by the commands."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for parameter in commands().commands["run"].params:
        if having := shared_by(parameter.opts[0]):
            groups.setdefault(having, []).append(parameter)
    parts = []
    for having, params in sorted(groups.items(), key=lambda item: -len(item[0])):
        title = f"For {', '.join(f'`{name}`' for name in having[:-1])} and `{having[-1]}`:"
        rows = [option_row(position, "run", parameter) for parameter in params]
        parts += [title, markdown_table(["option", "default", "meaning"], rows)]
    return "\n\n".join(parts)


def deploy_commands(position: Position, *chosen: str) -> str:
    """The commands of a deployment of these names, with their arguments and options."""
    rows = []
    for name in chosen:
        command = commands().commands["deploy"].commands[name]
        arguments = [p.name.upper() for p in command.params if not p.opts[0].startswith("--")]
        own = [f" `{p.opts[0]}`: {plain(p.help)}." for p in command.params if p.opts[0].startswith("--")]
        text = " ".join((command.help or "").split("\n\n")[0].split())
        rows.append([f"`unskew deploy {' '.join([name, *arguments])}`", text + "".join(own)])
    return markdown_table(["command", "effect"], rows)


def site_fields(position: Position) -> str:
    """The fields of ``site.yaml``; those of sections as ``section.field``."""
    rows = []
    for name, text in field_docstrings(SiteConfig).items():
        info = SiteConfig.model_fields[name]
        default = "required" if info.is_required() else default_text(info.default)
        if isinstance(info.default, BaseModel):
            values, inner = info.default.model_dump(), field_docstrings(type(info.default))
            rows += [[f"`{name}.{part}`", default_text(value), plain(inner[part])] for part, value in values.items()]
        else:
            rows.append([f"`{name}`", default, plain(text)])
    return markdown_table(["field", "default", "meaning"], rows)


def messages(position: Position) -> str:
    """The messages that a site answers, and what its replies contain."""
    rows = [[f"`{name}`", kind.when, kind.reply, kind.masked] for name, kind in REQUESTS.items()]
    return markdown_table(["message", "when", "what leaves the site", "what the server sees, masked"], rows)


def sums(position: Position) -> str:
    """The kinds of federated sums, with the permission that each needs."""
    rows = [
        [
            f"`{name}`",
            f"`{kind.permission}`" if kind.permission else "the experiment needs it",
            plain(inspect.getdoc(kind) or ""),
        ]
        for name, kind in sorted(SUMS.items(), key=lambda one: (one[1].permission, one[0]))
    ]
    return markdown_table(["sum", "permission", "content"], rows)


def attack_kinds(position: Position) -> str:
    """The kinds of attacks with their options."""
    rows = []
    for name, kind in ATTACKS.items():
        meaning, paper = paragraphs(kind)
        texts = {k: text for k, text in field_docstrings(kind).items() if k not in Attack.model_fields}
        own = [f"`{k}` ({default_text(kind.model_fields[k].default)}): {plain(text)}" for k, text in texts.items()]
        rows.append([f"`{name}`", plain(meaning), "; ".join(own), plain(paper)])
    return markdown_table(["kind", "attack", "options (default)", "paper"], rows)


def classifier_metrics(position: Position) -> str:
    """The metrics that ``metrics`` may name."""
    rows = []
    for name, metric in METRICS.items():
        text = " ".join(paragraphs(metric)).removeprefix("Compute ").removeprefix("the ")
        lower = ". Lower is better" if name in KNOWN_METRICS and KNOWN_METRICS[name].lower_is_better else ""
        rows.append([f"`{name}`", plain(text) + lower + (". Two classes only" if name in TWO_CLASSES else "")])
    return markdown_table(["`metrics`", "meaning"], rows)


DIAGNOSTICS = {
    "local_models": LocalModels,
    "consensus": Consensus,
    "updates": UpdateCosines,
    "gradients": Gradients,
    "server": ServerCost,
}


def diagnostics(position: Position) -> str:
    """The metrics of the diagnostics: the second paragraph of their docstrings."""
    rows = [[f"`{name}`", plain(paragraphs(cls)[1]).replace("||", "‖")] for name, cls in DIAGNOSTICS.items()]
    return markdown_table(["`diagnose`", "metrics"], rows)


# ---- data ---------------------------------------------------------------------------------------------------------------


def sources(position: Position) -> str:
    """The data sources, with the columns of inputs and labels of those from the Hugging Face Hub."""
    rows = []
    for name, text in SOURCES.items():
        columns = names((HUB[name].image, HUB[name].label)) if name in HUB else ""
        rows.append([f"`{name}`", text.replace("<", "&lt;"), columns])
    return markdown_table(["source", "content", "columns of input and label"], rows)


def partitions(position: Position) -> str:
    """The partitions."""
    rows = [text.split(": ", 1) for text in PARTITIONS.values()]
    return markdown_table(["form", "what each client gets"], [[f"`{form}`", text] for form, text in rows])


def partition_options(position: Position) -> str:
    """The options of the partitions."""
    rows = [[f"`{key}`", f"`{name}`", text] for name, known in OPTIONS.items() for key, text in known.items()]
    return markdown_table(["option", "of", "meaning"], rows)


def benchmark_fields(position: Position, kind: str) -> str:
    """The fields of a suite file or a federation file."""
    model = {"suite": Suite, "federation": BenchmarkFederation}[kind]
    rows = []
    for name, text in docstring_entries(model).items():
        info = model.model_fields[name]
        default = "required" if info.is_required() else default_text(info.get_default(call_default_factory=True))
        rows.append([f"`{name}`", default, plain(text)])
    return markdown_table(["field", "default", "meaning"], rows[1:])  # the name follows from the file


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        method_table,
        composition_table,
        methods,
        slot_table,
        hooks,
        rule_attributes,
        search_spaces,
        requirements,
        model_table,
        model_options,
        configuration,
        command_table,
        flags,
        shared_flags,
        resumable_fields,
        tunable_fields,
        deploy_commands,
        site_fields,
        messages,
        sums,
        sources,
        attack_kinds,
        diagnostics,
        classifier_metrics,
        partitions,
        partition_options,
        benchmark_fields,
    )
}
"""Functions that pages may name."""


def expand(markdown: str, page: str) -> str:
    """Replace the generated blocks of a page.

    Args:
        markdown: Text of the page.
        page: Path of the page, relative to ``docs/``.

    Raises:
        KeyError: If a block names no function of this module.
    """

    def generated(block: re.Match[str]) -> str:
        titles = re.findall("^## (.*)$", markdown[: block.start()], re.MULTILINE)
        return GENERATORS[block[1]](Position(page, titles[-1] if titles else ""), *block[2].split())

    if page.startswith("methods/"):
        first, *parts = re.split(r"^## (.*)\n", markdown, flags=re.MULTILINE)
        sections = zip(parts[::2], parts[1::2], strict=True)
        written = (
            f"## {t}\n\n{method_section(t, text)}" if t in METHODS else f"## {t}\n{text}" for t, text in sections
        )
        markdown = first + "".join(written)
    return BLOCK.sub(generated, markdown)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace the generated blocks of a page; mkdocs calls this.

    Args:
        markdown: Text of the page.
        page: The page.
        config: Configuration of the site.
        files: Files of the site.
    """
    return expand(markdown, page.file.src_uri)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Name a page: python docs/generate.py docs/configuration.md")
    source = Path(sys.argv[1]).resolve()
    print(expand(source.read_text(), source.relative_to(DOCS.resolve()).as_posix()))
