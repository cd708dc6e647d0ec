"""Registry of methods, and parser of method expressions.

A method expression is ``name`` or ``name:option=value,option=value``; ``+`` combines methods into a composition. A new
method needs one new file and one line here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import pickle
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from unskew import plugins
from unskew.errors import ConfigError, short_repr
from unskew.expressions import parse_expression
from unskew.methods.composition import compose
from unskew.option_parsing import (
    build_from_options,
    check_finite,
    import_from_path,
    import_own,
    option_defaults,
)

if TYPE_CHECKING:
    from unskew.protocol.rules import Method, Rule

METHODS: dict[str, str] = {
    "fedavg": "unskew.methods.fedavg:FedAvg",
    "fedavgm": "unskew.methods.fedavgm:FedAvgM",
    "fedadagrad": "unskew.methods.fedopt:FedAdagrad",
    "fedyogi": "unskew.methods.fedopt:FedYogi",
    "fedadam": "unskew.methods.fedopt:FedAdam",
    "fedbuff": "unskew.methods.fedbuff:FedBuff",
    "fedasync": "unskew.methods.fedasync:FedAsync",
    "ca2fl": "unskew.methods.ca2fl:CA2FL",
    "feddle": "unskew.methods.feddle.feddle:Feddle",
    "feddf": "unskew.methods.feddf:FedDF",
    "fedft": "unskew.methods.fedft:FedFT",
    "hfcl": "unskew.methods.hfcl:HFCL",
    "center": "unskew.methods.center:Center",
    "fedprox": "unskew.methods.fedprox:FedProx",
    "scaffold": "unskew.methods.scaffold:Scaffold",
    "fedcog": "unskew.methods.fedcog.fedcog:FedCOG",
    "fedcog-authors": "unskew.methods.fedcog.authors:FedCOGAuthors",
    "moon": "unskew.methods.moon:Moon",
    "fedsam": "unskew.methods.fedsam:FedSAM",
    "fedlesam": "unskew.methods.fedlesam:FedLESAM",
    "fedsol": "unskew.methods.fedsol:FedSOL",
    "fedexp": "unskew.methods.fedexp:FedExP",
    "fednova": "unskew.methods.fednova:FedNova",
    "feddyn": "unskew.methods.feddyn:FedDyn",
    "fedpvr": "unskew.methods.fedpvr:FedPVR",
    "fedcm": "unskew.methods.fedcm:FedCM",
    "fedacg": "unskew.methods.fedacg:FedACG",
    "mimelite": "unskew.methods.mimelite:MimeLite",
    "mime": "unskew.methods.mime:Mime",
    "fedsmoo": "unskew.methods.fedsmoo:FedSMOO",
    "qfedavg": "unskew.methods.qfedavg:QFedAvg",
    "feddisco": "unskew.methods.feddisco:FedDisco",
    "ifca": "unskew.methods.ifca:IFCA",
    "fedproto": "unskew.methods.fedproto:FedProto",
    "fedtgp": "unskew.methods.fedtgp:FedTGP",
    "fedgh": "unskew.methods.fedgh:FedGH",
    "fedamp": "unskew.methods.fedamp:FedAMP",
    "fedfomo": "unskew.methods.fedfomo:FedFomo",
    "fedals": "unskew.methods.fedals.fedals:FedALS",
    "ditto": "unskew.methods.ditto:Ditto",
    "apfl": "unskew.methods.apfl:APFL",
    "pfedme": "unskew.methods.pfedme:PFedMe",
    "fedala": "unskew.methods.fedala:FedALA",
    "fedrep": "unskew.methods.fedrep:FedRep",
    "fedpac": "unskew.methods.fedpac:FedPAC",
    "fedper": "unskew.methods.fedper:FedPer",
    "lgfedavg": "unskew.methods.lgfedavg:LGFedAvg",
    "fedbabu": "unskew.methods.fedbabu:FedBABU",
    "fedas": "unskew.methods.fedas:FedAS",
    "fedrod": "unskew.methods.fedrod:FedRoD",
    "feddbe": "unskew.methods.feddbe:FedDBE",
    "gpfl": "unskew.methods.gpfl:GPFL",
    "floco": "unskew.methods.floco:Floco",
    "heterofl": "unskew.methods.heterofl:HeteroFL",
    "fedrolex": "unskew.methods.heterofl:FedRolex",
    "flora": "unskew.methods.flora:FLoRA",
    "fedsa": "unskew.methods.fedsa:FedSA",
    "fedex": "unskew.methods.fedex:FedEx",
    "hetlora": "unskew.methods.hetlora:HetLoRA",
    "fedbn": "unskew.methods.fedbn:FedBN",
    "knnper": "unskew.methods.knnper:KNNPer",
    "ft": "unskew.methods.finetune:FineTune",
    "perfedavg": "unskew.methods.perfedavg:PerFedAvg",
    "fedreg": "unskew.methods.fedreg:FedReg",
    "feddecorr": "unskew.methods.feddecorr:FedDecorr",
    "feduv": "unskew.methods.feduv:FedUV",
    "fedntd": "unskew.methods.fedntd:FedNTD",
    "fedlc": "unskew.methods.fedlc:FedLC",
    "fedrs": "unskew.methods.fedrs:FedRS",
    "fedetf": "unskew.methods.fedetf:FedETF",
    "ccvr": "unskew.methods.ccvr:CCVR",
    "fedssyn": "unskew.methods.fedssyn.fedssyn:Fedssyn",
    "vhl": "unskew.methods.vhl:VHL",
    "fedgen": "unskew.methods.fedgen:FedGen",
    "dense": "unskew.methods.dense:Dense",
    "feddm": "unskew.methods.feddm:FedDM",
    "median": "unskew.methods.robust.rules:Median",
    "trimmed": "unskew.methods.robust.rules:Trimmed",
    "krum": "unskew.methods.robust.rules:Krum",
    "multikrum": "unskew.methods.robust.rules:MultiKrum",
    "bulyan": "unskew.methods.robust.rules:Bulyan",
    "geomedian": "unskew.methods.robust.rules:GeoMedian",
    "cclip": "unskew.methods.robust.rules:CenteredClipping",
    "fltrust": "unskew.methods.robust.rules:FLTrust",
    "smooth": "unskew.methods.smooth:Smooth",
    "dp": "unskew.methods.dp:DP",
    "dpsgd": "unskew.methods.dpsgd:DPSGD",
    "topk": "unskew.methods.compression.rules:TopK",
    "randk": "unskew.methods.compression.rules:RandK",
    "qsgd": "unskew.methods.compression.rules:QSGD",
    "sign": "unskew.methods.compression.rules:Sign",
    "int8": "unskew.methods.compression.rules:Int8",
    "fp16": "unskew.methods.compression.rules:FP16",
    "bf16": "unskew.methods.compression.rules:BF16",
    "powersgd": "unskew.methods.compression.rules:PowerSGD",
}

COMPOSITIONS: dict[str, tuple[str, str]] = {
    "fedspeed": ("fedsam:rho=0.1+feddyn:alpha=0.1", "Sun et al. 2023, arXiv:2302.10429"),
    "fedgamma": ("fedsam:rho=0.01+scaffold", "Dai et al. 2023, IEEE TNNLS"),
    "mofedsam": ("fedsam:rho=0.1+fedcm:alpha=0.1", "Qu et al. 2022, arXiv:2206.02618"),
    "fedlesam-s": ("fedlesam:rho=0.5+scaffold", "Fan et al. 2024, arXiv:2405.18890"),
    "fedlesam-d": ("fedlesam:rho=0.1+feddyn:alpha=0.1", "Fan et al. 2024, arXiv:2405.18890"),
}
"""Names of published compositions: the method expression with the authors' options, and the paper."""

