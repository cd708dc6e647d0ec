"""Kinds of attacks with their options: the section ``attack`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from unskew.errors import ConfigError, short_repr, unknown_name
from unskew.expressions import parse_expression

DEFAULT_SHARE = 0.2
CLIENT_SEPARATOR = "+"
"""Separator of the clients in a compact expression: ``signflip:clients=0+3``."""
Label = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class Attack(BaseModel):
    """Options that all kinds have.

    Attributes:
        reads_honest: Whether the attack reads the honest updates of the round.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    reads_honest: ClassVar[bool] = False

    kind: str
    """Kind of the attack."""
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of clients that attack, drawn by the seed; 0.2 if ``clients`` is not set."""
    clients: Annotated[tuple[Label, ...], Field(min_length=1)] | None = None
    """Numbers of the clients that attack."""
    from_round: Annotated[int, Field(ge=1)] = 1
    """First round with attackers; rounds are counted from 1."""


class LabelFlip(Attack):
    """Training on labels ``C - 1 - y``, or on ``to_class`` instead of ``from_class``.

    Tolpegin et al. 2020, arXiv:2007.08432.
    """

    kind: Literal["labelflip"] = "labelflip"
    from_class: Label | None = None
    """Class whose label is changed; None changes the label of every sample."""
    to_class: Label | None = None
    """New label of that class."""


class SignFlip(Attack):
    """``-scale * u_k`` instead of the update ``u_k``.

    Li et al. 2019, arXiv:1811.03761.
    """

    kind: Literal["signflip"] = "signflip"
    scale: Factor = 1.0
    """Factor of the update."""


class GaussianNoise(Attack):
    """Noise ``N(0, sigma^2)`` instead of the update.

    Blanchard et al. 2017, arXiv:1703.02757.
    """

    kind: Literal["gaussian"] = "gaussian"
    sigma: Factor = 1.0
    """Standard deviation of each entry."""


class InnerProduct(Attack):
    """``-epsilon`` times the mean of the honest updates.

    Xie et al. 2019, arXiv:1903.03936.
    """

    reads_honest: ClassVar[bool] = True

    kind: Literal["ipm"] = "ipm"
    epsilon: Factor = 0.1
    """Factor of the mean."""


class LittleIsEnough(Attack):
    """Mean of the honest updates minus ``z`` standard deviations, in each coordinate.

    Baruch et al. 2019, arXiv:1902.06156.
    """

    reads_honest: ClassVar[bool] = True

    kind: Literal["alie"] = "alie"
    z: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | None = None
    """Number of standard deviations; None computes it from the numbers of clients and attackers of the round."""


class Mimic(Attack):
    """Copy of the honest client that is farthest along the direction of largest variance.

    Karimireddy et al. 2020, arXiv:2006.09365.
    """

    reads_honest: ClassVar[bool] = True

    kind: Literal["mimic"] = "mimic"
    warmup: Annotated[int, Field(ge=1)] = 1
    """Number of rounds that determine the direction."""


class Backdoor(Attack):
    """Training on additional images with a patch and the target label; the update is multiplied by ``boost``.

    Bagdasaryan et al. 2018, arXiv:1807.00459.
    """

    kind: Literal["backdoor"] = "backdoor"
    target: Label = 0
    """Class that the patch should cause."""
    patch: Annotated[int, Field(ge=1)] = 3
    """Side length of the patch in pixels."""
    share_of_batch: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of images with a patch among all training images of an attacker, so on average in each batch."""
    boost: Factor | None = None
    """Factor of the update; None means the number of clients of the round divided by the server learning rate."""


class FreeRide(Attack):
    """No training: zeros, or the last change of the global model.

    Fraboni et al. 2020, arXiv:2006.11901.
    """

    kind: Literal["freeride"] = "freeride"
    mode: Literal["zero", "last"] = "zero"
    """Send zeros, or the change of the global model in the previous round."""


