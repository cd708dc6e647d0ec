"""A site's own files and process: its configuration, its check, its socket, its state."""

import http.server
import os
import re
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from support.running import call
from support.sites import TINY, LoopPlace

from unskew.config.loader import experiment
from unskew.deployment.common.agreement import experiment_digest
from unskew.deployment.flower.project_files import init_project, make_certificates, make_node_key, write_scripts
from unskew.deployment.secagg.roster import SigningIdentity, is_signed
from unskew.deployment.site import listener
from unskew.deployment.site import process as site_module
from unskew.deployment.site.config import load_site_config
from unskew.deployment.site.process import SiteProcess
from unskew.deployment.site.state import SiteState, SiteStateLostError
from unskew.deployment.wire.frames import EncodedFrame, Frame, FrameError, receive, send
from unskew.deployment.wire.tensor_codec import parse_slices, slices_as_text
from unskew.errors import ConfigError, EngineError, UnskewError
from unskew.protocol.messages import ClientState

MINE = {"name": "a", "client": 0}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"name": "a"}, "client"),
        ({**MINE, "name": "../up"}, "name='../up' is not valid"),
        ({**MINE, "sokcet": "x"}, "There is no option 'sokcet'"),
        ({**MINE, "limits": {"max_norm": -1}}, "max_norm=-1 is not valid"),
        ({**MINE, "data": {"source": "digits", "lable": "y"}}, "There is no option 'data.lable'"),
        ({**MINE, "data": "all"}, "data='all' is not valid"),
        ({**MINE, "socket": "s" * 120}, "longer than 100 characters"),
        ({**MINE, "socket": "~nobody.at.all/s"}, "home folder of an unknown user"),
        ({**MINE, "superlink": "example.org"}, "write HOST:PORT"),
        (
            {**MINE, "statistics": {"allow": ["count"]}},
            "statistics.allow='count' is not valid: it must be one of counts",
        ),
        (
            {**MINE, "statistics": {"allow": ["moments"], "epsilon": 1}},
            "remove moments from statistics.allow, or epsilon",
        ),
        ({**MINE, "statistics": {"total_epsilon": 1}}, "set statistics.epsilon, too"),
        ({**MINE, "statistics": {"min_count": 0}}, "statistics.min_count=0 is not valid"),
        ({**MINE, "evaluate": {"allow": ["all"]}}, "evaluate.allow='all' is not valid"),
        ({**MINE, "superlink": "example.org:99999"}, "write HOST:PORT"),
    ],
)
def test_a_mistake_in_a_sites_file_is_a_sentence(values, why, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=why):
        load_site_config(path)


def test_a_client_beyond_the_experiment_and_code_of_its_own_are_refused(tmp_path):
    path = tmp_path / "site.yaml"
    (tmp_path / "experiment.yaml").write_text(experiment(TINY).to_yaml())
    path.write_text(yaml.safe_dump({**MINE, "client": 3}))
    with pytest.raises(ConfigError, match="client 3 does not exist"):
        SiteProcess(path)
    path.write_text(yaml.safe_dump(MINE))
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump({**TINY, "method": "mine.Rule"}))
    with pytest.raises(ConfigError, match="trust_code: true"):
        SiteProcess(path)
    sent = {**TINY, "model": "unskew.config.loader:yaml.unsafe_load", "model_options": {"stream": "!!python/name:os"}}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(sent))
    with pytest.raises(ConfigError, match="trust_code: true"):
        SiteProcess(path)
    # Sites compute no metrics and use no trackers, so they need not trust those of the server.
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump({**TINY, "metrics": ["mine:cost"], "trackers": ["wandb"]}))
    (config,) = SiteProcess(path).experiments.configs.values()
    assert config.metrics == config.trackers == ()
    served = experiment({**TINY, "metrics": ["mine:cost"], "objective": "mine:cost", "trackers": ["wandb"]})
    assert experiment_digest(served) == experiment_digest(config)


