"""The native linears against plain torch in float64, on every instruction set of this machine."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from tests.model.kernels.native import BEST, ISAS, every_isa, kernels
from tokenmill.model.kernels import reference
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import Gate, WeightRole
from tokenmill.model.kernels.stored_tensors import floats
from tokenmill.model.quantization.packed import PackedFormat, QuantizedRows

# What stands for 0 in formats of few bits without offsets.
ZEROS = {PackedFormat.INT4: 8, PackedFormat.INT5: 16}
FIVES = (PackedFormat.INT5, PackedFormat.INT5_OFFSET)
INTEGERS = [PackedFormat.INT8, PackedFormat.INT4, PackedFormat.INT4_OFFSET, *FIVES]
# What floats are made to; see test_native_rotated.py for one of them, and test_native_mxfp4.py and
# test_native_blocks.py for what is taken as it is stored.
every_format = pytest.mark.parametrize("format", [PackedFormat.BF16, PackedFormat.INT8_ROTATED, *INTEGERS])
every_integer_format, every_small_format = (
    pytest.mark.parametrize("format", some) for some in (INTEGERS, INTEGERS[1:])
)
EPSILON = {torch.float32: 2**-22, torch.bfloat16: 2**-8}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def packed(
    isa: str, weight: torch.Tensor, threads: int = 1, role=WeightRole.LINEAR, format=PackedFormat.BF16
) -> PackedWeight:
    matrix = PackedWeight(kernels(isa, threads), tuple(weight.shape), role, format)
    matrix.load_rows(0, weight)
    return matrix


def quantized(weight: torch.Tensor, format: PackedFormat, importance: torch.Tensor | None = None) -> QuantizedRows:
    if format is PackedFormat.INT8:
        return reference.quantize_int8(weight, importance)
    quantize = reference.quantize_int5 if format in FIVES else reference.quantize_int4
    return quantize(weight, format not in ZEROS, importance)


def assert_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """Within rounding of the sums, whose size is that of their terms, and of the result."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    slack = 2**-20 * terms + EPSILON[found.dtype] * expected.abs() + 1e-30
    assert (found.double() - expected).abs().le(slack).all()


@every_isa
def test_products_of_odd_sizes(isa, rng):
    for rows in (1, 2, 5, 6, 7, 8, 9, 12, 13, 31, 70, 250):
        out_size, in_size = int(rng.integers(1, 140)), int(rng.integers(1, 300))
        x, weight, bias = drawn(rows, in_size), drawn(out_size, in_size), drawn(out_size)
        matrix = packed(isa, weight, threads=1 + rows % 2)
        assert_product(matrix.multiply(x, bias), x, weight, bias)
        assert_product(matrix.logits(x), x, weight)


@every_isa
def test_rows_with_gaps_and_a_bias_of_another_dtype(isa, rng):
    wide = drawn(9, 150)
    weight, bias = drawn(33, 70), torch.randn(33)
    for x in (wide[:, 3:73], wide[::2, :70], wide.T[:70, :9].T):
        assert_product(packed(isa, weight).multiply(x, bias), x, weight, bias.bfloat16())


@every_isa
def test_a_matrix_is_filled_in_parts_from_any_dtype(isa, rng):
    weight = torch.randn(75, 37)
    matrix = PackedWeight(kernels(isa, 2), (75, 37))
    for start, end, dtype in ((40, 75, torch.float16), (0, 17, torch.bfloat16), (17, 40, torch.float32)):
        matrix.load_rows(start, weight[start:end].to(dtype))
    expected = torch.cat([weight[:40].bfloat16(), weight[40:].half().bfloat16()])
    assert torch.equal(matrix.lookup(torch.arange(75)), expected)


def test_halves_of_every_kind_are_read(rng):
    # Subnormals, infinities and both zeros among them; a NaN keeps being one.
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(64, 1024)
    for isa in BEST:
        read = packed(isa, halves).lookup(torch.arange(64))
        assert torch.equal(read.nan_to_num(7.0), halves.bfloat16().nan_to_num(7.0))