ATTACKS: dict[str, type[Attack]] = {
    "labelflip": LabelFlip,
    "signflip": SignFlip,
    "gaussian": GaussianNoise,
    "ipm": InnerProduct,
    "alie": LittleIsEnough,
    "mimic": Mimic,
    "backdoor": Backdoor,
    "freeride": FreeRide,
}
"""Class of each kind of attack, by name."""
AnyAttack = Annotated[
    LabelFlip | SignFlip | GaussianNoise | InnerProduct | LittleIsEnough | Mimic | Backdoor | FreeRide,
    Field(discriminator="kind"),
]
OPTIONS = frozenset(name for kind in ATTACKS.values() for name in kind.model_fields)
"""Names of the options of all kinds."""


def attack_values(attack: Any) -> Any:
    """Convert an expression such as ``signflip:share=0.2,scale=2`` to a mapping, and validate the names of options.

    Args:
        attack: Expression, mapping of options, ``Attack``, or None. The kind ``none`` means no attack.

    Returns:
        Mapping of options by name, an ``Attack``, or None for no attack.

    Raises:
        ConfigError: If there is no such kind, or the kind has no such option.
    """
    if isinstance(attack, str):
        expression = parse_expression(attack)
        if expression.values:
            raise ConfigError(f"{expression.values[0]!r} in attack={attack} is not an option; write option=value.")
        if "kind" in expression.options:
            raise ConfigError(f"The attack {expression.name} has no option 'kind'. Write KIND:OPTION=VALUE.")
        attack = {"kind": expression.name, **expression.options}
        if "clients" in attack:
            attack["clients"] = attack["clients"].split(CLIENT_SEPARATOR)
    if not isinstance(attack, Mapping):
        return attack
    values = dict(attack)
    if "kind" not in values:
        unknown = next((str(name) for name in values if name not in OPTIONS), None)
        if unknown is not None:
            raise ConfigError(unknown_name("option", unknown, OPTIONS, owner="The section attack"))
        raise ConfigError(f"attack needs a kind: attack.kind=NAME, with one of {', '.join(ATTACKS)}.")
    kind = values["kind"]
    if kind is None or kind == "none":
        return None
    if not isinstance(kind, str) or kind not in ATTACKS:
        raise ConfigError(unknown_name("attack", kind if isinstance(kind, str) else short_repr(kind), ATTACKS))
    for name, value in values.items():
        if name not in ATTACKS[kind].model_fields:
            own = [option for option in ATTACKS[kind].model_fields if option != "kind"]
            raise ConfigError(unknown_name("option", str(name), own, owner=f"The attack {kind}"))
        if isinstance(value, bool):
            raise ConfigError(f"attack.{name}={value} is not valid: it must not be a boolean.")
    if values.get("clients") is None and values.get("share") is None:
        values["share"] = DEFAULT_SHARE
    return values


def check_attack_options(attack: Attack, rounds: int) -> None:
    """Validate options that depend on each other.

    Args:
        attack: Options of the attack.
        rounds: Number of rounds of the run.

    Raises:
        ConfigError: If the attackers are named twice, the attack never starts, or an option of a pair is missing.
    """
    if attack.share is not None and attack.clients is not None:
        raise ConfigError("attack.share and attack.clients both determine the attackers. Set only one of them.")
    if attack.clients is not None and len(set(attack.clients)) < len(attack.clients):
        raise ConfigError("attack.clients names a client twice. Name each client once.")
    if attack.from_round > rounds:
        raise ConfigError(
            f"attack.from_round={attack.from_round} is after the last of {rounds} rounds, so no client would attack. "
            "Use a smaller value."
        )
    if isinstance(attack, LabelFlip):
        if (attack.from_class is None) != (attack.to_class is None):
            raise ConfigError("attack.from_class and attack.to_class are needed together. Set both, or none of them.")
        if attack.from_class is not None and attack.from_class == attack.to_class:
            raise ConfigError("attack.from_class equals attack.to_class, so no label would change. Use two classes.")


def divergence_remedy(kind: str | None) -> str:
    """Return what helps against divergence, as a sentence: under an attack, a robust method comes first.

    Args:
        kind: Kind of the attack, or None.

    >>> divergence_remedy(None)
    'Try a smaller learning rate.'
    """
    if kind is None:
        return "Try a smaller learning rate."
    return (
        f"The attack {kind} may be the cause: use a robust method such as median, trimmed or multikrum. If it diverges, too, "
        "try a smaller learning rate."
    )