def test_a_site_answers_at_a_socket_that_is_its_owners_alone(tmp_path):
    """Bytes that are not a message are rejected, and the next message gets a reply."""
    place = LoopPlace(tmp_path, TINY)
    site = place.sites[0]
    path = site.config.path("socket", site.folder)
    threading.Thread(target=listener.serve, args=(site,), daemon=True).start()
    while not path.exists():
        pass
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    def ask(write):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            write(connection)
            return receive(connection)

    assert "not a message of unskew" in ask(lambda c: c.sendall(b"GET / HTTP/1.1\r\n\r\n")).config["reason"]
    assert "unknown request:" in ask(lambda c: send(c, Frame("shell", {"command": "ls"}))).config["reason"]
    with pytest.raises(ConfigError, match="Another process of this site is listening"):
        listener.serve(LoopPlace(tmp_path, TINY).sites[0])


def test_a_connection_that_sends_no_whole_header_does_not_block_a_site(tmp_path, monkeypatch):
    """Neither one that sends a few bytes and waits, nor one that sends single bytes for ever."""
    monkeypatch.setattr(listener, "MESSAGE_SECONDS", 0.3)
    site = LoopPlace(tmp_path, TINY).sites[0]
    path = site.config.path("socket", site.folder)
    threading.Thread(target=listener.serve, args=(site,), daemon=True).start()
    while not path.exists():
        pass
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as slow:
        silent.connect(str(path))
        silent.sendall(b"unsk")
        slow.connect(str(path))
        ended = threading.Event()

        def drip():
            while not ended.wait(0.05):
                try:
                    slow.sendall(b"u")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(60)
            other.connect(str(path))
            send(other, Frame("shell"))
            assert "unknown request:" in receive(other).config["reason"]
        ended.set()
        assert silent.recv(1) == b""


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"kind": "x", "config": {}, "metrics": {"a": "b"}, "arrays": []}',
        b'{"kind": "x", "config": {}, "metrics": {}, "arrays": [["a", "object", [1], 8]]}',
        b'{"kind": "x", "config": {}, "metrics": {}, "arrays": [["a", "float32", [2], 4]]}',
        b'{"kind": "x", "config": {}, "metrics": {}, "arrays": [["a", "uint8", [-1], 4]]}',
        b'{"kind": "x", "config": {}, "metrics": {}, "arrays": [["a", "uint8", [99999999], 99999999]]}',
        b'{"kind": "x", "config": {}, "metrics": {}, "arrays": [["a", "uint8", [0], 0], ["a", "uint8", [0], 0]]}',
    ],
)
def test_what_is_no_message_is_refused(header):
    with pytest.raises(FrameError):
        EncodedFrame(header, bytes(8)).decode()


def test_slices_travel_as_text():
    for slices in (None, (), (slice(0, 3), slice(5, 9))):
        assert parse_slices(slices_as_text(slices), 9) == slices
    for text in ("3:1", "0:10", "0:3,2:4", "a:b", "1"):
        with pytest.raises(UnskewError, match="is not a valid list of slices"):
            parse_slices(text, 9)


def test_a_site_keeps_two_generations_and_says_when_one_is_lost(tmp_path):
    state = SiteState(tmp_path, "0" * 16, 3)
    one, two = (ClientState(rules={"r": {"c": torch.full((2,), value)}}) for value in (1.0, 2.0))
    state.keep(0, one)
    state.keep(1, two)
    assert state.after(1).rules["r"]["c"].tolist() == [2.0, 2.0]
    assert not (state.folder / "round-0000000.safetensors").exists()
    with pytest.raises(SiteStateLostError):
        state.after(0)
    (state.folder / "round-0000001.safetensors").write_bytes(b"x")
    with pytest.raises(SiteStateLostError):
        state.after(1)
    assert state.after(None) == ClientState()
    assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700
    with pytest.raises(UnskewError, match="hexadecimal"):
        SiteState(tmp_path, "../../etc", 0)


