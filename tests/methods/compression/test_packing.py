"""Compression codes against NumPy, closed forms and statistics; hostile codes are rejected."""

import contextlib
import math

import numpy as np
import pytest
import torch

from unskew.errors import UnskewError
from unskew.methods.compression import low_rank, packing, quantized, sparse
from unskew.protocol.messages import num_bytes

FLOATS = [torch.float32, torch.float64]
SIZES = [1, 2, 7, 101, 1037]
SHARE, S, BUCKET, RANK = 0.3, 15, 16, 2


def code_bytes(code):
    return num_bytes(code.values())


def key_of(seed):
    return torch.tensor(seed * 7919 + 1)


def vector(n, dtype=torch.float32, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=n)).to(dtype)


def shapes_of(n):
    """A convolution, a matrix, small matrices and vectors, of ``n`` entries in total."""
    shapes = [(12, 3, 2, 2), (5,), (11, 23), (3, 2), ()]
    return [*shapes, (n - 409,)] if n >= 409 else [(n,)]


def layers_of(n):
    return [n] if n < 9 else [3, 0, 8, n - 11]


def rounded_codec(name, rounded, n, dtype):
    return (
        lambda v: quantized.encode_rounded(v, rounded),
        lambda code: quantized.decode_rounded(name, code, rounded, n, dtype),
    )


def codecs(n, dtype, key=None):
    """Every code of vectors of this size: encode, decode, and the exact number of bytes."""
    key = key_of(3) if key is None else key
    width, k = dtype.itemsize, math.ceil(round(SHARE * n, 9))
    buckets, bits = math.ceil(n / BUCKET), math.ceil(math.log2(2 * S + 1))
    shapes, layers = shapes_of(n), layers_of(n)
    # The convolution 12 x 12 and the matrix 11 x 23 are compressed.
    rank_size = RANK * (24 + 34) + n - 144 - 253 if n >= 409 else n
    return {
        "topk": (
            lambda v: sparse.encode_topk(v, SHARE),
            lambda code: sparse.decode_topk(code, n, dtype),
            width * k + min(4 * k, math.ceil(n / 8)) + 4,
        ),
        "randk": (
            lambda v: sparse.encode_randk(v, SHARE, key),
            lambda code: sparse.decode_randk(code, n, dtype),
            width * k + 8,
        ),
        "qsgd": (
            lambda v: quantized.encode_qsgd(v, S, BUCKET, key),
            lambda code: quantized.decode_qsgd(code, S, BUCKET, n, dtype),
            width * buckets + math.ceil(n * bits / 8),
        ),
        "sign": (
            lambda v: quantized.encode_sign(v, layers),
            lambda code: quantized.decode_sign(code, layers, dtype),
            sum(math.ceil(size / 8) + width for size in layers),
        ),
        "int8": (
            lambda v: quantized.encode_int8(v, BUCKET),
            lambda code: quantized.decode_int8(code, BUCKET, n, dtype),
            n + width * buckets,
        ),
        "fp16": (*rounded_codec("fp16", torch.float16, n, dtype), 2 * n),
        "bf16": (*rounded_codec("bf16", torch.bfloat16, n, dtype), 2 * n),
        "powersgd": (
            lambda v: low_rank.encode_powersgd(v, shapes, RANK, None, key)[0],
            lambda code: low_rank.decode_powersgd(code, shapes, RANK, dtype),
            width * rank_size,
        ),
    }


NAMES = list(codecs(1, torch.float32))


