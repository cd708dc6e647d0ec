"""Mutated messages: no process of a site or a server ends because of one, whatever its bytes.

``UNSKEW_FRAMES`` says how many the slow suite tries (1,000,000, about two minutes).
"""

import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flower_processes import FLOWER as FLOWER_PROGRAMS
from support.flower_processes import environment, real
from support.frames import Mutator, from_bytes, on_the_wire, to_bytes
from support.fuzzing import fuzz, scaled
from support.sites import TINY, LoopPlace, deployed
from support.slow import slow_but

from unskew.deployment.flower.grid_bridge import GridBridge, LinkClosedError
from unskew.deployment.server import round_requests
from unskew.deployment.server.config import Deployment, RoundPolicy
from unskew.deployment.server.connection import SiteConnection
from unskew.deployment.server.control import ControlSocket
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.site import listener
from unskew.deployment.wire.frames import MAGIC, EncodedFrame, Frame, FrameError, receive
from unskew.errors import UnskewError

pytestmark = pytest.mark.fuzz

RUNS = {
    "plain": {"method": "scaffold+ft", "holdout": 0.2, "rounds": 2},
    "slices": {"method": "fedrep+fedprox", "model": "mlp", "rounds": 1},
    "images": {"method": "fedssyn:generator=vae-small,epochs=1,n_syn=2", "rounds": 1, "eval_clients": 0},
    "compressed": {"method": "topk:share=0.1+scaffold", "rounds": 1, "eval_clients": 0},
    "labels": {"method": "feddm:images=1,server_epochs=1", "rounds": 1, "eval_clients": 0},
    "masked": {"method": "scaffold", "rounds": 1, "eval_clients": 0, "secure_aggregation": "required"},
}
"""Runs that send messages of all kinds."""
FLOWER_PYTHON = FLOWER_PROGRAMS / "python"
MANY = int(os.environ.get("UNSKEW_FRAMES", "1000000"))


class Recorded:
    """A finished run: its messages, and the functions with which the server reads replies."""

    def __init__(self, folder, values, monkeypatch):
        self.takes, ask = {}, round_requests.ask_sites

        def asked(sites, requests, round, take, *rest, **options):
            kind = next((frame.kind for frame in requests.values()), "")

            def taken(client, frame):
                self.takes.setdefault((kind, frame.kind), (take, client, []))[2].append(frame)
                return take(client, frame)

            self.sites = sites
            return ask(sites, requests, round, taken, *rest, **options)

        with monkeypatch.context() as patched:
            patched.setattr(round_requests, "ask_sites", asked)
            patched.setattr(round_requests, "POLL", 0.001)
            deployment = Deployment(run="0123456789abcdef", startup_timeout=60)
            _, self.place = deployed(folder, LoopPlace(folder, {**TINY, **values}), deployment, **values)
        self.sites.audit = None
        self.sites.warn_with(lambda text: None)
        self.site = self.place.sites[0]
        self.requests = [frame for client, frame in self.place.link.sent if client == 0]

    def hello(self):
        return next(frame for frame in self.requests if frame.kind == "hello")

    def answers_still(self):
        return self.site.answer(self.hello()).kind in ("client_info", "refused")