def test_check_shows_what_is_sent_and_what_is_wrong(tmp_path, capsys):
    (tmp_path / "experiment.yaml").write_text(experiment({**TINY, "method": "scaffold"}).to_yaml())
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({**MINE, "superlink": "127.0.0.1:9"}))
    (tmp_path / "node.key").write_text("mine")
    found = call(capsys, "deploy", "check", tmp_path / "site.yaml", "--json")
    assert found.code == 2
    rows = {(row["what"], row["ok"]): row["text"] for row in found.json()}
    texts = [row["text"] for row in found.json()]
    assert "update/delta: float32 650, 2,600 bytes" in texts
    assert "upload/scaffold/change: float32 650, 2,600 bytes" in texts
    assert "download/scaffold/c: float32 650, 2,600 bytes" in texts
    assert "others can read" in rows["node key", False]
    assert "is missing" in rows["certificate", False]
    assert "only for secure aggregation" in rows["roster", None]
    assert "individual update; scaffold requires only the sum" in rows["privacy", None]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("method", "later"),
    [
        (
            "fedfomo:models=2,validation=0.5",
            {
                "received": {"download/fedfomo/models: float32 2x650, 5,200 bytes"},
                "sent": {"upload/fedfomo/gains: float32 2, 8 bytes"},
            },
        ),
        (
            "fedproto",
            {
                "received": {
                    "download/fedproto/means: float32 10x64, 2,560 bytes",
                    "download/fedproto/known: float32 10, 40 bytes",
                },
                "sent": set(),
            },
        ),
    ],
)
def test_check_shows_what_only_later_rounds_send(method, later, tmp_path, capsys):
    (tmp_path / "experiment.yaml").write_text(experiment({**TINY, "method": method, "partition": "iid"}).to_yaml())
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(MINE))
    rows = [
        (row["what"], row["text"]) for row in call(capsys, "deploy", "check", tmp_path / "site.yaml", "--json").json()
    ]
    for way, texts in later.items():
        assert {text for what, text in rows if what == f"{way} some rounds"} == texts
    assert sum(text.endswith("and fedfomo requires it") for _, text in rows) == method.startswith("fedfomo")


def test_check_names_each_of_several_experiments(tmp_path, capsys):
    (tmp_path / "agreed").mkdir()
    for name, changes in {"a": {}, "b": {"method": "scaffold"}, "c": {"rounds": 9}}.items():
        (tmp_path / "agreed" / f"{name}.yaml").write_text(experiment({**TINY, **changes}).to_yaml())
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({**MINE, "experiments": "agreed"}))
    rows = [
        (row["what"], row["text"]) for row in call(capsys, "deploy", "check", tmp_path / "site.yaml", "--json").json()
    ]
    assert ("configuration", "a, client 0, 3 experiment(s)") in rows
    blocks = [text for what, text in rows if what in ("experiment", "model")]
    assert blocks[::2] == ["a.yaml, c.yaml, identical for sites", "b.yaml"]
    assert [text.rpartition(" ")[2] for text in blocks[1::2]] == ["fedavg", "scaffold"]


def test_what_openssl_rejects_is_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("DAYS", "many")
    write_scripts(tmp_path)
    with pytest.raises(EngineError, match=r"certificates.sh failed: .*many"):
        make_certificates(tmp_path, ["127.0.0.1"])


