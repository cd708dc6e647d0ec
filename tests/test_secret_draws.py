"""Secret draws: the cipher against published vectors, the numbers against their distribution, and the file of the key."""

import math
import pickle
import stat

import pytest
import torch

import unskew.secret_draws
from unskew.errors import CheckpointError
from unskew.secret_draws import (
    SecretKey,
    SystemEntropy,
    secret_normal,
    secret_uniform,
    secret_words,
    stored_key,
    threefry,
)

KEY = SecretKey(bytes(32)).subkey("test")
# Counter, key and output of threefry2x64 with 20 rounds in kat_vectors of Random123, the authors' library.
VECTORS = [
    ((0, 0), (0, 0), (0xC2B6E3A8C2C69865, 0x6F81ED42F350084D)),
    ((2**64 - 1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (0xE02CB7C4D95D277A, 0xD06633D0893B8B68)),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344),
        (0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x263C7D30BB0F0AF1, 0x56BE8361D3311526),
    ),
]


def signed(number):
    return number - 2**64 if number >> 63 else number


def by_hand(counter, key):
    """The cipher with Python's integers, written from the paper's definition."""
    rotations, schedule = (16, 42, 12, 31, 16, 32, 24, 21), [*key, key[0] ^ key[1] ^ 0x1BD11BDAA9FC1A22]
    x = [(counter[i] + schedule[i]) % 2**64 for i in (0, 1)]
    for number in range(20):
        x[0] = (x[0] + x[1]) % 2**64
        bits = rotations[number % 8]
        x[1] = ((x[1] << bits | x[1] >> (64 - bits)) % 2**64) ^ x[0]
        if number % 4 == 3:
            turn = number // 4 + 1
            x[0] = (x[0] + schedule[turn % 3]) % 2**64
            x[1] = (x[1] + schedule[(turn + 1) % 3] + turn) % 2**64
    return tuple(x)


def encrypted(counter, key):
    words = [torch.tensor([signed(word)]) for word in counter]
    return tuple(int(word) % 2**64 for word in threefry(*words, torch.tensor([signed(word) for word in key])))


def test_the_cipher_is_threefry():
    for counter, key, expected in VECTORS:
        assert encrypted(counter, key) == expected == by_hand(counter, key)
    words = [[int(w) % 2**64 for w in secret_words(SecretKey(bytes([k] * 32)).subkey("x"), 3, 8)] for k in range(4)]
    draws = iter([word for row in words for word in row])
    for counter, key in zip(zip(draws, draws, strict=True), zip(draws, draws, strict=False), strict=False):
        assert encrypted(counter, key) == by_hand(counter, key)


def test_numbers_have_the_stated_distribution():
    n = 300_000
    uniform, normal = secret_uniform(KEY, 0, n), secret_normal(KEY, 1, n)
    assert bool(((uniform >= 0) & (uniform < 1)).all())
    assert float(uniform.mean()) == pytest.approx(0.5, abs=5 / math.sqrt(12 * n))
    low_bits = (uniform * 2**53).to(torch.int64) & 1  # a generator of 24 bits would have none
    assert float(low_bits.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(n))
    assert float(normal.mean()) == pytest.approx(0, abs=5 / math.sqrt(n))
    assert float(normal.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / n))
    assert float(normal.pow(4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / n))
    half = n // 2  # the cosines and the sines of the same angles
    assert abs(float((normal[:half] * normal[half:]).mean())) < 5 / math.sqrt(half)


def test_numbers_depend_on_key_purpose_round_client_and_number_only(monkeypatch):
    keys = [KEY] + [SecretKey(bytes(32)).subkey(*where) for where in (("other",), ("test", 1), ("test", 0, 1))]
    keys.append(SecretKey(bytes([1] * 32)).subkey("test"))
    drawn = [secret_normal(key, number, 1000) for key in keys for number in (0, 1)]
    for index, first in enumerate(drawn):
        for second in drawn[:index]:
            assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(1000)
    mapped = torch.func.vmap(lambda key, number: secret_normal(key, number, 1000), in_dims=(0, None))
    assert torch.equal(mapped(torch.stack(keys), torch.tensor(1)), torch.stack(drawn[1::2]))
    assert torch.equal(drawn[0][:7], secret_normal(KEY, 0, 1000)[:7])
    assert secret_normal(KEY, 0, 0).shape == (0,)
    monkeypatch.setattr(unskew.secret_draws, "_CHUNK", 16)  # long vectors are computed in parts, which must not repeat
    assert len(secret_normal(KEY, 0, 1001).unique()) == 1001
    copy = pickle.loads(pickle.dumps(SecretKey(bytes(32))))  # as engines send it to their workers
    assert torch.equal(copy.subkey("test"), KEY)


def test_streams_repeat_for_a_key_and_never_for_the_system():
    first, second = SecretKey(bytes(32)).stream("x"), SecretKey(bytes(32)).stream("x")
    drawn = [first(1000) for _ in range(3)]
    assert all((second(1000) == each).all() for each in drawn)
    assert len({*map(tuple, drawn)}) == 3
    assert 0 <= min(map(min, drawn)) < max(map(max, drawn)) < 1
    assert not torch.equal(SystemEntropy().subkey("x"), SystemEntropy().subkey("x"))


def test_a_key_is_not_shown():
    key = SecretKey(b"0123456789abcdef" * 2)
    assert "0123" not in repr(key)
    assert "0123" not in str({"key": key})


def test_only_its_owner_can_read_the_file_of_a_key(tmp_path):
    path = tmp_path / "privacy.key"
    key = stored_key(path, begun=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for begun in (False, True):
        assert torch.equal(stored_key(path, begun).subkey("x"), key.subkey("x"))
    other = stored_key(tmp_path / "other.key", begun=False)
    assert not torch.equal(other.subkey("x"), key.subkey("x"))


def test_a_missing_or_incomplete_key_is_replaced_only_before_the_first_draw(tmp_path):
    path = tmp_path / "privacy.key"
    for content in (None, b"", b"short"):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match="Restore the file, or start a new run"):
            stored_key(path, begun=True)
        stored_key(path, begun=False)
        assert len(path.read_bytes()) == 32


def test_a_key_is_neither_read_nor_written_through_a_link(tmp_path):
    path, victim = tmp_path / "privacy.key", tmp_path / "victim"
    for content in (bytes(32), b""):
        victim.write_bytes(content)
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
        with pytest.raises(CheckpointError, match="symbolic link"):
            stored_key(path, begun=False)
        assert victim.read_bytes() == content
