"""Access to Ray's private interface; no other module of unskew uses it."""

from __future__ import annotations

from typing import Any


def previous_attempts(ray: Any) -> int:
    """Return how often the current task was started before because a worker or a node died.

    Ray has no public function for this. If a version of Ray lacks the private one, lost attempts are not counted.

    Args:
        ray: The module.
    """
    try:
        return int(ray._private.worker.global_worker.core_worker.get_current_task_attempt_number())
    except AttributeError:
        return 0
