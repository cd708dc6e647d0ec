"""Hostile input: values at and beyond every edge, and what may come of them: it works, or a sentence says why not."""

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from unskew.errors import UnskewError

GIB = 1 << 30
SECONDS = 20
"""Of computing time that nothing may take before it is refused, on any machine."""


def scaled(examples):
    """Return the number of cases under the profile of Hypothesis: as many as given, and ten times as many with ``fuzz``."""
    return examples * settings.default.max_examples // 100


def fuzz(examples):
    """Return the settings of Hypothesis for a number of cases, which the profile scales."""
    return settings(max_examples=scaled(examples))


def random_draws(seed):
    """Return a random generator with this seed; with the profile ``fuzz`` with another one in each run, which is printed."""
    if not settings.default.derandomize:
        seed = int(os.environ.get("UNSKEW_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
        print(f"UNSKEW_FUZZ_SEED={seed} repeats these draws")
    return random.Random(seed)


def amounts(quick, slow):
    """How many cases: so many in the quick suite, so many in the slow one."""
    return pytest.mark.parametrize("examples", [quick, pytest.param(slow, marks=pytest.mark.slow)])


# ---- values -----------------------------------------------------------------------------------------------------------

TEXTS = [
    *(
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-1",
        "-0",
        "0",
        "1",
        "2",
        "3.0",
        "0.5",
        "1e-320",
        "99999999999999999999",
    ),
    *("9" * 5000, "1_000", "0x10", "٣", "²", "true", "null", "~", "é", "e\u0301", "😀", "\u202e", "\ufeff", "a" * 5000),
    *(
        "a.b",
        "a:b",
        "a=b",
        "a+b",
        ",",
        ":",
        "=",
        "+",
        ";",
        "[",
        "{",
        "'",
        '"',
        "%s",
        "{0}",
        "../x",
        "/",
        ".",
        "..",
        "-",
    ),
    *("--", "\\", "\n", "\t", "\x1b[31m", "[red]x[/red]", "[/]", "{}", "[]", "*", "&a *a", "!!python/name:os.system"),
    *("2020-13-45", "12:30", "CON", "here/new", "tiny.csv", "~/x", "~nobody/x", "a" * 300),
]
NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 10**400),
    *(
        0.0,
        -0.0,
        0.5,
        1.0,
        1.5,
        -0.5,
        1e-320,
        1e-9,
        1e6,
        1e30,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
]
OTHERS = [
    *(None, True, False, b"", b"\xff", "\x00", "\ud800", [], {}, (), [[]], [None], {"a": {}}, {1: 2}, {None: None}),
    *(np.float64("nan"), np.int64(5), np.array(3), np.zeros((2, 0)), np.array(["a"]), torch.tensor(1), torch.zeros(2)),
    *(Path("x"), Decimal("0.1"), Decimal("nan"), Fraction(1, 3), 1j, date(2020, 1, 1), range(3), {1}, len, object, ...),
]
texts = st.sampled_from(TEXTS) | st.text(max_size=12)
numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
plain = st.sampled_from([None, True, False]) | numbers | texts
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | plain, inner, max_size=3), max_leaves=6
)
unprintable = st.builds(lambda: 10**5000)  # Python writes no more than 4300 digits
values = st.sampled_from(OTHERS) | nested | unprintable


@st.composite
def mutated(draw, base):
    """A text with one or two small mistakes, or none."""
    text = draw(base)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        piece = draw(st.sampled_from(["", "", text[place : place + 1] * 2, " ", "-", "\u00e9", *",:=+.;_/0Z"]))
        text = text[:place] + piece + text[place + draw(st.integers(0, 1)) :]
    return draw(st.sampled_from([text, text, text, text.upper(), f" {text} ", text * 2, text[::-1]]))


def near(*names):
    """Existing names, most often as they are."""
    base = st.sampled_from(names)
    return base | base | mutated(base) | texts


# ---- what may come of them --------------------------------------------------------------------------------------------


class Accepted(Exception):
    """All was checked; a run would begin here."""


def accepted(*args, **kwargs):
    """In the place of what begins a run."""
    raise Accepted


class TooSlow(Exception):
    """It took more than ``SECONDS`` of computing."""


_written = None


def _watch(event, args):
    if _written is None:
        return
    if event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(os.path.abspath(args[0]))
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir") and isinstance(args[0], str | Path):
        _written.append(os.path.abspath(args[0]))


class Sandbox:
    """A folder that one works in. Each case leaves it as it was; nothing is written elsewhere."""

    hook = False

    def __init__(self, root):
        self.root, self.here = root, root / "here"
        self.here.mkdir()
        if not Sandbox.hook:  # it cannot be taken away again
            sys.addaudithook(_watch)
            Sandbox.hook = True

    def files(self):
        found = {}
        for path in self.root.rglob("*"):
            about = path.lstat()
            found[path] = None if path.is_dir() else (about.st_size, about.st_mtime_ns)
        return found

    @contextlib.contextmanager
    def case(self):
        """Within: limits of time and memory; afterwards nothing was written elsewhere, and what is new is removed."""
        global _written
        before = self.files()
        _written = []
        try:
            with limits():
                yield before
        finally:
            written, _written = _written, None
            for path in sorted(set(self.files()) - set(before), reverse=True):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        torch_cache = f"{tempfile.gettempdir()}/torchinductor"
        own = (str(self.root), "/dev/", os.environ["XDG_CACHE_HOME"], torch_cache)
        elsewhere = [path for path in written if not path.startswith(own) and "__pycache__" not in path]
        assert not elsewhere, elsewhere

    def python(self, action):
        """Whether it worked; if not, a sentence came out, and nothing lies in the folder that was not there before."""
        with self.case() as before:
            try:
                action()
            except Accepted:
                return True
            except UnskewError as error:
                said = str(error).strip()
            else:
                return True
            assert said, "it says nothing"
            assert self.files() == before, "a refusal left something behind"
            return False

    def command(self, call, *args):
        """As before, on the command line: exit code 2 and something on standard error."""
        with self.case() as before:
            streams = Streams()
            with contextlib.redirect_stdout(streams.out), contextlib.redirect_stderr(streams.err):
                try:
                    outcome = call(streams, *args)
                except Accepted:
                    return True
            assert outcome.code in (0, 2), outcome
            if outcome.code == 2:
                assert outcome.err.strip(), "it says nothing"
                assert outcome.err.startswith(("unskew: ", "Usage: unskew")), outcome.err
                assert "Traceback" not in outcome.err
                assert self.files() == before, "a refusal left something behind"
            return outcome.code == 0


@contextlib.contextmanager
def limits():
    """Within, computing ends after ``SECONDS``, and there are four gigabytes more than are used already."""

    def end(number, frame):
        raise TooSlow

    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, end)
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * GIB, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


class Streams:
    """Standard output and error as a terminal's: what cannot be encoded is an error in the one, escaped in the other."""

    def __init__(self):
        self.out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        self.err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)

    def readouterr(self):
        """As pytest's ``capsys`` does."""
        found = []
        for stream in (self.out, self.err):
            found.append(stream.buffer.getvalue().decode())
            stream.buffer.seek(0)
            stream.buffer.truncate()
        return found
