"""Profiles of Hypothesis: the same cases in every run of the suite, and ten times as many new ones with ``make fuzz``."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzzing import fuzz, random_draws, scaled


@pytest.fixture
def profile():
    """Load a profile, and afterwards the one of this session again."""
    before = settings.get_current_profile_name()
    yield settings.load_profile
    settings.load_profile(before)


def cases(examples):
    """Return the numbers that a test is tried with."""
    drawn = []

    @fuzz(examples)
    @given(st.integers(0, 10**12))
    def check(number):
        drawn.append(number)

    check()
    return drawn


def test_the_suite_always_tries_the_same_cases(profile):
    profile("suite")
    assert len(cases(20)) == scaled(20) == 20
    assert cases(20) == cases(20)
    assert random_draws(3).random() == random.Random(3).random()


def test_fuzz_tries_ten_times_as_many_new_cases_and_prints_how_to_repeat_them(profile, monkeypatch, capsys):
    profile("fuzz")
    assert len(cases(20)) == scaled(20) == 200
    assert cases(20) != cases(20)
    assert settings.default.print_blob
    first = random_draws(3).random()
    assert first != random_draws(3).random()
    monkeypatch.setenv("UNSKEW_FUZZ_SEED", capsys.readouterr().out.split()[0].partition("=")[2])
    assert random_draws(3).random() == first
