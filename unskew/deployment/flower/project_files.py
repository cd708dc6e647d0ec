"""Folder of a deployment: scripts, the Flower app, and the files for sites and SuperLink."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from unskew.config.experiment import Experiment
from unskew.config.paths import with_absolute_paths
from unskew.data.load import load_partitioned
from unskew.deployment.common.data_schema import reference_schema
from unskew.deployment.flower.cli import VERSIONS
from unskew.deployment.flower.subprocesses import run_to_completion
from unskew.errors import ConfigError
from unskew.filesystem import make_folder, write_atomic
from unskew.folder_locks import is_occupied
from unskew.methods.dp_sites import site_noise
from unskew.methods.registry import method as method_of

SCRIPTS = ("certificates.sh", "node-key.sh")
UNITS = ("unskew-site.service", "flower-supernode.service", "flower-superlink.service")


def render_template(name: str, **values: str) -> str:
    """Return a template of the package with its values filled in."""
    return Template((files("unskew.deployment") / "templates" / name).read_text(encoding="utf-8")).substitute(values)


def write_file(path: Path, text: str, executable: bool = False) -> None:
    """Write a file that everyone can read.

    Args:
        path: File to write.
        text: Content of the file.
        executable: Whether to make the file executable.
    """
    make_folder(path.parent)
    write_atomic(path, text.encode())
    path.chmod(0o755 if executable else 0o644)


def write_scripts(folder: Path) -> None:
    """Write the scripts that create certificates and keys."""
    for name in SCRIPTS:
        text = (files("unskew.deployment") / "templates" / name).read_text(encoding="utf-8")
        write_file(folder / name, text, executable=True)


def write_app(folder: Path) -> Path:
    """Write the Flower app to a folder and return the app's folder."""
    write_file(folder / "app" / "pyproject.toml", render_template("app.toml", versions=VERSIONS))
    return folder / "app"


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Run the script that creates a CA and the SuperLink's certificate.

    Args:
        folder: Folder of the deployment.
        hosts: Host names and addresses of the SuperLink.
    """
    run_to_completion(["sh", str(folder / "certificates.sh"), *hosts], {}, 60, "certificates.sh")


def make_node_key(folder: Path, site_folder: Path) -> None:
    """Run the script that creates a site's keys.

    Args:
        folder: Folder of the deployment.
        site_folder: Folder of the site.
    """
    run_to_completion(["sh", str(folder / "node-key.sh"), str(site_folder)], {}, 60, "node-key.sh")


def site_yaml_values(name: str, client: int, **others: object) -> str:
    """Return the text of a ``site.yaml``.

    Args:
        name: Name of the site.
        client: Number of its client.
        **others: Further values of the template.
    """
    return yaml.safe_dump({"name": name, "client": client, **others}, sort_keys=False)


def init_project(folder: Path, config: Experiment) -> list[Path]:
    """Write the folder of a deployment.

    Args:
        folder: Folder to write.
        config: Experiment of the deployment.

    Returns:
        The files that the user should read, in order.

    Raises:
        ConfigError: If the folder exists and is not empty.
    """
    if is_occupied(folder):
        raise ConfigError(f"The folder {folder} already exists and is not empty; choose another.")
    make_folder(folder)
    write_scripts(folder)
    clients = "the number of sites" if config.clients is None else str(config.clients)
    write_file(folder / "experiment.yaml", with_absolute_paths(config).to_yaml())
    if site_noise(method_of(config.method)) is not None:
        schema = reference_schema(load_partitioned(config.data_spec, config.seed), config)
        write_file(folder / "site" / "schema.json", json.dumps(schema.config(), indent=2))
    write_file(folder / "site" / "site.yaml", render_template("site.yaml", last=str((config.clients or 2) - 1)))
    write_file(folder / "README.md", render_template("README.md", clients=clients, method=config.method))
    write_file(folder / "site" / "ADMINISTRATOR.md", render_template("ADMINISTRATOR.md", method=config.method))
    for unit in UNITS:
        role = "superlink" if "superlink" in unit else "site"
        write_file(folder / role / unit, render_template(unit))
    nginx = (files("unskew.deployment") / "templates" / "nginx.conf").read_text(encoding="utf-8")  # its $ are nginx's
    write_file(folder / "superlink" / "nginx.conf", nginx)
    write_file(folder / "compose.yaml", render_template("compose.yaml"))
    write_file(folder / "Dockerfile", render_template("Dockerfile"))
    return [folder / name for name in ("README.md", "site/ADMINISTRATOR.md", "experiment.yaml", "site/site.yaml")]