REFERENCES: dict[str, str] = {
    "pooled": "unskew.methods.references:Pooled",
    "local": "unskew.methods.references:Local",
}
"""Reference rows of a comparison. They are not federated methods, so lists of methods do not contain them."""

MethodLike: TypeAlias = "str | Rule | Method | Sequence[str | Rule | Method]"


def check_method_name(name: str) -> None:
    """Validate the name of a method without importing PyTorch.

    Args:
        name: Name of a method, or import path ``package.module.Class``.

    Raises:
        ConfigError: If the name is not registered, not a plugin, and not an import path.
    """
    if name not in METHODS and name not in REFERENCES and "." not in name:
        plugins.find_plugin(plugins.METHODS, "method", name, METHODS)


def rule_class(name: str) -> type[Rule]:
    """Return the class of a registered method, or of a custom one with the import path ``package.module.Class``.

    Args:
        name: Name or import path of the method.

    Raises:
        ConfigError: If there is no such method.
    """
    check_method_name(name)
    from unskew.protocol.rules import Rule

    path = METHODS.get(name) or REFERENCES.get(name)
    if path is None and "." not in name:
        cls = plugins.find_plugin(plugins.METHODS, "method", name, METHODS).load()
    elif path is not None:
        cls = import_own(path)
    else:
        cls = import_from_path(":".join(name.rsplit(".", 1)), f"the method {name!r}")
    if isinstance(cls, type) and issubclass(cls, Rule):
        check_rule_name(cls)
        return cls
    raise ConfigError(
        f"{name!r} is not a method: it must be a subclass of ClientRule, AggregateRule, ServerRule, SyncRule or DataRule."
    )


