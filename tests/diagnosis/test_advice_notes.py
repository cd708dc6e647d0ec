"""Notes next to the ranked methods."""

import pytest

from unskew.benchmark.suite import load_suite
from unskew.diagnosis.advice_notes import notes
from unskew.diagnosis.evidence import MEASURED_TASKS, load_evidence
from unskew.diagnosis.features import AdviceLimits, SkewFeatures
from unskew.tasks.registry import TASKS


def features(task):
    return SkewFeatures(task, 0, 10, 50.0, 0.9, 1.0, 30, 10.0, False, None, None, None, 1.0, 1.0, 30)


@pytest.mark.parametrize("task", TASKS)
def test_the_advice_says_that_there_is_no_evidence_for_a_task_that_was_not_measured(task):
    text = " ".join(notes(features(task), AdviceLimits(), True))
    assert (f"There is no evidence for the task {task}" in text) == (task not in MEASURED_TASKS)


def test_the_evidence_is_the_suite_skew_without_those_of_other_tasks():
    evidence = {federation.name for federation in load_evidence()[0]}
    assert evidence == {federation.name for federation in load_suite("skew")[1]}
    for suite in ("survival", "segmentation"):
        assert evidence.isdisjoint(federation.name for federation in load_suite(suite)[1])
