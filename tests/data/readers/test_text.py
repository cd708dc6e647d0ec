"""Rows of a text that is cut stay together: in splits, in partitions, and in data reserved for the server."""

import pytest
from support.tiny import write_jsonl

from unskew.data.load import load_federation
from unskew.data.partition.partitioner import make_partition
from unskew.errors import DataError

TEXT = {"tokenizer": "bytes", "block": 16}


def letters(x):
    """The texts of some rows; each text consists of one letter."""
    return {chr(row[row < 256].max()) for row in x}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """30 texts of 20 to 68 letters, each cut into two to five rows, of five authors."""
    texts = [{"text": chr(65 + n) * (20 + n * 7 % 49), "author": "abcde"[n % 5], "day": n // 3} for n in range(30)]
    return write_jsonl(tmp_path_factory.mktemp("texts") / "texts.jsonl", texts)


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "iid"},
        {"partition": "dirichlet:0.5,min=2,by=author"},
        {"partition": "classes:1,by=author", "clients": 5},
        {"partition": "quantity:1,min=2"},
        {"partition": "sorted:author"},
        {"partition": "natural:author", "clients": None},
        {"partition": "iid", "server_data": 3, "reserve_test_samples": 5},
        {"partition": "iid", "split_by": "time:day"},
    ],
    ids=lambda options: "-".join(options.values() if len(options) == 1 else options),
)
def test_rows_of_a_cut_text_are_at_one_client_and_on_one_side_of_each_split(options, path):
    fed = load_federation(f"text:{path}", text=TEXT, holdout=0.3, **{"clients": 3, **options})
    sides = [letters(x) for client in fed.clients for x in (client.x, client.x_test)] + [letters(fed.test[0])]
    sides += [letters(fed.server.x)] if fed.server else []
    assert all(sides)
    assert sum(map(len, sides)) == len(set.union(*sides))  # no text is on two sides
    total = sum(len(client.y) + len(client.y_test) for client in fed.clients)
    assert sum(len(client.y_test) for client in fed.clients) / total == pytest.approx(0.3, abs=0.15)


def test_iid_gives_clients_the_same_number_of_cut_texts(path):
    fed = load_federation(f"text:{path}", text=TEXT, partition="iid", clients=4, holdout=0.0)
    numbers = [len(letters(client.x)) for client in fed.clients]
    assert max(numbers) - min(numbers) <= 1
    assert len(set(fed.sizes.tolist())) > 1  # rows


def test_texts_that_are_not_cut_are_drawn_by_row(path):
    fed = load_federation(f"text:{path}", text={**TEXT, "block": 70}, partition="iid", clients=4)
    assert len(fed.test[0]) == 6
    assert fed.fingerprint == make_partition("iid", None, 4, 0, classes=257, samples=24).fingerprint


def test_a_single_text_is_not_divided(tmp_path):
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"text": 100 * "a"}])
    with pytest.raises(DataError, match=r"parts of a single text.* Divide it into several rows of the file"):
        load_federation(f"text:{alone}", text=TEXT, partition="iid", clients=1)
    rows = [{"text": chr(65 + n) * 40, "author": "ab"[n % 9 == 0]} for n in range(9)]
    fed = load_federation(f"text:{write_jsonl(tmp_path / 'rows.jsonl', rows)}", text=TEXT, partition="natural:author")
    (warning,) = (text for text in fed.warnings if "single text" in text)
    assert warning.startswith("rows: 1 of 2 clients have a single text each")
