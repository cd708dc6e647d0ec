"""Privacy, robustness, compression and attacks with everything else: every pair runs on all engines, or is rejected."""

import re

import pytest
import torch
from support.federations import blobs
from support.slow import slow_but

import unskew
from unskew.errors import UnskewError
from unskew.testing import assert_engines_agree

SIZES = [9, 14, 11, 8, 12, 10]
FEW = {"rounds": 3, "local_steps": 2, "batch_size": 4, "lr": 0.05, "precision": "fp64", "model": "mlp"}
DP = "dp:noise=0.2,adaptive=false,clip=1"
AT_SITES = "dp:noise=0.2,adaptive=false,clip=1,noise_at=sites,honest=4"
MEDIAN, KRUM, TOPK, RANDK = "median:bucket=2", "krum:share=0", "topk:share=0.2", "randk:share=0.3"
DPSGD = "dpsgd:noise=0.4"
ATTACK = {"attack": {"kind": "signflip", "share": 0.2}}
LATE, SECURE = {"network": "fixed:1"}, {"secure_aggregation": "required"}
SINGLE = "reads the update of each individual client"

RUNS = [
    (f"{method}+{protection}", {})
    for method in ("scaffold", "fedpvr", "fedals:alpha=2", "fedrep", "fedbn", "ditto", "fedrep+ft", "feddyn", "fedadam")
    for protection in (DP, TOPK)
]
RUNS += [
    *(
        (f"{method}+{AT_SITES}", SECURE)
        for method in ("scaffold", "fedpvr", "fedals:alpha=2", "fedrep", "fedbn", "ditto")
    ),
    *((f"{other}+{AT_SITES}", {}) for other in ("dpsgd:noise=0.4", "fedrep+ft", "feddyn", "fedadam")),
    (AT_SITES, {"attack": {"kind": "labelflip", "share": 0.2}}),
    *((f"{method}+{MEDIAN}", {}) for method in ("fedals:alpha=2", "fedrep", "ditto", "feddyn", "fedadam", "fedprox")),
    *((f"{method}", ATTACK) for method in ("scaffold", "fedals:alpha=2", "fedrep", "ditto", "krum:share=0", DP, TOPK)),
    (DP, SECURE),
    (f"scaffold+{DP}", SECURE),
    (MEDIAN, LATE),
    (TOPK, LATE),
    (f"fedbuff:buffer_size=3+{TOPK}", {}),
    (f"{TOPK}+{MEDIAN}", {}),
    (f"{TOPK}+{KRUM}+fedavgm", ATTACK),
    (f"fedals:alpha=2+{TOPK}+{MEDIAN}", {}),
    (f"fedprox:mu=0.1+{RANDK}", {}),
    ("smooth+cclip+fedadam", ATTACK),
    *(
        (f"{DPSGD}+{other}", {})
        for other in (f"scaffold+{DP}", f"fedprox+{TOPK}", MEDIAN, KRUM, "fedals:alpha=2", "fedrep")
    ),
    *((f"{DPSGD}+{other}", {}) for other in ("fednova", "feddyn", "fedbuff:buffer_size=3", "smooth+ft")),
    *((DPSGD, options) for options in (ATTACK, LATE, SECURE)),
]


# For each protection: a method that uploads more than its update, one whose clients share a part of the model, one with a
# step of its own at the server, an attack, late updates, secure sums, and another protection.
QUICK = [
    *((f"{method}+{DP}", {}) for method in ("scaffold", "fedals:alpha=2", "ditto")),
    *((f"{method}+{TOPK}", {}) for method in ("scaffold", "fedrep", "fedadam")),
    (f"scaffold+{AT_SITES}", SECURE),
    (f"fedrep+{MEDIAN}", {}),
    *((method, ATTACK) for method in ("scaffold", "krum:share=0", DP)),
    (DP, SECURE),
    (MEDIAN, LATE),
    (TOPK, LATE),
    (f"fedbuff:buffer_size=3+{TOPK}", {}),
    (f"{TOPK}+{KRUM}+fedavgm", ATTACK),
    (f"fedprox:mu=0.1+{RANDK}", {}),
    ("smooth+cclip+fedadam", ATTACK),
    *((f"{DPSGD}+{other}", {}) for other in (f"scaffold+{DP}", MEDIAN, "fedals:alpha=2")),
    (DPSGD, SECURE),
]


REJECTED = [
    (MEDIAN, SECURE, SINGLE),
    (TOPK, SECURE, "compressed cannot be decoded"),
    (RANDK, SECURE, "compressed cannot be decoded"),
    (f"scaffold+{MEDIAN}", {}, "does not protect what scaffold uploads"),
    (f"fedpvr+{KRUM}", {}, "does not protect what fedpvr uploads"),
    (f"fedals+{KRUM}", {}, "compares whole updates"),
    (f"fedbn+{KRUM}", {}, "compares whole updates"),
    (DP, LATE, "network.delay"),
    (AT_SITES, LATE, "network.delay"),
    (AT_SITES, ATTACK, "clients send noisy integers"),
    (f"fedbuff+{AT_SITES}", {}, "reads the change of normalization buffers in each update"),
    (f"{AT_SITES}+{MEDIAN}", {}, "both fill the slot 'aggregate'"),
    (f"{AT_SITES}+{RANDK}", {}, "longer than the one that dp has clipped"),
    (f"fedbuff+{DP}", {}, "reads the change of normalization buffers in each update"),
    (f"{DP}+{MEDIAN}", {}, "both fill the slot 'aggregate'"),
    (f"{DP}+{TOPK}", {}, "longer than the one that dp has clipped"),
    (f"{TOPK}+qsgd", {}, "both compress what a client sends"),
    (f"fedbuff+{MEDIAN}", {}, "reads the change of normalization buffers in each update"),
]


@pytest.mark.usefixtures("one_key")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("method", "options"), slow_but(QUICK, RUNS))
def test_a_supported_pair_gives_the_same_on_every_engine(method, options):
    results = [
        unskew.run(blobs(SIZES), method=method, engine=engine, workers=2, **FEW, **options)
        for engine in ("inline", "vectorized", *(("processes",) if "scaffold" in method or options == ATTACK else ()))
    ]
    first = results[0]
    assert bool(torch.isfinite(first.vector).all())
    for other in results[1:]:
        assert_engines_agree(other.vector, first.vector)
        assert other.summary["bytes_up"] == first.summary["bytes_up"]


@pytest.mark.parametrize(("method", "options", "words"), REJECTED)
def test_an_unsupported_pair_is_rejected_before_training(method, options, words):
    with pytest.raises(UnskewError, match=re.escape(words)):
        unskew.run(blobs(SIZES), method=method, **FEW, **options)