def check_rule_name(rule: Rule | type[Rule]) -> None:
    """Validate that a rule or rule class has a ``name`` (raises ``ConfigError`` otherwise)."""
    if not hasattr(rule, "name"):
        cls = rule if isinstance(rule, type) else type(rule)
        raise ConfigError(
            f"{cls.__name__} needs a name: a method is a subclass of ClientRule, AggregateRule, ServerRule, SyncRule or "
            "DataRule with name, summary and paper."
        )


def _split(text: str) -> tuple[str, str]:
    """Split the expression of one method into its name and the text of its options."""
    name, colon, rest = (part.strip() for part in text.partition(":"))
    spaced = re.fullmatch(r"([\w.-]+)[\s,(]+(\w+\s*=[^()]+)\)?", text.strip()) if not colon else None
    if spaced is not None:
        raise ConfigError(f"{text!r} is not a method; write {spaced[1]}:{spaced[2].strip()}.")
    if colon and not rest:
        raise ConfigError(f"{text!r} ends with a colon; write {name}:option=value, or {name} alone.")
    name = name if "." in name else name.lower()
    check_method_name(name)
    return name, rest


def check_expression(spec: str) -> list[str]:
    """Split a composition into the expressions of its methods, and validate their names without importing PyTorch.

    A name in ``COMPOSITIONS`` stands for its methods.

    Args:
        spec: Composition, such as ``"fedprox:mu=0.1+scaffold"``.

    Raises:
        ConfigError: If a method does not exist, or the syntax is wrong.
    """
    parts = written_parts(spec)
    if spec.strip().endswith("+") or spec.strip().startswith("+"):
        raise ConfigError(f"In {spec!r} a method name is missing next to '+'.")
    parts = [text for part in parts for text in _expand(part)]
    if not all(parts):
        raise ConfigError(f"{spec!r} is not a method; write, for example, 'fedavg' or 'fedprox:mu=0.1+scaffold'.")
    for part in parts:
        _split(part)
    return parts


def written_parts(spec: str) -> list[str]:
    """Split a composition at its plus signs; names of published compositions are not replaced.

    Args:
        spec: Composition.

    >>> written_parts("fedspeed + topk:share=1e+0")
    ['fedspeed', 'topk:share=1e+0']
    """
    # A plus sign before a digit is part of a number such as 1e+3.
    return [part.strip() for part in re.split(r"\+(?=\s*[A-Za-z_])", spec)]


def _expand(part: str) -> list[str]:
    """Return the methods that the name of a published composition stands for; other text is returned alone."""
    name, colon, _ = part.lower().partition(":")
    if name.strip() not in COMPOSITIONS:
        return [part]
    expression = COMPOSITIONS[name.strip()][0]
    if colon:
        raise ConfigError(f"{name} has no options: it stands for {expression}. Write that with the options you want.")
    return expression.split("+")


def _parse_one(text: str) -> Method:
    from unskew.protocol.method import method_of_rule

    name, rest = _split(text)
    cls = rule_class(name)
    flags = [key for key, default in option_defaults(cls).items() if isinstance(default, bool)]  # fedals:auto
    options = parse_expression(f"{name}:{rest}").with_flags(flags)
    return method_of_rule(build_from_options(cls, options, name, f"{name}:"))


