"""Federation as HTML for notebooks: the clients with their classes, and the columns of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unskew.data.clients import ArrayClients
from unskew.data.readers.column_roles import describe_roles
from unskew.tasks.html_table import html_page

if TYPE_CHECKING:
    from unskew.data.federation import Federation

CLIENTS_SHOWN, CLASSES_SHOWN = 20, 20


def federation_html(federation: Federation) -> str:
    """Return a sentence on a federation, a table of its first clients, and a table of the roles of its columns.

    No inputs are loaded, so clients that load their data lazily are only counted.

    Args:
        federation: The federation.
    """
    clients, task = federation.clients, federation.objective
    names = federation.names if "counts" in task.provides and federation.counts_known and not task.pixels else ()
    inputs = " x ".join(map(str, federation.shape))
    sentences = [
        f"{federation.name}, partition {federation.partition}: {len(clients):,} clients, {len(federation.test[1]):,} test "
        f"samples, inputs of shape {inputs}, task {federation.task}."
    ]
    rows: list[dict[str, object]] = []
    if isinstance(clients, ArrayClients):
        for number in range(min(len(clients), CLIENTS_SHOWN)):
            start, split, stop = clients.bounds(number)
            counts = task.counts(clients.y[start:split].cpu(), federation.classes).tolist() if names else []
            row = {"client": federation.client_label(number), "training": split - start, "held out": stop - split}
            classes = zip(names[:CLASSES_SHOWN], counts, strict=False)
            rows.append(row | {f"class {name}": samples for name, samples in classes})
        if len(clients) > CLIENTS_SHOWN or len(names) > CLASSES_SHOWN:
            sentences.append(f"The table has at most {CLIENTS_SHOWN} clients and {CLASSES_SHOWN} classes.")
    columns = [{"column": name, "role": role} for name, role in describe_roles(federation.columns)]
    return html_page(sentences, rows, columns)