@every_isa
def test_the_gated_product_is_that_of_its_halves(isa, rng):
    for rows in (1, 3, 8, 11, 40):
        half, in_size = int(rng.integers(1, 90)), int(rng.integers(1, 200))
        x, weight, bias = drawn(rows, in_size), drawn(2 * half, in_size) / in_size**0.5, drawn(2 * half)
        matrix = PackedWeight(kernels(isa, 2), (2 * half, in_size), WeightRole.GATE_UP)
        matrix.load_rows(half, weight[half:])
        matrix.load_rows(0, weight[:half])
        sums = x.float() @ weight.float().T + bias.float()
        opened = {Gate.SILU: functional.silu, Gate.GELU: partial(functional.gelu, approximate="tanh")}
        for gate, function in opened.items():
            expected = function(sums[:, :half]) * sums[:, half:]
            torch.testing.assert_close(matrix.gated(x, bias, gate).float(), expected, rtol=2**-7, atol=2e-4)


@every_isa
def test_the_gate_saturates_like_silu(isa):
    weight = torch.eye(32, dtype=torch.bfloat16)
    gates = torch.tensor([-200.0, -90, -88, -30, -1e-3, 0, 1e-3, 30, 88, 90, 200, 3e38, torch.inf, torch.nan, -3e38, 1])
    x = torch.cat([gates, torch.ones(16)]).bfloat16()[None]
    x[:, :16] = gates.nan_to_num(0, 0, 0).bfloat16()
    found = packed(isa, weight, role=WeightRole.GATE_UP).gated(x)
    torch.testing.assert_close(found.float(), functional.silu(x[:, :16].float()), rtol=2**-7, atol=1e-37)
    broken = torch.full((1, 32), torch.nan).bfloat16()
    assert packed(isa, weight, role=WeightRole.GATE_UP).gated(broken).isnan().all()


@every_isa
@every_format
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_threads(isa, format, rng):
    out_size, in_size = int(rng.integers(40, 200)), int(rng.integers(100, 400))
    x, weight, bias = drawn(512, in_size), drawn(out_size, in_size), drawn(out_size)
    alone = packed(isa, weight, format=format)
    expected = torch.cat([alone.logits(row[None]) for row in x])
    for threads in (1, 2, 3):
        matrix = packed(isa, weight, threads, format=format)
        for rows in (2, 4, 6, 7, 8, 9, 12, 16, 17, 32, 33, 100, 300, 512):
            start = int(rng.integers(0, 513 - rows))
            assert torch.equal(matrix.logits(x[start : start + rows]), expected[start : start + rows])
        assert torch.equal(matrix.multiply(x[:7], bias)[3:4], alone.multiply(x[3:4], bias))


@every_isa
@every_format
def test_a_row_of_a_verify_step_has_the_bits_of_a_decode(isa, format, rng):
    """One to twenty rows, all ways to use a matrix; depths that end in the middle of a K block, or of a pair."""
    for in_size in (int(rng.integers(1, 64)), 256, int(rng.integers(257, 900))):
        half, rows = int(rng.integers(1, 60)), int(rng.integers(1, 21))
        weight, x = drawn(2 * half, in_size), drawn(rows, in_size)
        plain = packed(isa, weight, int(rng.integers(1, 4)), format=format)
        gated = packed(isa, weight, int(rng.integers(1, 4)), WeightRole.GATE_UP, format)
        for call in (plain.multiply, plain.logits, plain.argmax, gated.gated):
            assert torch.equal(call(x), torch.cat([call(row[None]) for row in x])), (call, rows, in_size)


@every_isa
@every_format
def test_rows_that_the_cache_does_not_hold_at_once_have_the_same_bits(isa, format, rng):
    x, weight = drawn(600, 3072), drawn(int(rng.integers(20, 100)), 3072)
    matrix = packed(isa, weight, threads=2, format=format)
    some = rng.integers(0, 600, 12).tolist()
    assert torch.equal(matrix.logits(x)[some], torch.cat([matrix.logits(x[row : row + 1]) for row in some]))


