"""Address of a Ray cluster and connection to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any, Literal

from torch import Tensor

from unskew.engines.cpu import num_cores
from unskew.engines.ray.messages import as_array, as_tensor
from unskew.errors import ConfigError, EngineError

TOKEN = Path.home() / ".ray" / "auth_token"
PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).check_alive([], timeout=10)"
"""Program that succeeds if a cluster responds."""


@dataclass(frozen=True)
class ClusterConfig:
    """Address of a cluster, and the resources that a client may use.

    Attributes:
        address: ``local`` for a new cluster on this machine that ends with this process, ``auto`` for one that already
            runs here, otherwise ``HOST:PORT`` of the head.
        cpus_per_worker: Number of cores, and of threads, of a task.
        gpus_per_worker: Number of accelerators of a task.
        retries: Number of times a client is trained again after its worker or its node died.
        deadline: Seconds without any reply after which the run ends; None to wait indefinitely.
        data: ``store`` sends the data through the object store; ``nodes`` lets each node open them from the path or
            URL; ``auto`` means ``nodes`` for data from a URL, otherwise ``store``.
    """

    address: str = "local"
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    retries: int = 5
    deadline: float | None = None
    data: Literal["auto", "store", "nodes"] = "auto"


def load_ray() -> Any:
    """Import Ray; cluster authentication must be configured before the import.

    Raises:
        ConfigError: If Ray is not installed.
    """
    if TOKEN.exists() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine=ray needs Ray: pip install 'unskew[ray]'.") from error
    return ray


def connect(address: str, workers: int | None) -> None:
    """Connect this process to a cluster, unless it is already connected; tensors are then sent as NumPy arrays.

    Args:
        address: ``local``, ``auto``, or ``HOST:PORT`` of the head.
        workers: Cores of a local cluster; None for all of this machine.

    Raises:
        EngineError: If there is no such cluster.
    """
    ray = load_ray()
    if not ray.is_initialized():
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            options |= {"num_cpus": workers or num_cores(), "include_dashboard": False}
        host = address.rpartition(":")[0]
        if _is_loopback(host):
            options["_node_ip_address"] = host  # a node on this machine with its own address
        if address not in ("local", "auto"):
            check_reachable(address)
        if address == "local" and os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            check_token_required(own_address())  # otherwise Ray creates a token
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
            raise EngineError(
                f"There is no Ray cluster at {address!r} that accepts this process: {str(error).splitlines()[0]} Start one "
                f"with ray start --head, give this machine the cluster's token ({TOKEN} or RAY_AUTH_TOKEN), or use "
                "ray.address=local."
            ) from error
        finally:
            if handler is not None and current_thread() is main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray replaces it by one that ends the process at once
        if address != "local" and accepts_without_token(head_address(ray)):
            try:
                check_token_required(head_address(ray).rpartition(":")[0].strip("[]"))
            except EngineError:
                ray.shutdown()
                raise
    ray.util.register_serializer(Tensor, serializer=as_array, deserializer=as_tensor)


def list_nodes(ray: Any) -> list[tuple[int, float]]:
    """Return the number of cores and accelerators of each live node; a task must fit on one node."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [(int(has.get("CPU", 0)), float(has.get("GPU", 0))) for has in alive]


def check_reachable(address: str) -> None:
    """Validate that the address accepts connections; otherwise Ray would end this process a minute after it failed.

    Args:
        address: Address of the cluster, ``HOST:PORT``.

    Raises:
        EngineError: If nothing listens at the address.
    """
    try:
        check_connection(address, 10)
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"There is no Ray cluster at {address!r}: {error}. Start one with ray start --head, or use ray.address=local."
        ) from error


def check_connection(address: str, seconds: float) -> None:
    """Open and close a connection to ``HOST:PORT``.

    Args:
        address: ``HOST:PORT``.
        seconds: Time limit.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def accepts_without_token(address: str) -> bool:
    """Return whether a cluster accepts a process without a token. Starts a process and takes about a second."""
    hidden = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"RAY_AUTH_MODE": "disabled"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE, address], env=environment, capture_output=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def check_token_required(host: str) -> None:
    """Validate that a cluster requires a token, except on loopback, because anyone with access can run programs there.

    Args:
        host: Host name or IP address of the cluster.

    Raises:
        EngineError: If ``host`` is not an address of this machine to itself.
    """
    try:
        loopback = all(ip_address(address[4][0]).is_loopback for address in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        loopback = False
    if not loopback:
        raise EngineError(
            f"The Ray cluster at {host} requires no token, so anyone who reaches its ports can run programs on it. Create a "
            "token (ray get-auth-token --generate), copy ~/.ray/auth_token to all machines, and set RAY_AUTH_MODE=token "
            "before ray start on each of them and here."
        )


def head_address(ray: Any) -> str:
    """Return ``HOST:PORT`` of the head of the connected cluster."""
    return str(ray.get_runtime_context().gcs_address)


def watch_head(address: str, warn: Callable[[str], None], ended: Event, seconds: float = 5.0) -> None:
    """Warn once if the head stops listening, because Ray ends this process about a minute later without a reason.

    Args:
        address: ``HOST:PORT`` of the head.
        warn: Called with the warning.
        ended: Set when the run has ended.
        seconds: Time between two checks.
    """
    failures = 0
    while failures < 3 and not ended.wait(seconds):
        try:
            check_connection(address, seconds)
            failures = 0
        except OSError:
            failures += 1
    if failures == 3:
        warn(
            f"The head of the Ray cluster at {address} no longer responds. Ray ends this process within a minute. Continue "
            "the run with unskew resume, on another cluster (--set ray.address=...) or on this machine (--engine processes)."
        )


def own_address() -> str:
    """Return the address by which this machine reaches others; no data are sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            line.connect(("8.8.8.8", 80))
            return str(line.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address other than the usual one."""
    try:
        return ip_address(host).is_loopback and host != "127.0.0.1"
    except ValueError:
        return False
