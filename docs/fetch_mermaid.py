"""Fetch mermaid, which draws the diagrams of the site, into ``docs/assets/vendor``: ``python docs/fetch_mermaid.py``.

The site loads nothing from other servers. This script downloads one version of mermaid from the npm registry, compares the
archive with the recorded SHA-512, and extracts the script and its license. A file that exists is not fetched again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "11.17.2"
INTEGRITY = "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="
"""SHA-512 of the archive in base64, as the registry writes it."""
ARCHIVE = f"https://registry.npmjs.org/mermaid/-/mermaid-{VERSION}.tgz"
FOLDER = Path(__file__).parent / "assets" / "vendor"
FILES = {"package/dist/mermaid.min.js": f"mermaid-{VERSION}.min.js", "package/LICENSE": "mermaid-LICENSE.txt"}


def fetch(url: str, integrity: str, folder: Path) -> None:
    """Download the archive and extract the files of the site.

    Args:
        url: Address of the archive.
        integrity: SHA-512 of the archive in base64.
        folder: Folder for the files.

    Raises:
        SystemExit: If the archive cannot be downloaded or has another checksum.
    """
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            data = response.read()
    except OSError as error:
        raise SystemExit(f"{url} cannot be fetched ({error}). Until it is, diagrams are shown as text.") from error
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != integrity:
        raise SystemExit(f"{url} is not the expected file: its SHA-512 differs from the one in {__file__}.")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member, name in FILES.items():
            content = archive.extractfile(member)
            assert content is not None, f"{member} is a file"
            (folder / name).write_bytes(content.read())


if __name__ == "__main__":
    if not all((FOLDER / name).is_file() for name in FILES.values()):
        fetch(sys.argv[1] if len(sys.argv) > 1 else ARCHIVE, INTEGRITY, FOLDER)
