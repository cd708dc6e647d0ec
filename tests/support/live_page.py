"""A server of the live page in a thread."""

import threading
from contextlib import contextmanager

from unskew.reporting.live_page import LiveRuns, PageServer


@contextmanager
def served(folder):
    """Serve the page of a folder, and stop at the end."""
    with PageServer(LiveRuns(folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
