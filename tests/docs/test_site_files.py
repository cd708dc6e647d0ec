"""Files of the documentation site: the copy of mermaid, and the pictures of the gallery."""

import base64
import hashlib
import importlib.util
import io
import re
import tarfile

import pytest
from support.pages import DOCS, ROOT, fences

from speed.gallery import ASSETS, LIMIT, pictures


@pytest.fixture(scope="module")
def fetcher():
    spec = importlib.util.spec_from_file_location("fetch_mermaid", DOCS / "fetch_mermaid.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def archive(tmp_path):
    """An archive like that of the registry, and its SHA-512 in base64."""
    file = tmp_path / "mermaid.tgz"
    with tarfile.open(file, "w:gz") as tar:
        for name, content in (("package/dist/mermaid.min.js", b"draw()"), ("package/LICENSE", b"MIT")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file, base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


def test_mermaid_is_extracted_if_its_checksum_is_the_expected_one(fetcher, archive, tmp_path):
    file, integrity = archive
    fetcher.fetch(file.as_uri(), integrity, tmp_path / "vendor")
    assert (tmp_path / "vendor" / f"mermaid-{fetcher.VERSION}.min.js").read_bytes() == b"draw()"
    assert (tmp_path / "vendor" / "mermaid-LICENSE.txt").read_bytes() == b"MIT"


def test_another_archive_or_none_is_an_error_and_writes_nothing(fetcher, archive, tmp_path):
    file, integrity = archive
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(SystemExit, match="SHA-512 differs"):
        fetcher.fetch(file.as_uri(), integrity, tmp_path / "vendor")
    file.unlink()
    with pytest.raises(SystemExit, match="cannot be fetched"):
        fetcher.fetch(file.as_uri(), integrity, tmp_path / "vendor")
    assert not (tmp_path / "vendor").exists()


def test_the_site_loads_the_version_that_is_fetched(fetcher):
    script = (DOCS / "assets" / "diagrams.js").read_text()
    assert re.findall(r"vendor/([\w.-]+\.js)", script) == [fetcher.FILES["package/dist/mermaid.min.js"]]
    assert "assets/diagrams.js" in (ROOT / "mkdocs.yml").read_text()


def test_the_gallery_shows_six_small_pictures_each_with_a_few_lines_of_code():
    """``make gallery`` writes the pictures; the code is run with that of the other pages."""
    blocks = fences(DOCS / "gallery.md", "python")
    assert len(blocks) == len(pictures()) == 6
    for name, code in zip(pictures(), blocks, strict=True):
        assert f'"{name}"' in code
        assert len([line for line in code.splitlines() if line]) <= 10
    assert {path.name for path in ASSETS.iterdir()} == set(pictures())
    assert all(path.stat().st_size < LIMIT for path in ASSETS.iterdir())
