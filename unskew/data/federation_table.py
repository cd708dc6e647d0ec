"""Federation as HTML for notebooks: the clients with their classes, and the columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unskew.data.clients import ArrayClients, ClientData
from unskew.data.readers.column_roles import describe_roles
from unskew.tasks.base import Task
from unskew.tasks.html_table import html_page

CLIENTS_SHOWN, CLASSES_SHOWN = 20, 20


def federation_html(
    title: str,
    clients: Sequence[ClientData],
    task: Task,
    classes: Sequence[str],
    label: Callable[[int], str],
    columns: Mapping[str, str],
) -> str:
    """Return a paragraph, a table of the first clients with their classes, and a table of columns.

    Inputs are not loaded. Clients that load their data when they are sampled are omitted.

    Args:
        title: Text of the paragraph.
        clients: The clients.
        task: Task, which counts the samples of each class.
        classes: Names of the classes to count; may be empty.
        label: Function that returns a client's label.
        columns: Role of each column.
    """
    rows: list[dict[str, object]] = []
    if isinstance(clients, ArrayClients):
        for number in range(min(len(clients), CLIENTS_SHOWN)):
            start, split, stop = clients.bounds(number)
            row: dict[str, object] = {"client": label(number), "training": split - start, "held out": stop - split}
            counts = task.counts(clients.y[start:split].cpu(), len(classes)).tolist() if classes else []
            named = zip(classes[:CLASSES_SHOWN], counts, strict=False)
            rows.append(row | {f"class {name}": count for name, count in named})
    shortened = len(clients) > CLIENTS_SHOWN or len(classes) > CLASSES_SHOWN
    note = [f"The table has at most {CLIENTS_SHOWN} clients and {CLASSES_SHOWN} classes."] if shortened and rows else []
    return html_page([title, *note], rows, [{"column": name, "role": role} for name, role in describe_roles(columns)])
