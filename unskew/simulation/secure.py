"""Secure aggregation: the server learns the weighted sum of a round's updates and nothing of a single one.

The simulator forms that sum itself and hands the server's rules nothing else; whether a method works so can be known before
it runs. The cryptography that hides single updates on real machines is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from unskew.errors import ConfigError, MethodConflict
from unskew.methods.rules import Method, ServerRule


def check_sums_suffice(chosen: Method, rule: ServerRule, diagnose: Sequence[str]) -> None:
    """Refuse what cannot be had if the server sees only the weighted sum of updates.

    Raises:
        MethodConflict: A rule reads single updates.
        ConfigError: A diagnosis does.
    """
    readers = [part.name for part in chosen.client if part.needs == "individual"]
    readers += [rule.name] if rule.needs == "individual" else []
    if readers:
        raise MethodConflict(
            f"{readers[0]} reads the update of each single client, but secure_aggregation=required lets the server see "
            "only their weighted sum. Take a method that needs sums only (unskew methods shows which), or turn it off."
        )
    if diagnose:
        raise ConfigError(f"diagnose={diagnose[0]} looks at single updates, which secure_aggregation=required forbids.")
