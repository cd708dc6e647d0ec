"""Notes next to the ranked methods."""

import pytest

from unskew.benchmark.suite import load_suite
from unskew.diagnosis.advice_notes import evidence_note
from unskew.diagnosis.evidence import MEASURED_TASKS, load_evidence
from unskew.tasks.registry import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_the_advice_says_that_there_is_no_evidence_for_a_task_that_was_not_measured(task):
    assert evidence_note(task).startswith(f"There is no evidence for the task {task}") == (task not in MEASURED_TASKS)


def test_the_evidence_is_two_suites_without_the_others():
    evidence = {federation.name for federation in load_evidence()[0]}
    assert evidence == {federation.name for suite in ("skew", "cifar10") for federation in load_suite(suite)[1]}
    for suite in ("survival", "segmentation", "advice"):
        assert evidence.isdisjoint(federation.name for federation in load_suite(suite)[1])
