"""Terms on which server and sites must agree: version of the messages, experiment, software, names and addresses."""

from __future__ import annotations

import hashlib
import json
import re

import torch

from unskew.config.experiment import Experiment
from unskew.config.paths import without_data_locations
from unskew.methods.dp_sites import site_noise
from unskew.methods.registry import method as method_of
from unskew.runs.resume import RESUMABLE
from unskew.version import __version__

PROTOCOL = 6
"""Version of the messages between server and sites; both must use the same."""
NAME = r"^[\w.-]{1,64}$"
"""Pattern of a site's name."""
LONGEST_SOCKET = 100
"""Maximum number of characters of a socket's path; operating systems allow about this many."""
SKEW = 300.0
"""Clock difference in seconds above which a warning is shown."""


def experiment_digest(config: Experiment) -> str:
    """Return a digest of all fields of an experiment that affect a site's training, without data locations."""
    not_here = {*RESUMABLE, "metrics", "objective"}  # execution, and what only the server measures
    values = {k: v for k, v in without_data_locations(config.model_dump(mode="json")).items() if k not in not_here}
    method = method_of(config.method)
    # Noise is computed for a number of rounds, and a site takes part in no more of them.
    noisy = site_noise(method) is not None or any(rule.noise_for_rounds for rule in method.client)
    if config.training.schedule.ends or noisy:
        values["rounds"] = config.rounds
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def software_versions() -> dict[str, str]:
    """Return the versions of unskew and PyTorch and the CPU's vector instructions, which determine a result bit for bit."""
    return {
        "unskew": __version__,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def parse_address(value: str) -> str:
    """Validate an address of the form ``HOST:PORT`` and return it.

    Args:
        value: Text to parse.

    Raises:
        ValueError: If the text is not an address.

    >>> parse_address("superlink.example.org:8000")
    'superlink.example.org:8000'
    """
    host, _, port = value.rpartition(":")
    if not re.fullmatch(r"[\w.-]+", host) or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError("write HOST:PORT, such as superlink.example.org:8000")
    return value