@pytest.mark.parametrize("format", [PackedFormat.INT8_ROTATED, *INTEGERS])
def test_integers_have_the_same_bits_on_every_level(format, rng):
    """A level may leave few rows to another one's kernels."""
    for in_size in (64, 190, 640):
        x, weight = drawn(90, in_size), drawn(70, in_size)
        first, *others = (packed(isa, weight, format=format).logits(x) for isa in ISAS)
        assert all(torch.equal(found, first) for found in others)


@every_isa
def test_argmax_is_that_of_the_logits(isa, rng):
    x, weight = drawn(23, 65), drawn(1000, 65)
    for threads in (1, 2):
        matrix = packed(isa, weight, threads=threads)
        for rows in (1, 7, 23):
            assert torch.equal(matrix.argmax(x[:rows]), matrix.logits(x[:rows]).argmax(-1))


@every_isa
def test_argmax_takes_the_lowest_of_equals_and_none_that_is_no_number(isa, rng):
    weight = drawn(150, 33)
    weight[100] = weight[37] = 10 * weight[140]
    x = torch.cat([weight[100:101], torch.zeros(1, 33).bfloat16(), -weight[37:38]])
    matrix = packed(isa, weight, threads=2)
    assert matrix.argmax(x)[:2].tolist() == [37, 0]
    weight[120, 3] = weight[49, 3] = torch.nan
    assert packed(isa, weight, threads=2).argmax(x).tolist() == [-1, -1, -1]
    for value in (torch.nan, torch.inf, -torch.inf):
        assert matrix.argmax(torch.full((1, 33), value).bfloat16()).tolist() == [-1]


@every_isa
@every_format
def test_nothing_beside_a_row_is_read_into_it(isa, format, rng):
    """Put poison before, between and behind the rows of x."""
    for in_size in (1, 33, 64, 97):
        weight, x = drawn(50, in_size), drawn(11, in_size)
        poisoned = torch.full((13, in_size + 9), torch.nan).bfloat16()
        poisoned[1:12, 4 : 4 + in_size] = x
        matrix = packed(isa, weight, format=format)
        assert torch.equal(matrix.logits(poisoned[1:12, 4 : 4 + in_size]), matrix.logits(x))


@every_isa
def test_a_bad_number_stays_in_its_row_and_column(isa, rng):
    x, weight = drawn(9, 40), drawn(35, 40)
    x[4, 7], weight[20, 11] = torch.nan, torch.inf
    found = packed(isa, weight).logits(x)
    clean = torch.ones(9, 35, dtype=torch.bool)
    clean[4], clean[:, 20] = False, False
    assert found.isfinite().eq(clean).all()
    assert found[4].isnan().all()


@every_isa
@every_integer_format
def test_weights_are_rounded_as_the_reference_says(isa, format, rng):
    for in_size in (1, 31, 64, 200):
        weight = torch.randn(37, in_size) * torch.rand(37, 1) * 10 ** float(rng.integers(-3, 2))
        weight[5] = 0
        expected = floats(quantized(weight, format))[:, :in_size].bfloat16()
        for source in (weight, weight.bfloat16()):
            found = packed(isa, source, format=format).lookup(torch.arange(37))
            assert torch.equal(found, floats(quantized(source, format))[:, :in_size].bfloat16())
        assert torch.equal(packed(isa, weight, format=format).lookup(torch.tensor([5, 36])), expected[[5, 36]])


def test_integers_of_a_weight_are_close_to_it(rng):
    weight = torch.randn(64, 512)
    bounds = {
        PackedFormat.INT8: 0.01,
        **dict.fromkeys(FIVES, 0.05),
        PackedFormat.INT4_OFFSET: 0.09,
        PackedFormat.INT4: 0.1,
    }
    for format, most in bounds.items():
        found = packed(BEST[0], weight, format=format).lookup(torch.arange(64))
        assert (found - weight).norm() / weight.norm() < most