@pytest.fixture(scope="module", params=slow_but([name for name in RUNS if name != "images"], [*RUNS]))
def recorded(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        yield Recorded(tmp_path_factory.mktemp(request.param), RUNS[request.param], patched)


def amounts(quick):
    """Number of messages: few in the quick suite, and a share of a million in the slow one."""
    return pytest.mark.parametrize("count", [quick, pytest.param(MANY // (2 * len(RUNS)), marks=pytest.mark.slow)])


@amounts(250)
def test_a_site_replies_to_every_message_and_goes_on(recorded, count):
    count, replies = scaled(count), 0
    mutator = Mutator(recorded.requests, seed=count)
    for _ in range(count):
        header, body = mutator.draw()
        try:
            request = from_bytes(header, body)
        except FrameError:
            continue
        reply = recorded.site.answer(request)
        assert all(isinstance(part, bytes) for part in to_bytes(reply))
        replies += 1
    assert replies > count // 10
    assert recorded.answers_still()


@amounts(250)
def test_the_server_rejects_a_reply_only_with_an_error_that_it_expects(recorded, count):
    """Errors of other types would be caught, too, but then something was read that was not validated before."""
    count = scaled(count)
    mutators = {key: Mutator(frames, seed=count) for key, (_, _, frames) in recorded.takes.items()}
    assert ("train", "update") in mutators or ("train", "ready") in mutators
    for number in range(count):
        key = [*mutators][number % len(mutators)]
        take, client, _ = recorded.takes[key]
        try:
            frame = from_bytes(*mutators[key].draw())
        except FrameError:
            continue
        with contextlib.suppress(UnskewError):
            take(client, recorded.sites.connection.checked(frame, frame.config.get("attempt")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ENTRIES = st.lists(
    st.tuples(JSON, st.sampled_from(["float32", "uint8", "object"]) | JSON, JSON, JSON).map(list), max_size=3
)
HEADERS = st.fixed_dictionaries({}, optional={"kind": JSON, "config": JSON, "metrics": JSON, "arrays": ENTRIES | JSON})


@fuzz(200)
@given(HEADERS | JSON, st.binary(max_size=40))
def test_any_header_is_a_message_or_a_frame_error(about, body):
    try:
        frame = from_bytes(json.dumps(about).encode(), body)
    except FrameError:
        return
    assert from_bytes(*to_bytes(frame)) == frame


@fuzz(300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_frame_error(data):
    with pytest.raises(FrameError):
        EncodedFrame(data, b"").decode()


@pytest.mark.parametrize(
    "header",
    [
        b'{"kind": "a", "config": {}, "metrics": {"a": 1' + b"0" * 400 + b'}, "arrays": []}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "float32", [1], 1e400]]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "float32", [1], NaN]]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "float32", [1], 4.0]]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "float32", [true], 4]]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "uint8", [' + b"0," * 99999 + b"0], 0]]}",
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "uint8", "abc", 0]]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [5]}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [["a", "uint8", [0], 0], ["a", "uint8", [0], 0]]}',
        b'{"kind": "a", "config": {"a": ' + b"[" * 100000 + b"]" * 100000 + b'}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {"a": 1e400}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {"a": NaN}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {"a": 1' + b"0" * 5000 + b'}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {"a": [[]]}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {"a": "\\ud800"}, "metrics": {}, "arrays": []}',
        b'{"kind": "\\u001b]0;x", "config": {}, "metrics": {}, "arrays": []}',
        b'{"kind": "a", "config": {}, "metrics": {"a": Infinity}, "arrays": []}',
        b'{"kind": "a", "config": {}, "metrics": {"a": true}, "arrays": []}',
        b'{"kind": "a", "config": {}, "metrics": {}, "arrays": [], "more": 1}',
        b"[" * (3 << 20),
        b"",
    ],
)
def test_a_header_that_no_site_sends_is_one_kind_of_error(header):
    with pytest.raises(FrameError):
        EncodedFrame(header, b"").decode()


def test_sizes_are_checked_before_anything_is_read():
    here, there = socket.socketpair()
    header = b'{"kind":"a","config":{},"metrics":{},"arrays":[["a","uint8",[9],9],["b","uint8",[3000],3000]]}'
    there.sendall(on_the_wire(header, bytes(3009)))
    with here, there, pytest.raises(FrameError, match="above the limit"):
        receive(here, 3000)


def test_bytes_that_do_not_arrive_take_no_memory():
    here, there = socket.socketpair()
    header = b'{"kind":"a","config":{},"metrics":{},"arrays":[["a","uint8",[4000000000],4000000000]]}'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    there.sendall(MAGIC + struct.pack("<QQ", len(header), 4_000_000_000) + header + b"x" * 1000)
    there.close()
    with here, pytest.raises(FrameError):
        receive(here)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


# ---- through sockets ---------------------------------------------------------------------------------------------------


def listening(site):
    path = site.config.path("socket", site.folder)
    threading.Thread(target=listener.serve, args=(site,), daemon=True).start()
    while not path.exists():
        pass
    return path


def exchange(path, data):
    """Send bytes and end; returns the reply, or None."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return receive(connection)
        except (OSError, FrameError):
            return None


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_site_replies_at_its_socket_after_mutated_messages(count, tmp_path):
    place = LoopPlace(tmp_path, TINY)
    deployed(tmp_path, place)
    site = place.sites[0]
    path, mutator = listening(site), Mutator([frame for _, frame in place.link.sent], seed=1)
    for _ in range(scaled(count)):
        exchange(path, on_the_wire(*mutator.draw()))
    for data in (
        b"",
        b"unskew01",
        b"GET / HTTP/1.1\r\n\r\n",
        b"unskew01" + b"\xff" * 16,
        b"unskew01" + b"\x10" + b"\0" * 15 + b"{",
    ):
        exchange(path, data)
    assert exchange(path, on_the_wire(*to_bytes(Frame("shell")))).kind == "refused"


def test_an_error_at_a_connection_does_not_end_a_site(tmp_path, monkeypatch):
    site = LoopPlace(tmp_path, TINY).sites[0]
    lines = []
    site.log = lines.append
    path = listening(site)
    with monkeypatch.context() as patched:
        patched.setattr(listener, "serve_connection", lambda *_: {}["a"])
        assert exchange(path, b"x") is None
    assert exchange(path, on_the_wire(*to_bytes(Frame("shell")))).kind == "refused"
    assert any("KeyError" in line for line in lines)


def test_a_message_whose_arrays_arrive_too_slowly_does_not_block_a_site(tmp_path, monkeypatch):
    """The deadline is one of the whole message, which single bytes do not extend."""
    monkeypatch.setattr(listener, "MESSAGE_SECONDS", 0.3)
    path = listening(LoopPlace(tmp_path, TINY).sites[0])
    header = b'{"kind":"a","config":{},"metrics":{},"arrays":[["a","uint8",[1000000],1000000]]}'
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        slow.sendall(on_the_wire(header, b""))

        def drip():
            while not ended.wait(0.02):
                try:
                    slow.sendall(b"x")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        reply = exchange(path, on_the_wire(*to_bytes(Frame("shell"))))
        ended.set()
    assert reply.kind == "refused"


def test_the_control_socket_replies_after_mutated_messages(tmp_path):
    sites = SiteManager(SiteConnection(None, lambda: None, "0", {}), 0, RoundPolicy(), lambda text: None)
    control = ControlSocket(tmp_path, sites, lambda excluded: None)
    path = control._listener.getsockname()
    mutator = Mutator([Frame("status"), Frame("stop", {"now": True}), Frame("exclude", {"site": "a"})], seed=2)
    try:
        for _ in range(scaled(300)):
            exchange(path, on_the_wire(*mutator.draw()))
        sites.status = lambda: {}["a"]
        assert exchange(path, on_the_wire(*to_bytes(Frame("status")))) is None
        del sites.status
        assert exchange(path, on_the_wire(*to_bytes(Frame("status")))).kind == "status"
    finally:
        control.close()


def test_the_bridge_to_flower_raises_one_kind_of_error(tmp_path):
    mutator = Mutator([Frame("update"), Frame("nodes", {"ids": ["1", "2"]})], seed=3)
    bridge = GridBridge(1 << 20)
    try:
        for number in range(scaled(300)):
            bridge._app, app = socket.socketpair()
            with app:
                for _ in range(2):
                    app.sendall(on_the_wire(*mutator.draw()))
                app.shutdown(socket.SHUT_WR)
                with contextlib.suppress(LinkClosedError):
                    bridge.pull(["1", "2"]) if number % 2 else bridge.nodes()
                bridge.disconnect()
    finally:
        bridge.close()


FLOWER = r"""
import random
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from unskew.deployment.flower.app.records import to_message, to_records
from unskew.deployment.flower.app.server_app import reply_message
from unskew.deployment.wire.frames import Blob, EncodedFrame, Frame, FrameError

dice = random.Random(0)
values = ["", "a", 1, 1.5, float("nan"), True, b"x", b"{}", [1, 2], ["a"], [b"x"], b"x" * (65 << 20)]
class Reply:
    def __init__(self, content):
        self.content = content
    def has_error(self):
        return False

kinds = set()
for _ in range(3000):
    update = Frame("update", {"client": 1}, {"loss": 1.0}, {"a/b": Blob("float32", (2,), b"\0" * 8)})
    content = to_records(EncodedFrame.of(update))
    assert to_message(content).decode() == update
    for _ in range(dice.choice((0, 1, 2))):
        way = dice.randrange(5)
        if way == 0:
            content["header"] = ConfigRecord({dice.choice(["json", "a"]): dice.choice(values)})
        elif way == 1:
            form, data = dice.choice(["unskew.raw", "numpy"]), b"\0" * dice.choice([0, 8, 3000])
            array = Array("uint8", (len(data),), form, data)
            content["body"] = ArrayRecord({dice.choice(["bytes", "a"]): array})
        elif way == 2:
            content[dice.choice(["x", "header", "body"])] = MetricRecord({dice.choice(["json", "bytes"]): 1})
        elif way == 3:
            content["body"] = ConfigRecord({"bytes": b"x"})
        else:
            content.pop(dice.choice(["header", "body"]), None)
    try:
        to_message(content)
    except FrameError:
        pass
    reply = reply_message(Reply(content), 2000)
    if isinstance(reply, Frame):
        assert reply.kind == "refused"
        kinds.add("refused")
        continue
    assert len(reply.body) <= 2000
    try:
        kinds.add(reply.decode().kind)
    except FrameError:
        kinds.add("invalid")
assert kinds == {"refused", "update", "invalid"}, kinds
"""


@pytest.mark.skipif(*real[0].args, **real[0].kwargs)
@pytest.mark.slow
def test_whatever_a_site_replies_through_flower_the_bridge_receives_a_valid_message(tmp_path):
    """Also if it is larger than what the run accepts, which would otherwise end the connection for all sites."""
    done = subprocess.run(
        [str(FLOWER_PYTHON), "-c", FLOWER], capture_output=True, text=True, check=False, env=environment(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-2000:]
