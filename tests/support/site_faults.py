"""Settings and answers for tests of sites that drop out: deadlines, lost messages, sums that differ by rounding."""

from unskew.deployment.server.config import Deployment, RoundPolicy

SCAFFOLD = {"method": "scaffold", "rounds": 4, "eval_clients": 0}

MASKED = {"secure_aggregation": "required", "eval_clients": 0}

FOUR = {**MASKED, "clients": 4, "rounds": 1}


def with_patience(**patience):
    """A deployment that waits for updates as a policy says."""
    return Deployment(run="0123456789abcdef", startup_timeout=0.5, round_policy=RoundPolicy(**patience))


def trained(frame):
    """Return whether a message asks a site to train."""
    return frame.kind == "train"


def lost(kind, whom):
    """Answers of that kind that never arrive."""
    return lambda client, asked, answer: None if asked.kind == kind and client in whom else answer


def close(one, other, by=1e-5):
    """The vectors differ by no more than rounding of masked sums."""
    assert float((one - other).abs().max()) <= by * float(other.abs().max())