@every_integer_format
def test_the_scale_that_is_searched_for_loses_less_than_the_one_that_just_holds_all_numbers(format, rng):
    """Of weights with the long tails that trained ones have; the plain ways are those of Q4_0 and Q4_1."""
    weight = torch.distributions.StudentT(5.0).sample((64, 512))
    groups = weight.view(64, -1, 32)
    if half := ZEROS.get(format):
        scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -half
        plain = (groups / scales).round().clamp(-half, half - 1) * scales
    elif format is PackedFormat.INT8:
        plain = (groups / (scales := groups.abs().amax(-1, keepdim=True) / 127)).round() * scales
    else:
        low = groups.amin(-1, keepdim=True)
        scales = (groups.amax(-1, keepdim=True) - low) / (31 if format in FIVES else 15)
        plain = ((groups - low) / scales).round() * scales + low
    found = floats(quantized(weight, format))
    most = 0.95 if format is PackedFormat.INT4_OFFSET else 0.99
    assert (found - weight).norm() < most * (plain.flatten(1) - weight).norm()


@every_isa
@every_small_format
def test_weights_that_lie_on_the_grid_of_a_group_are_kept(isa, format, rng):
    top = 31 if format in FIVES else 15
    values = torch.randint(0, top + 1, (40, 8, 32))
    values[..., :2] = torch.tensor([0, top])  # a group that uses its whole range
    scales = (torch.rand(40, 8, 1) + 0.125).half().float()
    offsets = -ZEROS[format] * scales if format in ZEROS else (torch.randn(40, 8, 1) - 8 * scales).half().float()
    weight = (values * scales + offsets).flatten(1)
    assert torch.equal(packed(isa, weight, format=format).lookup(torch.arange(40)), weight.bfloat16())


@every_isa
@every_integer_format
def test_integer_products_are_those_of_the_reference(isa, format, rng):
    for rows in (1, 2, 5, 7, 8, 13, 25, 60):
        out_size, in_size = int(rng.integers(1, 140)), int(rng.integers(1, 600))
        x, weight, bias = drawn(rows, in_size), torch.randn(out_size, in_size), drawn(out_size)
        expected = reference.multiply(x, quantized(weight, format))
        matrix = packed(isa, weight, 1 + rows % 2, format=format)
        torch.testing.assert_close(matrix.logits(x), expected, rtol=2e-6, atol=1e-5 * in_size**0.5)
        wanted = expected + bias
        torch.testing.assert_close(matrix.multiply(x, bias).float(), wanted, rtol=2**-7, atol=1e-5 * in_size**0.5)


@every_isa
@every_integer_format
def test_an_outlier_among_the_inputs_costs_those_beyond_its_group_nothing(isa, format, rng):
    """With one scale a token, inputs a hundred times smaller than the largest would be rounded to nearly nothing."""
    x, weight = drawn(9, 512), torch.randn(40, 512)
    x[:, 70], weight[:, 64:96] = 300.0, 0
    wanted = x.float() @ floats(quantized(weight, format)).T
    found = packed(isa, weight, format=format).logits(x)
    assert (found - wanted).norm() / wanted.norm() < 0.01


@every_isa
@every_integer_format
def test_a_large_weight_costs_those_beyond_its_group_nothing(isa, format, rng):
    weight = torch.randn(40, 256)
    weight[:, 70] = 300.0
    found = packed(isa, weight, format=format).lookup(torch.arange(40)).float()
    rest = torch.cat([torch.arange(64), torch.arange(96, 256)])
    error = (found - weight)[:, rest].norm() / weight[:, rest].norm()
    assert error < {PackedFormat.INT8: 0.01, **dict.fromkeys(FIVES, 0.06)}.get(format, 0.12)


@every_isa
@every_integer_format
def test_the_largest_integers_do_not_overflow(isa, format):
    for sign in (1, -1):
        x, weight = torch.full((3, 4096), 1.0).bfloat16(), torch.full((17, 4096), sign * 1.0)
        weight[:, ::2] *= {PackedFormat.INT8: 126 / 127, PackedFormat.INT5: 15 / 16}.get(format, 7 / 8)
        expected = reference.multiply(x, quantized(weight, format))
        torch.testing.assert_close(packed(isa, weight, format=format).logits(x), expected, rtol=1e-5, atol=0)


