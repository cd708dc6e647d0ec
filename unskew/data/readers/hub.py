"""The Hugging Face hub asked once whether it can be reached: its packages alone try for a minute, in a dozen lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

PATIENCE = 5.0


def reachable() -> bool:
    """Return whether the hub answers within five seconds, with proxies and ``HF_ENDPOINT`` as set in the environment."""
    hub: Any = import_module("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # whatever the network stack raises
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Context manager that uses only downloaded files if the hub cannot be reached; yields whether it can."""
    reached = reachable()
    with from_cache(not reached):
        yield reached


@contextmanager
def from_cache(only: bool = True) -> Iterator[None]:
    """Context manager that reads downloaded files, and asks the hub as well unless ``only`` is true."""
    try:
        constants: Any = import_module("huggingface_hub.constants")
    except ImportError:  # then nothing can be taken from it
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, only
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def unreachable(what: str) -> str:
    """The sentence for something that is neither here nor to be had."""
    return f"{what} is not on this machine, and the Hugging Face hub cannot be reached. Check the network, or"
