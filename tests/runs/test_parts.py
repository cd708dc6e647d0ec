"""Parts of a command's work: every item is in exactly one part, and wrong parts are rejected."""

import pytest

from unskew.errors import ConfigError
from unskew.runs.parts import Part, parse_part


@pytest.mark.parametrize("total", [1, 2, 5, 12, 20])
def test_each_item_is_in_one_part_and_parts_differ_by_at_most_one_item(total):
    items = list(range(12))
    shares = [Part(number, total).share(items) for number in range(1, total + 1)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_neighbors_are_in_different_parts():
    assert Part(1, 3).share("aaabbbccc") == Part(2, 3).share("aaabbbccc") == ["a", "b", "c"]


def test_a_part_is_parsed():
    assert parse_part("2/4") == Part(2, 4)
    assert parse_part(" 1/1 ", parallel=2) == Part(1, 1)
    assert str(parse_part("04/4", "auto")) == "4/4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a part"),
        ("2", "as in --part 2/4"),
        ("2/4/8", "not a part"),
        ("a/4", "not a part"),
        ("1.5/4", "not a part"),
        ("-1/4", "not a part"),
        ("1/10000", "not a part"),
        ("/4", "no number before the slash. Submit the script as an array, with sbatch --array=1-4"),
        ("0/4", "numbered from 1. With Slurm, use --array=1-4"),
        ("1/0", "0 parts"),
        ("5/4", "the last part is 4/4"),
        ("3/1", "SLURM_ARRAY_TASK_COUNT is smaller when only some tasks are submitted again"),
    ],
)
def test_wrong_parts_are_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_part(text)


def test_a_part_does_not_use_a_ray_cluster():
    with pytest.raises(ConfigError, match=r"--part 1/2 and --parallel 8@auto both distribute"):
        parse_part("1/2", "8@auto")
