"""Files of folders that somebody has sent: each field in turn gets a hostile value, and what follows is watched."""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from unskew.checked_tensors import encode_checked
from unskew.filesystem import private_folder

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate"),
    *("os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree", "sqlite3.connect"),
}
STARTS = {
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
}
_seen = None


def _hook(event, args):
    if _seen is None:
        return
    if event in STARTS:
        _seen.append((event, str(args[0])))
    elif event in CHANGES and event.startswith("os.") and isinstance(args[-1], int) and args[-1] >= 0:
        _seen.append((event, os.path.join(os.readlink(f"/proc/self/fd/{args[-1]}"), os.fsdecode(args[0]))))
    elif event in CHANGES:
        _seen.extend(
            (event, os.path.abspath(os.fsdecode(part))) for part in args[:2] if isinstance(part, str | bytes | Path)
        )
    elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int) and args[2] & WRITES:
        _seen.append((event, os.path.abspath(os.fsdecode(args[0]))))
    elif event == "import" and str(args[0]).startswith("evil"):
        _seen.append((event, args[0]))


sys.addaudithook(_hook)  # it cannot be taken away again


@contextlib.contextmanager
def watched(inside):
    """Within, nothing outside the folder ``inside`` may be created, changed or removed, and no process may start."""
    global _seen
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    own = (f"{inside}{os.sep}", "/dev/", f"{tempfile.gettempdir()}/torchinductor")
    fixed = (str(inside), str(private_folder()))  # the second one is empty: no run is going on
    allowed = [path in fixed or path.startswith(own) or "__pycache__" in path for _, path in seen]
    assert all(allowed), [what for what, fine in zip(seen, allowed, strict=True) if not fine]


def tree(folder):
    """All that lies in a folder, also what links lead to."""
    return {
        path.relative_to(folder): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else os.path.realpath(path),
        )
        for path in sorted(folder.rglob("*"))
    }


def hostile(outside):
    """Values that no field expects; some lead out of the folder."""
    return [
        *(str(outside / "victim"), str(outside), "../../outside", "../../outside/victim", "/etc/passwd", "~/victim"),
        *("evil:net", "evil.Rule", "mlflow", "file:///etc/passwd", "https://127.0.0.1:9/x", "s3://a/b"),
        *(-1, 0, 2**31, 10**30, 1e308, float("nan"), float("-inf"), None, True, False, "", "x" * 100_000),
        *("\0", "\x1b[2J\n", "\ud800", [], {}, [[[]]], {"a": {"b": [1]}}, json.loads("[" * 500 + "]" * 500)),
    ]


def places(content, path=()):
    """The paths of all fields at every depth; of long lists and mappings only of the first entries."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(parts)[: 120 if not path else 6]:
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(content, path, value):
    """The content with another value at a path; Ellipsis removes the field."""
    if not path:
        return value
    copy = content.copy()
    if len(path) == 1 and value is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


def read(file):
    """The content of a JSON or YAML file, of a line of a log, or of a checkpoint's manifest."""
    text = file.read_text()
    if file.suffix == ".yaml":
        return yaml.safe_load(text)
    content = json.loads(text.splitlines()[0] if file.suffix == ".jsonl" else text)
    return json.loads(content["manifest"]) if file.name == "manifest.json" else content


def write(file, content):
    """Write what ``read`` returned, with the checksum that belongs to it."""
    if file.suffix == ".yaml":
        try:
            file.write_text(yaml.safe_dump(content, sort_keys=False))
        except RecursionError:
            file.write_text(json.dumps(content))
        return
    text = json.dumps(content)
    if file.name == "manifest.json":
        text = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text})
    lines = file.read_text().splitlines()[1:] if file.suffix == ".jsonl" else []
    file.write_text("\n".join([text, *lines]) + "\n")
    if file.name == "inputs.json":
        bind_inputs(file.parent)


def files(folder):
    """All JSON and YAML files of a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml"))


def cases(folder, outside):
    """Every field of every file with every value: the file, the path of the field, and the value."""
    return [
        (file.relative_to(folder), place, value)
        for file in files(folder)
        for place in [(), *places(read(file))]
        for value in [*hostile(outside), ...]
        if place or value is not ...
    ]


def bind_inputs(folder):
    """Write into a model which file ``inputs.json`` belongs to it, as whoever changes that file can."""
    file = folder / "model.safetensors"
    if file.is_file():
        with safe_open(file, "pt") as opened:
            about = json.loads(opened.metadata()["about"])
        about["inputs"] = hashlib.sha256((folder / "inputs.json").read_bytes()).hexdigest()
        file.write_bytes(encode_checked(load_file(file), {k: v for k, v in about.items() if k != "sha256"}))