def method(spec: MethodLike, **options: object) -> Method:
    """Create a method.

    Args:
        spec: Method expression (``"fedprox:mu=0.1+scaffold"``), an instance of a custom rule, a ``Method``, or a sequence
            of these, which are combined. Client rules act in the given order: the first one is innermost.
        **options: Options as Python values, if ``spec`` is the name of one method.

    Raises:
        ConfigError: If a method or option is unknown, or a value is not allowed.
        MethodConflictError: If two methods fill the same exclusive slot differently, or cannot be combined.

    >>> method("fedprox:mu=0.1+scaffold").client
    (FedProx(mu=0.1), Scaffold(option='II', variate='auto', eta_g=1.0))
    """
    if options:
        return _with_options(spec, options)
    if isinstance(spec, str):
        total = compose([_parse_one(text) for text in check_expression(spec)])
        return dataclasses.replace(total, expression=spec.replace(" ", ""))
    from unskew.protocol.method import Method, method_of_rule
    from unskew.protocol.rule import Rule

    if isinstance(spec, Method):
        return spec
    if isinstance(spec, Rule):
        check_rule_name(spec)
        check_finite(spec, spec.name)
        return dataclasses.replace(method_of_rule(spec), expression=join_expression(spec))
    if isinstance(spec, type) or not isinstance(spec, Sequence):
        what = spec.__name__ if isinstance(spec, type) else short_repr(spec)
        raise ConfigError(
            f"{what} is not a method. Pass an expression such as 'fedavg', an instance of a rule, or a list of these."
        )
    parts = [method(item) for item in spec]
    if not parts:
        raise ConfigError("An empty list is not a method. Pass at least one.")
    return dataclasses.replace(compose(parts), expression="+".join(p.expression or p.name for p in parts))


def join_expression(rule: Rule) -> str:
    """Return the expression of a rule that was created in Python: its name and its non-default options.

    >>> from unskew.methods.fedprox import FedProx
    >>> join_expression(FedProx(mu=0.5))
    'fedprox:mu=0.5'
    """
    cls = type(rule)
    name = next((n for n, path in METHODS.items() if path == f"{cls.__module__}:{cls.__qualname__}"), rule.name)
    defaults = option_defaults(cls)
    values = {key: rule_expression(getattr(rule, key)) for key in defaults}
    changed = {key: value for key, value in values.items() if value != rule_expression(defaults[key])}
    # A class that is not a dataclass stores its options as instance attributes.
    changed |= {
        key: rule_expression(value)
        for key, value in vars(rule).items()
        if key not in defaults and not hasattr(cls, key)
    }
    options = ",".join(f"{key}={value}" for key, value in changed.items())
    return f"{name}:{options}" if options else name


def rule_expression(value: object) -> str:
    """Return the value of an option as text; functions, arrays and other objects become their name and a hash."""
    if value is None or isinstance(value, str | bool | int | float | enum.Enum):
        return str(value)
    if isinstance(value, tuple | list) and all(
        item is None or isinstance(item, str | bool | int | float) for item in value
    ):
        return str(value)
    name = getattr(value, "__name__", type(value).__name__)
    code = getattr(value, "__code__", None)
    if code is not None:
        content = repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")])).encode()
        content += repr([cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]).encode()
    else:
        state = value.state_dict() if hasattr(value, "state_dict") else value
        try:
            content = pickle.dumps(state)
        except Exception:  # an object that cannot be pickled
            return str(name)
    return f"{name}#{hashlib.sha256(content).hexdigest()[:8]}"


def _with_options(spec: MethodLike, options: dict[str, object]) -> Method:
    from unskew.protocol.method import method_of_rule

    if not isinstance(spec, str) or not re.fullmatch(r"[\w.-]+", spec):
        raise ConfigError(
            f"Options as arguments need the name of one method, such as method('fedprox', mu=1), not {short_repr(spec)}."
        )
    name = spec if "." in spec else spec.lower()
    if name in COMPOSITIONS:
        raise ConfigError(f"{name} has no options: it stands for {COMPOSITIONS[name][0]}. Write that instead.")
    rule = build_from_options(rule_class(name), options, name, f"{name}:")
    spelled = ",".join(f"{key}={short_repr(value, str)}" for key, value in options.items())
    return dataclasses.replace(method_of_rule(rule), expression=f"{spec}:{spelled}")