@every_isa
@every_integer_format
def test_integers_of_a_checkpoint_are_taken_as_they_are(isa, format, rng):
    for group_size in (32, 64, 128, 256):
        groups = 256 // group_size
        scales = (torch.rand(40, groups) + 0.125).half().float().numpy()
        if format is PackedFormat.INT8:
            rows = QuantizedRows(8, torch.randint(-128, 128, (40, 256), dtype=torch.int8).numpy(), scales)
        else:
            offsets = -ZEROS[format] * scales if format in ZEROS else torch.randn(40, groups).half().float().numpy()
            bits = 5 if format in FIVES else 4
            values = torch.randint(0, 1 << bits, (40, 256), dtype=torch.uint8).numpy()
            rows = QuantizedRows(bits, values, scales, offsets)
        matrix = PackedWeight(kernels(isa, 2), (40, 256), format=format)
        for start, end in ((17, 40), (0, 17)):
            part = None if rows.offsets is None else rows.offsets[start:end]
            matrix.load_rows(start, QuantizedRows(rows.bits, rows.values[start:end], rows.scales[start:end], part))
        assert torch.equal(matrix.lookup(torch.arange(40)), floats(rows).bfloat16())
        x = drawn(9, 256)
        torch.testing.assert_close(matrix.logits(x), reference.multiply(x, rows), rtol=1e-5, atol=1e-3)


@every_format
def test_integers_in_a_form_that_the_matrix_does_not_have_are_rounded_anew(format, rng):
    values = torch.randint(0, 16, (20, 64), dtype=torch.uint8).numpy()
    rows = QuantizedRows(4, values, (torch.rand(20, 4) + 0.1).numpy(), torch.randn(20, 4).numpy())
    matrix = PackedWeight(kernels(BEST[0]), (20, 64), format=format)
    matrix.load_rows(0, rows)
    found, wanted = matrix.lookup(torch.arange(20)).float(), floats(rows)
    assert (found - wanted).norm() / wanted.norm() < 0.15


@every_isa
@every_integer_format
def test_a_row_with_a_bad_number_is_not_a_number_and_alone(isa, format, rng):
    for bad in (torch.nan, torch.inf, -torch.inf):
        x, weight = drawn(9, 70), torch.randn(35, 70)
        x[4, 69], weight[20, 11] = bad, bad
        found = packed(isa, weight, format=format).logits(x)
        clean = torch.ones(9, 35, dtype=torch.bool)
        clean[4], clean[:, 20] = False, False
        assert found.isnan().eq(~clean).all()


@every_isa
@every_integer_format
def test_gated_integers_and_their_argmax(isa, format, rng):
    x, weight = drawn(9, 100), torch.randn(90, 100) / 10
    sums = reference.multiply(x, quantized(weight, format))
    gated = packed(isa, weight, 2, WeightRole.GATE_UP, format).gated(x)
    expected = functional.silu(sums[:, :45]) * sums[:, 45:]
    torch.testing.assert_close(gated.float(), expected, rtol=2**-7, atol=1e-4)
    matrix = packed(isa, weight, 2, format=format)
    assert torch.equal(matrix.argmax(x), matrix.logits(x).argmax(-1))


@every_format
def test_no_rows_give_no_results(format):
    matrix, none = packed(BEST[0], drawn(20, 8), format=format), drawn(0, 8)
    assert matrix.multiply(none).shape == (0, 20)
    assert matrix.argmax(none).shape == (0,)
    assert matrix.lookup(torch.zeros(0, dtype=torch.int64)).shape == (0, 8)


def test_what_does_not_fit_is_refused():
    matrix = PackedWeight(kernels(BEST[0]), (20, 8))
    for start, rows in ((-1, drawn(3, 8)), (18, drawn(3, 8)), (0, drawn(3, 7))):
        with pytest.raises(ValueError, match="do not fit"):
            matrix.load_rows(start, rows)
    for x in (drawn(2, 7), torch.zeros(2, 8)):
        with pytest.raises(ValueError, match="takes bfloat16 rows"):
            matrix.multiply(x)
    with pytest.raises(ValueError, match="no such matrix"):
        PackedWeight(kernels(BEST[0]), (3, 8), WeightRole.GATE_UP)
    with pytest.raises(ValueError, match="has no kernels for 'mmx'"):
        kernels("mmx")
