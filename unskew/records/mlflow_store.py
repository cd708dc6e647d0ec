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
from unskew.filesystem import check_database
from unskew.folder_locks import file_lock

NAME = "mlflow.db"
PATIENCE = 120.0
"""Seconds to wait for another run that is creating the database, which takes some seconds."""


def open_client(folder: Path) -> Any:
    """Return a client of the database in ``folder``, created if it is missing.

    The database is created under a temporary name and then renamed, so a killed process leaves no incomplete database. An
    incomplete or corrupted one is renamed to ``mlflow-damaged.db`` and replaced by a new one.

    Args:
        folder: Folder of the database.

    Raises:
        ConfigError: If MLflow cannot store a database there, or another run holds the lock for too long.
    """
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)  # hide the messages on each created table
    path = folder / NAME
    if {"?", "%"} & set(str(path)):
        raise ConfigError(f"MLflow cannot store a database in {folder}: its path must not contain '?' or '%'.")
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
    """Return whether ``path`` is a complete MLflow database, which contains at least one experiment."""
    if not path.is_file():
        return False
    check_database(path)
    try:
        with closing(sqlite3.connect(path, timeout=30)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            return "experiments" in tables and bool(database.execute("SELECT 1 FROM experiments").fetchone())
    except sqlite3.OperationalError:  # the database is locked or not readable
        raise
    except sqlite3.DatabaseError:
        return False


def move_aside(path: Path) -> None:
    """Rename an incomplete database, with SQLite's files next to it."""
    for end in ("", "-journal", "-wal", "-shm"):
        companion = path.with_name(path.name + end)
        if companion.exists():
            os.replace(companion, path.with_name("mlflow-damaged.db" + end))


def create_database(path: Path) -> None:
    """Create the database."""
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
    """Context manager that turns off MLflow's connection pool.

    A pooled connection to a replaced database would write to a deleted file.
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
