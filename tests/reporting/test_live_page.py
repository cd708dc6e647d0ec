"""The live page: what its server answers and rejects, what changes between two requests, and the page as one file."""

import http.client
import json
import os
import re
import shutil

import pytest
from support.live_page import served
from support.named import federation
from support.running import call

import unskew
from unskew.errors import ConfigError
from unskew.folder_locks import folder_lock
from unskew.reporting import live_page
from unskew.reporting.live_page import LiveRuns, PageServer, write_live_page

OPTIONS = {"model": "logistic", "rounds": 2, "local_steps": 1, "engine": "inline", "batch_size": 8}
HOSTILE = "<script>alert(1)<"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return unskew.run(federation(), out=tmp_path_factory.mktemp("runs") / "run", **OPTIONS).folder


@pytest.fixture
def runs(run, tmp_path):
    """A folder with two runs, one of which has a name that looks like mark-up."""
    for name in ("first", HOSTILE):
        shutil.copytree(run, tmp_path / "runs" / name)
    return tmp_path / "runs"


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def changes(server, since=0):
    return json.loads(ask(server, f"/runs?{since}")[1])


def contents(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    }


@pytest.mark.fuzz
def test_the_server_answers_only_its_own_paths_to_this_machine(runs):
    before = contents(runs)
    with served(runs) as server:
        assert server.server_address[0] == "127.0.0.1"
        answer, page = ask(server, "/")
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert not re.findall(r"https?://", page)
        numbers = changes(server)["order"]
        assert ask(server, f"/details?{numbers[0]}")[0].status == 200
        port = server.server_port
        assert ask(server, "/", Host=f"localhost:{port}")[0].status == 200
        for host in ("example.org", f"example.org:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            assert ask(server, "/runs?0", Host=host)[0].status == 403
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
            answer, body = ask(server, "/", method)
            assert answer.status == 405
            assert "<" not in body
        wrong = ("/first/config.yaml", "/../config.yaml", "/%2e%2e/x", "/runs", "/runs?-1", "/runs?1e3", "/runs?0&a=b")
        for path in (*wrong, "/details?99", "/details?../first", "/details?" + "9" * 400, "//x/"):
            answer, body = ask(server, path)
            assert (answer.status, body) == (404, "404 Not Found\n")
    assert contents(runs) == before


def test_browsers_omit_the_standard_port(runs, monkeypatch):
    with served(runs) as server:
        monkeypatch.setattr(live_page, "HTTP_PORT", server.server_port)
        for host, status in (("localhost", 200), ("127.0.0.1", 200), ("example.org", 403)):
            assert ask(server, "/", Host=host)[0].status == status


def test_an_answer_has_only_the_runs_that_changed_since_the_version(runs):
    with served(runs) as server:
        first = changes(server)
        assert first["status"] == "Runs: 2 finished."
        assert {*first["rows"]} == {*map(str, first["order"])}
        assert HOSTILE not in "".join(first["rows"].values())
        assert "&lt;script&gt;alert(1)&lt;" in "".join(first["rows"].values())
        assert changes(server, first["version"])["rows"] == {}
        (runs / "first" / "summary.json").unlink()
        second = changes(server, first["version"])
        (number,) = second["rows"]
        assert "<td>stopped</td>" in second["rows"][number]
        with folder_lock(runs / "first"):
            third = changes(server, second["version"])
            assert third["order"][0] == int(number), "runs in progress are first"
            assert third["status"] == "Runs: 1 running, 1 finished."
        shutil.copytree(runs / HOSTILE, runs / "new")
        shutil.rmtree(runs / HOSTILE)
        last = changes(server, third["version"])
        assert len(last["order"]) == 2
        assert len(last["rows"]) == 2  # the new one, and the one that is no longer locked
        assert max(last["order"]) == 2
        shutil.rmtree(runs)
        assert changes(server)["status"] == "Runs: no runs yet."
    with served(runs.parent) as restarted:
        assert changes(restarted, last["version"])["version"] > last["version"]


def test_many_runs_are_read_over_several_requests(run, tmp_path, monkeypatch):
    for number in range(30):
        (tmp_path / f"run-{number:02}").mkdir()
        for name in ("config.yaml", "metrics.jsonl"):
            shutil.copy(run / name, tmp_path / f"run-{number:02}" / name)
    runs = LiveRuns(tmp_path)
    times = iter(range(10_000))
    monkeypatch.setattr(live_page.time, "monotonic", lambda: next(times))
    answer, shown = runs.changes(0, seconds=20), 0
    while answer["reading"]:
        assert answer["status"].endswith("reading further runs.")
        assert len(answer["rows"]) > 0
        shown += len(answer["rows"])
        answer = runs.changes(answer["version"], seconds=20)
    assert shown + len(answer["rows"]) == 30
    monkeypatch.setattr(live_page, "MOST_RUNS", 10)
    assert runs.changes(answer["version"], 1000)["status"] == "Runs: 10 stopped; only 10 of 30 runs are shown."


def test_the_page_as_one_file_has_all_runs_and_needs_no_server(runs, tmp_path, capsys):
    (runs / "first" / "warnings.txt").write_text("</pre><script>alert(2)</script>\n")
    file = tmp_path / "page.html"
    outcome = call(capsys, "watch", runs, "--once", file)
    assert (outcome.code, outcome.out) == (0, f"The page is {file}. Open it in a browser.\n")
    page = file.read_text()
    assert page.count("<script>") == page.count("</script>") == 1
    assert re.findall("<h2>([^<]+)", page) == ["&lt;script&gt;alert(1)&lt;", "first"]
    assert "4 clients, worst first" in page
    assert "data-live" not in page
    assert re.search(r"Runs: 2 finished. Written on \d{4}-\d\d-\d\d at \d\d:\d\d.", page)
    write_live_page(LiveRuns(runs / "first"), file)  # an older page is overwritten
    assert file.read_text().count("<h2>first</h2>") == 1
    other = tmp_path / "other.html"
    other.write_text("mine")
    assert "is not a report" in call(capsys, "watch", runs, "--once", other).err


def test_folders_and_ports_that_cannot_be_used_are_named(runs, tmp_path, capsys):
    assert "does not exist" in call(capsys, "watch", tmp_path / "nowhere").err
    assert "is a file, not a folder" in call(capsys, "watch", runs / "first" / "config.yaml").err
    with served(runs) as server, pytest.raises(ConfigError, match=f"Port {server.server_port} cannot be used"):
        PageServer(LiveRuns(runs), server.server_port)


def test_the_command_serves_until_it_is_interrupted(runs, capsys, monkeypatch):
    asked = []

    def serve(server):
        asked.append(server.address)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    outcome = call(capsys, "watch", os.path.relpath(runs))
    assert outcome.code == 0
    assert f"Open {asked[0]} in a browser" in outcome.out
