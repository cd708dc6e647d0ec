"""The bridge between a run and Flower's app at the server."""

import socket
import stat
import threading
from pathlib import Path

import pytest

from unskew.deployment.flower.cli import SuperLink
from unskew.deployment.flower.grid_bridge import GridBridge, LinkClosedError
from unskew.deployment.wire.frames import Frame, send


def hello(bridge, token):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as app:
        app.connect(str(bridge.path))
        send(app, Frame("hello", {"token": token}))
        app.settimeout(5.0)
        return app.recv(1)


def test_the_token_stands_in_a_private_file_and_in_no_argument():
    bridge = GridBridge(1 << 20)
    try:
        secret = bridge.path.with_name("token")
        assert secret.read_text() == bridge.token
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
        arguments = SuperLink.running(None, Path("app"), bridge.path)
        assert str(bridge.path) in " ".join(arguments)
        assert not any(bridge.token in argument for argument in arguments)
    finally:
        bridge.close()
    assert not secret.exists()


def test_an_app_without_the_token_is_not_accepted():
    bridge = GridBridge(1 << 20)
    try:
        strangers = [threading.Thread(target=hello, args=(bridge, token)) for token in ("", "0" * 32)]
        for stranger in strangers:
            stranger.start()
        with pytest.raises(LinkClosedError):
            bridge.connect(1.0)
    finally:
        bridge.close()
    for stranger in strangers:
        stranger.join()
