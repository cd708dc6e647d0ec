"""Availability check of the Hugging Face Hub, whose packages otherwise retry for about a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

PATIENCE = 5.0


def reachable() -> bool:
    """Return whether the Hub replies within five seconds, with ``HF_ENDPOINT`` and proxies of the environment."""
    hub: Any = import_module("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # the network stack raises many types
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Context manager that uses only downloaded files if the Hub cannot be reached; yields whether it can."""
    reached = reachable()
    with from_cache(not reached):
        yield reached


@contextmanager
def from_cache(only: bool = True) -> Iterator[None]:
    """Context manager that reads only downloaded files if ``only`` is true; otherwise the Hub may be used, too."""
    try:
        constants: Any = import_module("huggingface_hub.constants")
    except ImportError:  # nothing can be loaded from the Hub anyway
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, only
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


UNREACHABLE = "it is not on this machine, and the Hugging Face Hub cannot be reached. Check the network, or"
"""Start of an error message for something that is neither downloaded nor reachable."""
