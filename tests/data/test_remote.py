"""Data that are named by a URL: fetched once, anew when they change, and refused in a sentence."""

import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

import unskew
from unskew.data.remote import fetch
from unskew.errors import ConfigError, DataError

TABLE = "".join(f"{n % 5}.5,{n % 7},{'ab'[n % 2]}\n" for n in range(40))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store of objects, in the memory of this process."""
    import fsspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/train.csv", f"x,y,label\n{TABLE}".encode())
    memory.pipe("/bucket/test.csv", f"x,y,label\n{TABLE}".encode())
    yield memory
    memory.store.clear()


class Handler(SimpleHTTPRequestHandler):
    """Serves files without a log, and without some headers."""

    def log_message(self, *_):
        pass

    def send_header(self, name, value):
        if name not in self.server.without:
            super().send_header(name, value)


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A web server of the folder ``web.folder`` at ``web.url``; ``web.without`` are headers that it does not send."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "web"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    server.folder, server.url, server.without = folder, f"http://127.0.0.1:{server.server_port}", ()
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "name", ["table:memory://bucket/train.csv", "memory://bucket/train.csv", "table:memory://bucket"]
)
def test_a_table_in_a_store_is_the_table(store, tmp_path, name):
    store.get("/bucket", str(tmp_path / "here"), recursive=True)
    there = unskew.load_federation(name, label="label", clients=3)
    here = unskew.load_federation("table", data_path=tmp_path / "here", label="label", clients=3)
    assert there.fingerprint == here.fingerprint
    assert torch.equal(there.test[0], here.test[0])
    assert there.clients.source[0].data == name, "what another machine opens"


def test_what_was_fetched_is_fetched_anew_only_if_it_changed(store, monkeypatch):
    first = fetch("memory://bucket")
    monkeypatch.setattr(type(store), "get_file", lambda *_: pytest.fail("fetched again"))
    assert fetch("memory://bucket") == first
    monkeypatch.undo()
    store.pipe("/bucket/train.csv", b"x,y,label\n1,2,a\n")
    assert (fetch("memory://bucket") / "train.csv").read_text() == "x,y,label\n1,2,a\n"
    assert fetch(f"file://{first}") == Path(first)


@pytest.mark.parametrize("without", [(), ("Last-Modified", "Content-Length")])
@pytest.mark.parametrize("path", ["data", "data/train.csv"])
def test_files_of_a_web_server_are_downloaded_again_if_they_changed(web, monkeypatch, path, without):
    """Without size and version, files are downloaded every time, but an unchanged file is the same local file."""
    from fsspec.implementations.http import HTTPFileSystem

    web.without = without
    file, url = web.folder / "data" / "train.csv", f"{web.url}/{path}"
    file.parent.mkdir()
    downloads = []
    download = HTTPFileSystem.get_file
    monkeypatch.setattr(HTTPFileSystem, "get_file", lambda *args: [downloads.append(args[1]), download(*args)])
    file.write_text("x,y\n1,2\n")
    first = fetch(url)
    assert fetch(url) == first
    assert len(downloads) == (2 if without else 1)
    file.write_text("x,y\n3,4\n")
    os.utime(file, (0, 0))
    texts = [(local if local.is_file() else local / "train.csv").read_text() for local in (first, fetch(url))]
    assert texts == ["x,y\n1,2\n", "x,y\n3,4\n"]


@pytest.mark.parametrize("prefix", ["table:", ""])
@pytest.mark.parametrize(
    "query", ["", "?download=true", "?token=a/b.c", "?signature=a/", "?from=https://host", "#rows"]
)
def test_a_query_is_not_part_of_the_name_of_a_file(web, query, prefix):
    (web.folder / "data").mkdir()
    for name, rows in (("train", 40), ("test", 7)):
        lines = TABLE.splitlines()[:rows]
        (web.folder / "data" / f"{name}.csv").write_text("\n".join(["x,y,label", *lines]))
    fed = unskew.load_federation(f"{prefix}{web.url}/data/train.csv{query}", label="label", clients=2, holdout=0)
    assert (fed.name, int(fed.sizes.sum()), len(fed.test[1])) == ("data", 40, 7)
    assert fetch(f"{web.url}/data/test.csv{query}").name == "test.csv"


def test_links_that_sort_the_listing_of_a_folder_are_not_files(web):
    (web.folder / "data").mkdir()
    (web.folder / "data" / "index.html").write_text('<a href="?C=N;O=D">Name</a> <a href="train.csv">train.csv</a>')
    (web.folder / "data" / "train.csv").write_text("x,y\n1,2\n")
    for address in ("data", "data/"):
        assert [file.name for file in fetch(f"{web.url}/{address}").iterdir()] == ["train.csv"]


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("memory://bucket/nothing", DataError, "There is no file or folder at memory://bucket/nothing"),
        ("nonsense://bucket", ConfigError, "cannot be read: Protocol not known"),
        ("memory://out", DataError, "points outside its folder"),
    ],
)
def test_what_cannot_be_fetched_is_told(store, url, error, text):
    store.pipe("/out/../../x.csv", b"x")
    with pytest.raises(error, match=text):
        fetch(url)