def expire(server):
    """Sign the certificate of a SuperLink again, with a validity that has ended; newer versions of OpenSSL refuse to."""
    key = serialization.load_pem_private_key((server / "ca" / "ca.key").read_bytes(), None)
    path = server / "superlink" / "server.crt"
    valid = x509.load_pem_x509_certificate(path.read_bytes())
    end = valid.not_valid_before_utc - timedelta(days=1)
    other = x509.CertificateBuilder(valid.issuer, valid.subject, valid.public_key(), valid.serial_number)
    other = other.not_valid_before(end - timedelta(days=1)).not_valid_after(end)
    for extension in valid.extensions:
        other = other.add_extension(extension.value, extension.critical)
    path.write_bytes(other.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("which", ["good", "foreign", "expired", "plain"])
def test_check_tests_the_certificate_of_the_superlink(which, tmp_path, monkeypatch, capsys):
    server, site = tmp_path / "server", tmp_path / "site"
    for one in (server, tmp_path / "other"):
        write_scripts(one)
        make_certificates(one, ["127.0.0.1"])
    if which == "expired":
        expire(server)
    make_node_key(server, site)
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    if which != "plain":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(server / "superlink" / "server.crt", server / "superlink" / "server.key")
        web.socket = context.wrap_socket(web.socket, server_side=True)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    ca = (tmp_path / "other" if which == "foreign" else server) / "ca" / "ca.crt"
    (site / "experiment.yaml").write_text(experiment(TINY).to_yaml())
    address = f"127.0.0.1:{web.server_address[1]}"
    (site / "site.yaml").write_text(yaml.safe_dump({**MINE, "superlink": address, "ca": str(ca)}))
    found = call(capsys, "deploy", "check", site / "site.yaml", "--json")
    web.shutdown()
    wrong = " ".join(row["text"] for row in found.json() if row["ok"] is False)
    assert found.code == (0 if which == "good" else 2)
    assert {"good": "", "foreign": "unable to get", "expired": "expired", "plain": "cannot be reached"}[which] in wrong
    assert bool(wrong) == (which != "good")


def test_init_writes_a_folder_whose_scripts_work(capsys):
    with tempfile.TemporaryDirectory(prefix="u") as short:  # the path of a socket is a short one
        written_and_used(Path(short), capsys)


def written_and_used(tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(experiment({**TINY, "method": "scaffold"}).to_yaml())
    folder = tmp_path / "deployment"
    assert call(capsys, "deploy", "init", folder, "--config", tmp_path / "e.yaml").code == 0
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        *(
            "README.md",
            "ADMINISTRATOR.md",
            "experiment.yaml",
            "site.yaml",
            "compose.yaml",
            "Dockerfile",
        ),
        *(
            "certificates.sh",
            "node-key.sh",
            "unskew-site.service",
            "flower-supernode.service",
            "flower-superlink.service",
            "nginx.conf",
        ),
    }
    assert load_site_config(folder / "site" / "site.yaml").client == 0
    yaml.safe_load((folder / "compose.yaml").read_text())
    make_certificates(folder, ["127.0.0.1", "superlink.example.org"])
    make_node_key(folder, folder / "site")
    (folder / "site" / "roster.txt").write_text(f"0 {(folder / 'site' / 'signing.pub').read_text()}")
    me = SigningIdentity.load(0, folder / "site" / "signing.key", folder / "site" / "roster.txt")
    assert is_signed(me.roster, 0, ["a", 1], me.sign(["a", 1]))
    assert not is_signed(me.roster, 0, ["a", 2], me.sign(["a", 1]))
    with pytest.raises(ConfigError, match="does not contain"):
        SigningIdentity.load(0, folder / "site" / "node.key", folder / "site" / "roster.txt")
    for key in ("ca/ca.key", "superlink/server.key", "site/node.key", "site/signing.key"):
        assert stat.S_IMODE((folder / key).stat().st_mode) == 0o600
    public = folder / "site" / "node.pub"
    shown = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True).stdout
    assert site_module.key_fingerprint(public) == shown.split()[1]
    assert site_module.key_fingerprint(folder / "none.pub") == ""
    proxy = (folder / "superlink" / "nginx.conf").read_text()
    assert re.findall(r"location (\S+) ", proxy) == ["/v1/fleet/", "/"]
    assert "location / { return 403; }" in proxy
    for file in ("superlink/flower-superlink.service", "compose.yaml"):
        assert "--host 127.0.0.1 --port 8001" in (folder / file).read_text()
    assert call(capsys, "deploy", "init", folder, "--config", tmp_path / "e.yaml").code == 2
    with pytest.raises(ConfigError, match="already exists"):
        init_project(folder, experiment(TINY))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "No sites given"),
        (("--local", 2, "--superlink", "a:1"), "No sites given"),
        (("--superlink", "a:1"), "No sites given"),
        (("--local", 2), "does not match the 3 clients of the experiment"),
        (
            ("--local", 3, "--on-timeout", "never"),
            "on_timeout=never is not valid: it must be 'wait', 'continue' or 'abort'",
        ),
        (("--local", 3, "--round-timeout", "-1"), "round_timeout=-1.0 is not valid: it must be greater than 0"),
        (("--local", 3, "--set", "network.drop=0.1"), "network.drop simulate"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_anything_is_started(options, why, tmp_path, capsys):
    (tmp_path / "e.yaml").write_text(experiment(TINY).to_yaml())
    found = call(capsys, "deploy", "run", tmp_path / "e.yaml", "--out", tmp_path / "run", *options)
    assert found.code == 2
    assert why in found.err
    assert not (tmp_path / "run").exists()
