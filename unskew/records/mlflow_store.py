"""Storage of MLflow runs: one SQLite database for several runs, created completely by one of them."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from unskew.errors import ConfigError
from unskew.filesystem import file_lock

NAME = "mlflow.db"
PATIENCE = 120.0
"""Seconds to wait for another run that makes the database, which takes some seconds."""


def open_client(folder: Path) -> Any:
    """A client of the database in ``folder``, which is made if it is not there.

    It is made under another name and then renamed, so a process that is killed meanwhile leaves nothing half-made. A database
    that is half-made or damaged all the same is kept as ``mlflow-damaged.db``, and a new one takes its place.

    Raises:
        ConfigError: MLflow cannot keep a database there, or another run makes it for too long.
    """
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)  # the making of the tables interests nobody
    path = folder / NAME
    if {"?", "%"} & set(str(path)):
        raise ConfigError(f"MLflow cannot keep a database in {folder}: a path with '?' or '%' is none for it.")
    from mlflow import MlflowClient

    with file_lock(folder / ".mlflow.lock", PATIENCE), without_connection_pool():
        if not is_complete_database(path):
            move_aside(path)
            create_database(path)
        return MlflowClient(database_uri(path))


def database_uri(path: Path) -> str:
    """Return the database URI for MLflow."""
    return f"sqlite:///{path}"


def is_complete_database(path: Path) -> bool:
    """Return whether ``path`` is a complete MLflow database, which has its first experiment."""
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(path, timeout=30)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            return "experiments" in tables and bool(database.execute("SELECT 1 FROM experiments").fetchone())
    except sqlite3.OperationalError:  # somebody keeps it locked, or we may not read it
        raise
    except sqlite3.DatabaseError:
        return False


def move_aside(path: Path) -> None:
    """Keep a database that is not whole under another name, with what SQLite keeps beside it."""
    for end in ("", "-journal", "-wal", "-shm"):
        beside = path.with_name(path.name + end)
        if beside.exists():
            os.replace(beside, path.with_name("mlflow-damaged.db" + end))


def create_database(path: Path) -> None:
    """Make the database."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store: Callable[..., Any] = SqlAlchemyStore
    fresh = path.with_name(".mlflow.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        store(database_uri(fresh / path.name), str(fresh))
        os.replace(fresh / path.name, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def without_connection_pool() -> Iterator[None]:
    """Context manager without connection pooling.

    A pooled connection to a replaced database file would write to a deleted file.
    """
    name = "MLFLOW_SQLALCHEMYSTORE_POOLCLASS"
    before = os.environ.get(name)
    os.environ[name] = "NullPool"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