def expected_of(name, v, code):
    """Decoded vector according to NumPy, in float64; None if the code is random."""
    x = v.double().numpy()
    n = len(x)
    if name == "topk":
        order = sorted(range(n), key=lambda i: (-abs(x[i]), i))[: math.ceil(round(SHARE * n, 9))]
        return np.array([x[i] if i in set(order) else 0.0 for i in range(n)])
    if name == "sign":
        parts = np.split(x, np.cumsum(layers_of(n))[:-1])
        return np.concatenate([np.where(p >= 0, 1, -1) * np.abs(p).sum() / max(1, len(p)) for p in parts])
    if name == "int8":
        out = []
        for part in (x[i : i + BUCKET] for i in range(0, n, BUCKET)):
            scale = np.abs(part).max() / 127
            out.append(np.rint(part / scale) * scale if scale else part)
        return np.concatenate(out)
    if name == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if name == "bf16":  # round to the nearest of 8 significant bits
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    return None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_vectors_and_bytes(name, n, dtype):
    encode, decode, size = codecs(n, dtype)[name]
    for seed in range(2):
        v = vector(n, dtype, seed)
        before = v.clone()
        code = encode(v)
        decoded = decode(code)
        assert sum(t.numel() * t.element_size() for t in code.values()) == code_bytes(code) == size
        assert decoded.dtype == dtype
        assert decoded.shape == (n,)
        assert torch.equal(v, before)
        assert torch.equal(decode(encode(v)), decoded)
        expected = expected_of(name, v, code)
        if expected is not None:
            # One step of rounding, because the scales of the codes are rounded to the data type.
            assert np.allclose(decoded.double().numpy(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name, n):
    for dtype in FLOATS:
        encode, decode, size = codecs(n, dtype)[name]
        code = encode(torch.zeros(n, dtype=dtype))
        assert code_bytes(code) == size
        assert torch.equal(decode(code), torch.zeros(n, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_empty_vectors_are_empty(name):
    v = torch.zeros(0)
    encode, decode, size = codecs(0, v.dtype)[name]
    code = encode(v)
    assert code_bytes(code) == size
    assert decode(code).shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_are_never_lost(name):
    for n in SIZES:
        for dtype in FLOATS:
            encode, decode, size = codecs(n, dtype)[name]
            for bad in (math.nan, math.inf, -math.inf):
                for index in {0, n // 2, n - 1}:
                    for others in (vector(n, dtype), torch.zeros(n, dtype=dtype)):
                        v = others.clone()
                        v[index] = bad
                        code = encode(v)
                        assert code_bytes(code) == size
                        assert not decode(code).isfinite().all()
                assert not decode(encode(torch.full((n,), bad, dtype=dtype))).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_very_large_and_small_vectors_keep_their_scale(name):
    """Scaling by a power of two scales the result, also where squares leave the range of float32."""
    v = vector(1037)
    encode, decode, _ = codecs(1037, torch.float32)[name]
    # float16 has a narrow range by design; entries of powersgd stay at a distance from the smallest numbers
    powers = {"fp16": (-2, 8), "powersgd": (-80, 60)}.get(name, (-80, 100))
    for power in powers:
        scaled = decode(encode(v * 2.0**power)) / 2.0**power
        assert torch.allclose(scaled, decode(encode(v)), rtol=1e-3, atol=1e-4)


# --- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 25))
def test_packing_equals_packbits_of_all_bits(bits):
    for n in (0, 1, 7, 8, 9, 37):
        values = np.random.default_rng(bits).integers(0, 2**bits, n)
        values[:1] = 2**bits - 1
        grid = (values[:, None] >> np.arange(bits - 1, -1, -1)) & 1
        packed = packing.pack_integers(torch.from_numpy(values), bits)
        assert packed.dtype == torch.uint8
        assert packed.numpy().tolist() == np.packbits(grid.astype(np.uint8).ravel()).tolist()
        assert packing.unpack_integers("x", packed, n, bits).tolist() == values.tolist()


def test_hashes_do_not_repeat_and_long_draws_are_uniform():
    n = 3 * packing.CHUNK + 5
    draws = packing.long_uniform(key_of(1), n).double()
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    chunks = draws[: 3 * packing.CHUNK].reshape(3, -1)
    assert (torch.corrcoef(chunks) - torch.eye(3)).abs().max() < 5 / math.sqrt(packing.CHUNK)
    hashes = packing.long_hashes(key_of(1), n)
    assert len(hashes.unique()) == n
    assert torch.equal(packing.long_hashes(key_of(1), 7), hashes[:7])


# --- sparse codes ------------------------------------------------------------------------------------------------------


def test_number_of_entries_is_robust_against_rounding():
    for n in (1, 3, 10, 100, 1000, 12345, 10**7, 10**10):
        for percent in range(1, 101):
            assert sparse.sparse_count(percent / 100, n) == -(-percent * n // 100)
    for n in range(1, 300):
        for k in range(1, n + 1):
            assert sparse.sparse_count(k / n, n) == k
    assert sparse.sparse_count(1e-300, 5) == 1
    assert sparse.sparse_count(0.5, 0) == 0


def test_topk_keeps_the_largest_and_earliest_values():
    v = torch.tensor([1.0, -3.0, 3.0, 0.0, -1.0, 3.0, 1.0])
    for k, kept in ((1, [1]), (2, [1, 2]), (3, [1, 2, 5]), (4, [0, 1, 2, 5]), (5, [0, 1, 2, 4, 5])):
        code = sparse.encode_topk(v, k / 7)
        assert code["values"].tolist() == v[kept].tolist()
        assert code["bitmap"].tolist() == np.packbits(np.isin(np.arange(7), kept)).tolist()
    code = sparse.encode_topk(torch.cat([v, torch.zeros(93)]), 0.03)
    assert code["indices"].tolist() == [1, 2, 5]
    assert "bitmap" not in code
    # Equal sizes, 4 k = ceil(n / 8): indices.
    assert "indices" in sparse.encode_topk(vector(96), 3 / 96)
    assert "bitmap" in sparse.encode_topk(vector(96), 4 / 96)


def test_topk_has_the_smallest_error_of_all_choices():
    v = vector(1001, torch.float64)
    decoded = sparse.decode_topk(sparse.encode_topk(v, 0.2), 1001, v.dtype)
    error = (v.abs().sort().values[: 1001 - 201]).square().sum()
    assert (v - decoded).square().sum() == pytest.approx(error.item(), rel=1e-12)
    assert (v - decoded).square().sum() <= (1 - 201 / 1001) * v.square().sum()


def test_randk_draws_every_entry_equally_often_and_pairs_independently():
    n, k, draws = 11, 4, 4000
    counts = torch.zeros(n, n, dtype=torch.float64)
    for seed in range(draws):
        indices = sparse.randk_indices(key_of(seed), k, n)
        assert len(indices) == k
        counts[indices[:, None], indices] += 1
    single, pair = k / n, k * (k - 1) / (n * (n - 1))
    assert (counts.diagonal() / draws - single).abs().max() < 5 * math.sqrt(single * (1 - single) / draws)
    pairs = counts[~torch.eye(n, dtype=torch.bool)]
    assert (pairs / draws - pair).abs().max() < 5 * math.sqrt(pair * (1 - pair) / draws)


def test_randk_is_unbiased_with_the_variance_of_the_closed_form():
    n, k, draws = 11, 4, 4000
    v = vector(n, torch.float64)
    sample = torch.stack(
        [sparse.decode_randk(sparse.encode_randk(v, k / n, key_of(i)), n, v.dtype) for i in range(draws)]
    )
    variance = (n / k - 1) * v.square()
    assert ((sample.mean(0) - v).abs() <= 5 * (variance / draws).sqrt()).all()
    # An entry is v n / k with probability k / n and 0 otherwise, so the error of its square is known too.
    errors = (sample - v).square().sum(dim=1)
    assert abs(errors.mean() - variance.sum()) < 5 * errors.std() / math.sqrt(draws)


def test_sums_of_randk_codes_decode_to_the_sum():
    for n in (1, 7, 1001):
        vectors = [vector(n, torch.float64, seed) for seed in range(4)]
        sent = [sparse.encode_randk(v, 0.3, key_of(5)) for v in vectors]
        total = {"values": sum(code["values"] for code in sent), "seed": sent[0]["seed"]}
        decoded = sum(sparse.decode_randk(code, n, torch.float64) for code in sent)
        assert torch.allclose(sparse.decode_randk(total, n, torch.float64), decoded, rtol=1e-13, atol=1e-13)
        whole = sparse.decode_randk(sparse.encode_randk(sum(vectors), 0.3, key_of(5)), n, torch.float64)
        assert torch.allclose(whole, decoded, rtol=1e-13, atol=1e-13)


# --- quantized codes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "s"), [(1, 1), (7, 1), (7, 3), (64, 1), (64, 4), (64, 15), (64, 100)])
def test_qsgd_is_unbiased_and_within_its_variance_bound(b, s):
    """Buckets that repeat the same vector are independent draws."""
    v, draws = vector(b, torch.float64, b + s), 4000
    repeated = v.repeat(draws)
    code = quantized.encode_qsgd(repeated, s, b, key_of(s))
    sample = quantized.decode_qsgd(code, s, b, draws * b, v.dtype).reshape(draws, b)
    norm = v.norm()
    ratios = s * v.abs() / norm
    fraction = ratios - ratios.floor()
    variance = fraction * (1 - fraction) * (norm / s).square()
    # Uniform numbers have 24 bits, which rounds the probability of a level.
    assert ((sample.mean(0) - v).abs() <= 5 * (variance / draws).sqrt() + norm / s * 2**-23).all()
    errors = (sample - v).square().sum(dim=1)
    assert abs(errors.mean() - variance.sum()) <= 5 * errors.std() / math.sqrt(draws) + 1e-6 * norm**2
    assert errors.mean() <= min(b / s**2, math.sqrt(b) / s) * norm**2
    assert (errors <= b * (norm / s) ** 2 * (1 + 1e-9)).all()


def test_qsgd_of_exact_levels_has_no_error():
    """With the norm 5 and s = 5, the entries 3 and -4 are levels."""
    v = torch.tensor([3.0, -4.0, 0.0, 0.0, -6.0, 8.0])
    code = quantized.encode_qsgd(v, 5, 3, key_of(0))
    assert code["norms"].tolist() == [5.0, 10.0]
    assert packing.unpack_integers("qsgd", code["levels"], 6, 4).tolist() == [8, 1, 5, 5, 2, 9]
    assert torch.allclose(quantized.decode_qsgd(code, 5, 3, 6, v.dtype), v)


def test_a_bucket_that_is_not_finite_spoils_no_other_bucket():
    v = vector(20)
    v[7] = math.nan
    for decoded in (
        quantized.decode_qsgd(quantized.encode_qsgd(v, 15, 5, key_of(0)), 15, 5, 20, v.dtype),
        quantized.decode_int8(quantized.encode_int8(v, 5), 5, 20, v.dtype),
    ):
        assert decoded.isfinite().reshape(4, 5).all(dim=1).tolist() == [True, False, True, True]


def test_int8_is_within_half_a_step():
    v = vector(1001, torch.float64)
    error = (quantized.decode_int8(quantized.encode_int8(v, 100), 100, 1001, v.dtype) - v).abs()
    for part, errors in zip(v.split(100), error.split(100), strict=True):
        assert errors.max() <= part.abs().max() / 254 * (1 + 1e-12)


def test_16_bit_numbers_saturate():
    v = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, -1e30, -0.0, 6e-8, math.inf, -math.inf])
    top = 65504.0
    encode, decode = rounded_codec("fp16", torch.float16, 9, v.dtype)
    decoded = decode(encode(v)).tolist()
    assert decoded[:6] == [top, top, top, top, -top, 0.0]
    assert decoded[6] == 2.0**-24
    assert decoded[7:] == [math.inf, -math.inf]
    largest = torch.finfo(torch.bfloat16).max
    for dtype, value in ((torch.float32, 3.4e38), (torch.float64, 1e300)):
        ends = torch.tensor([value, -value, math.inf], dtype=dtype)
        encode, decode = rounded_codec("bf16", torch.bfloat16, 3, dtype)
        assert decode(encode(ends)).tolist() == [largest, -largest, math.inf]


# --- low-rank codes ----------------------------------------------------------------------------------------------------


def test_powersgd_of_a_matrix_of_its_rank_is_exact_from_the_second_step():
    shapes, rank = [(40, 5, 6), (7,), (30, 50)], 3
    rng = np.random.default_rng(0)
    matrices = [rng.normal(size=(a, rank)) @ rng.normal(size=(rank, b)) for a, b in ((40, 30), (30, 50))]
    v = torch.from_numpy(np.concatenate([matrices[0].ravel(), rng.normal(size=7), matrices[1].ravel()]))
    start = None
    for step in range(4):
        code, start = low_rank.encode_powersgd(v, shapes, rank, start, key_of(1))
        decoded = low_rank.decode_powersgd(code, shapes, rank, v.dtype)
        assert code_bytes(code) == 8 * (rank * (40 + 30 + 30 + 50) + 7)
        if step:
            assert torch.allclose(decoded, v, rtol=1e-10, atol=1e-10)


def test_powersgd_equals_a_power_iteration_in_numpy_and_converges_to_the_singular_vectors():
    a, b, rank = 20, 30, 2
    rng = np.random.default_rng(1)
    u, _ = np.linalg.qr(rng.normal(size=(a, a)))
    w, _ = np.linalg.qr(rng.normal(size=(b, a)))
    matrix = u @ np.diag(0.5 ** np.arange(a)) @ w.T
    v = torch.from_numpy(matrix.ravel())
    start = low_rank.initial_powersgd_start([(a, b)], rank, key_of(2), v.dtype)
    q = start.numpy().reshape(b, rank)
    for _ in range(20):
        code, start = low_rank.encode_powersgd(v, [(a, b)], rank, start, key_of(2))
        p = matrix @ q
        for column in range(rank):  # Gram-Schmidt
            for other in range(column):
                p[:, column] -= p[:, other] @ p[:, column] * p[:, other]
            p[:, column] /= np.linalg.norm(p[:, column])
        q = matrix.T @ p
        assert np.allclose(code["left"].numpy().reshape(a, rank), p, atol=1e-9)
        assert np.allclose(code["right"].numpy().reshape(b, rank), q, atol=1e-9)
        assert torch.equal(start, code["right"])
    error = (low_rank.decode_powersgd(code, [(a, b)], rank, v.dtype) - v).norm().item()
    assert error == pytest.approx(np.sqrt((0.25 ** np.arange(rank, a)).sum()), rel=1e-6)


def test_powersgd_sends_uncompressed_what_would_not_shrink_twofold():
    for shape, compressed in [((8, 8), True), ((7, 8), False), ((1, 100), False), ((100,), False), ((0, 3), False)]:
        size = math.prod(shape)
        v = vector(size)
        code, start = low_rank.encode_powersgd(v, [shape], 2, None, key_of(0))
        assert len(start) == (16 if compressed else 0)
        assert code_bytes(code) == 4 * (2 * sum(shape) if compressed else size)
        if not compressed:
            assert torch.equal(low_rank.decode_powersgd(code, [shape], 2, v.dtype), v)


def test_powersgd_recovers_after_zeros_and_values_that_are_not_finite():
    shapes = [(20, 30)]
    rng = np.random.default_rng(0)
    v = torch.from_numpy((rng.normal(size=(20, 1)) @ rng.normal(size=(1, 30))).ravel())
    _, usual = low_rank.encode_powersgd(v, shapes, 1, None, key_of(0))
    for bad in (0.0, math.nan, math.inf, 1e308):
        _, start = low_rank.encode_powersgd(torch.full_like(v, bad), shapes, 1, usual, key_of(0))
        assert start.isfinite().all()
        code, _ = low_rank.encode_powersgd(v, shapes, 1, start, key_of(0))
        assert torch.allclose(low_rank.decode_powersgd(code, shapes, 1, v.dtype), v)


def test_powersgd_does_not_overflow_over_rounds():
    shapes, v, start = [(20, 30)], vector(600), None
    plain = None
    for _ in range(3):
        code, start = low_rank.encode_powersgd(v * 2.0**80, shapes, 2, start, key_of(0))
        expected, plain = low_rank.encode_powersgd(v, shapes, 2, plain, key_of(0))
        decoded = low_rank.decode_powersgd(code, shapes, 2, v.dtype) / 2.0**80
        assert torch.allclose(decoded, low_rank.decode_powersgd(expected, shapes, 2, v.dtype), rtol=1e-3, atol=1e-4)


def test_powersgd_names_sizes_that_do_not_fit():
    for v, start in ((vector(7), None), (vector(600), torch.zeros(3))):
        with pytest.raises(UnskewError, match="powersgd must have"):
            low_rank.encode_powersgd(v, [(20, 30)], 1, start, key_of(0))


# --- limits and determinism --------------------------------------------------------------------------------------------


def test_the_finest_setting_is_almost_no_compression():
    for n in (1, 7, 1001):
        v = vector(n)
        assert torch.equal(sparse.decode_topk(sparse.encode_topk(v, 1.0), n, v.dtype), v)
        assert torch.equal(sparse.decode_randk(sparse.encode_randk(v, 1.0, key_of(0)), n, v.dtype), v)
        s = 2**23 - 1
        fine = quantized.decode_qsgd(quantized.encode_qsgd(v, s, n, key_of(0)), s, n, n, v.dtype)
        assert torch.allclose(fine, v, rtol=1e-6, atol=float(v.norm()) * 2**-22)
        alone = quantized.decode_sign(quantized.encode_sign(v, [1] * n), [1] * n, v.dtype)
        assert torch.equal(alone, v)
        alone = quantized.decode_int8(quantized.encode_int8(v, 1), 1, n, v.dtype)
        assert torch.allclose(alone, v, rtol=1e-6, atol=0)
    v = vector(20 * 30)
    code, _ = low_rank.encode_powersgd(v, [(20, 30)], 20, None, key_of(0))
    assert torch.equal(low_rank.decode_powersgd(code, [(20, 30)], 20, v.dtype), v)


def test_random_codes_depend_on_the_key_only():
    for name in ("randk", "qsgd", "powersgd"):
        first, again, other = (codecs(1037, torch.float32, key_of(seed))[name][0](vector(1037)) for seed in (1, 1, 2))
        assert all(torch.equal(first[part], again[part]) for part in first)
        assert any(not torch.equal(first[part], other[part]) for part in first)
    v = vector(1001)
    shaped = sparse.encode_randk(v, 0.1, key_of(1).reshape(1))
    assert torch.equal(shaped["seed"], key_of(1).reshape(1))
    assert torch.equal(shaped["values"], sparse.encode_randk(v, 0.1, key_of(1))["values"])


@pytest.mark.parametrize("name", NAMES)
def test_vectors_with_a_stride(name):
    wide = vector(2 * 1037)
    encode, decode, _ = codecs(1037, wide.dtype)[name]
    assert torch.equal(decode(encode(wide[::2])), decode(encode(wide[::2].clone())))


# --- hostile codes -----------------------------------------------------------------------------------------------------


def damaged(code):
    """Codes with a tensor too few or too many, of another type, size or number of axes, or no tensor at all."""
    yield {}
    yield {**code, "extra": torch.zeros(1)}
    yield {**code, 3: torch.zeros(1)}
    for name, tensor in code.items():
        rest = {n: t for n, t in code.items() if n != name}
        yield rest
        yield {**rest, name + "x": tensor}
        yield {**code, name: None}
        yield {**code, name: tensor.tolist()}
        yield {**code, name: tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.int32)}
        yield {**code, name: tensor.to(torch.bool)}
        yield {**code, name: tensor.reshape(1, -1)}
        yield {**code, name: torch.cat([tensor, tensor.new_zeros(1)])}
        yield {**code, name: tensor.new_zeros(())}
        if len(tensor):
            yield {**code, name: tensor[:-1]}
            yield {**code, name: tensor[:0]}
        yield {**code, name: tensor.new_zeros(()).expand(10**15)}  # would be huge if it were copied


@pytest.mark.parametrize("name", NAMES)
def test_damaged_codes_are_rejected(name):
    for n in (1, 7, 1037):
        for dtype in FLOATS:
            encode, decode, _ = codecs(n, dtype)[name]
            code = encode(vector(n, dtype))
            other = torch.float64 if dtype == torch.float32 else torch.float32
            for number, bad in enumerate([*damaged(code), codecs(n, other)[name][0](vector(n, other))]):
                if name in ("fp16", "bf16") and number == len(list(damaged(code))):
                    continue  # the same code for both types
                if name == "randk" and len(bad.keys() ^ code.keys()) == 0 and valid_count(bad, code, n):
                    continue  # any number of values from 1 to n is a code
                with pytest.raises(UnskewError) as raised:
                    decode(bad)
                assert str(raised.value).endswith(".")
            decode(code)


def valid_count(bad, code, n):
    values = bad["values"]
    same = all(bad[k] is code[k] for k in code if k != "values")
    return (
        same
        and isinstance(values, torch.Tensor)
        and values.dim() == 1
        and 1 <= len(values) <= n
        and (values.dtype == code["values"].dtype)
    )


def test_hostile_topk_codes_are_rejected():
    n = 127
    by_index, dense = sparse.encode_topk(vector(n), 0.03), sparse.encode_topk(vector(n), 0.5)
    assert sparse.decode_topk(by_index, n, torch.float32).count_nonzero() == len(by_index["indices"]) == 4
    i32 = torch.int32
    bad = [{**by_index, "indices": torch.tensor(i, dtype=i32)} for i in hostile_indices(n)]
    bad += [
        {**code, "count": torch.tensor([c], dtype=i32)} for code in (by_index, dense) for c in (0, -1, n + 1, 2**31 - 1)
    ]
    bad += [{**code, "count": code["count"] + step} for code in (by_index, dense) for step in (-1, 1)]
    bitmap = dense["bitmap"]
    assert n % 8 == 7
    bad += [{**dense, "bitmap": torch.zeros_like(bitmap)}, {**dense, "bitmap": torch.full_like(bitmap, 255)}]
    beyond = bitmap.clone()
    beyond[-1] |= 1
    one_more = bitmap.clone()
    one_more[one_more.argmin()] |= 128 >> [bool(int(one_more.min()) & (128 >> b)) for b in range(8)].index(False)
    moved = beyond.clone()  # the right number of ones, but one of them beyond the end
    moved[0] &= moved[0] - 1
    bad += [{**dense, "bitmap": b} for b in (beyond, one_more, moved)]
    # The form that the number of entries does not call for.
    both = {**dense, "indices": torch.arange(int(dense["count"]), dtype=i32)}
    bad += [both, {n: t for n, t in both.items() if n != "bitmap"}]
    for code in bad:
        with pytest.raises(UnskewError, match="topk"):
            sparse.decode_topk(code, n, torch.float32)


def hostile_indices(n):
    return [[0, 1, 2, n], [-1, 0, 1, 2], [0, 1, 1, 2], [0, 2, 1, 3], [5, 5, 5, 5], [-(2**31), 0, 1, 2**31 - 1]]


def test_hostile_quantized_codes_are_rejected():
    v = vector(21)
    code = quantized.encode_qsgd(v, 5, 8, key_of(0))  # 4 bits; levels up to 10 are valid, 11 to 15 are not
    for level in range(11, 16):
        levels = code["levels"].clone()
        levels[3] = level
        with pytest.raises(UnskewError, match="between -5 and 5"):
            quantized.decode_qsgd({**code, "levels": levels}, 5, 8, 21, v.dtype)
    levels = code["levels"].clone()
    levels[-1] |= 1
    with pytest.raises(UnskewError, match="beyond"):
        quantized.decode_qsgd({**code, "levels": levels}, 5, 8, 21, v.dtype)
    with pytest.raises(UnskewError, match="negative"):
        quantized.decode_qsgd({**code, "norms": -code["norms"]}, 5, 8, 21, v.dtype)

    code = quantized.encode_sign(v, [9, 12])
    for byte, bit in ((1, 1), (1, 64), (3, 1), (3, 8)):
        signs = code["signs"].clone()
        signs[byte] |= bit
        with pytest.raises(UnskewError, match="beyond"):
            quantized.decode_sign({**code, "signs": signs}, [9, 12], v.dtype)
    with pytest.raises(UnskewError, match="negative"):
        quantized.decode_sign({**code, "scales": -code["scales"]}, [9, 12], v.dtype)

    code = quantized.encode_int8(v, 8)
    with pytest.raises(UnskewError, match="-127"):
        quantized.decode_int8({**code, "values": torch.full_like(code["values"], -128)}, 8, 21, v.dtype)
    with pytest.raises(UnskewError, match="negative"):
        quantized.decode_int8({**code, "scales": -code["scales"]}, 8, 21, v.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_are_decoded_or_rejected(name):
    """No bytes raise anything other than ``UnskewError``."""
    rng = np.random.default_rng(0)
    for n in (1, 7, 103):
        encode, decode, _ = codecs(n, torch.float32)[name]
        code = encode(vector(n))
        for _ in range(40):
            noise = {
                part: torch.frombuffer(bytearray(rng.bytes(t.nbytes)), dtype=t.dtype) if t.nbytes else t
                for part, t in code.items()
            }
            chosen = {part: noise[part] if rng.random() < 0.6 else t for part, t in code.items()}
            with contextlib.suppress(UnskewError):
                assert decode(chosen).shape == (n,)


@pytest.mark.parametrize("name", NAMES)
def test_codes_consist_of_types_that_messages_support(name):
    from unskew.deployment.wire.tensor_codec import decode_tensor, encode_tensor

    for n in (1, 103):
        encode, decode, _ = codecs(n, torch.float32)[name]
        code = encode(vector(n))
        received = {part: decode_tensor(encode_tensor(t)) for part, t in code.items()}
        assert torch.equal(decode(received), decode(code))
