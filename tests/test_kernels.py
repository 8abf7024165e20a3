"""The Triton kernels against `SmallFloat` on the CPU, bit for bit; on a GPU, or in Triton's interpreter.

Skipped where Triton is not installed: it comes with torch's builds for GPUs.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton's own functions read it too, when they are imported
pytest.importorskip("triton")

from lowcomm.codecs import _kernels as kernels
from lowcomm.codecs.bits import BLOCK, Scratch, blocks
from lowcomm.codecs.small_float import PowerOfTwo, SmallFloat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [(3, 0), (2, 1), (2, 5), (3, 4), (4, 3), (5, 2)]
SIZES = [0, 1, 2, 3, 255, 256, 257, 511, 512, 1000, 5000]


def reference(x, exponent, mantissa):
    """As `SmallFloat.encode`, without refusing."""
    codec = SmallFloat(exponent, mantissa)
    packed = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    for values, scales, codes in blocks(x, packed, codec.bits):
        codec._encode(values, scales, codes, Scratch(x.device))
    return packed


def encoded(x, exponent, mantissa):
    return kernels.encode(x.to(DEVICE), exponent, mantissa).cpu()


def decoded(packed, numel, exponent, mantissa):
    return kernels.decode(packed.to(DEVICE), numel, exponent, mantissa).cpu()


def same_bytes_and_values(x, exponent, mantissa):
    packed = encoded(x, exponent, mantissa)
    values = decoded(packed, x.numel(), exponent, mantissa).view(torch.int32)
    for codec in [SmallFloat(exponent, mantissa)] + [PowerOfTwo(exponent)] * (mantissa == 0):
        assert torch.equal(packed, codec.encode(x))
        assert torch.equal(values, codec.decode(packed, x.numel()).view(torch.int32))


def neighbours(x, steps=3):
    """Every float of x > 0 with the `steps` floats before and after it."""
    around = torch.arange(-steps, steps + 1, dtype=torch.int32)
    return (x.view(torch.int32)[:, None] + around).view(-1).view(torch.float32)


def signed(x, generator):
    return x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
@pytest.mark.parametrize("spread", [0.5, 4, 38])
def test_magnitudes(exponent, mantissa, size, spread):
    """Decimal exponents spread evenly within blocks; some values zero, of either sign, and some blocks wholly zero."""
    generator = torch.Generator().manual_seed(size)
    x = signed(10 ** ((torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1) * spread), generator).float()
    x[torch.rand(size, generator=generator) < 0.05] = 0.0
    x[torch.rand(size, generator=generator) < 0.05] = -0.0
    x[512:768] = 0
    same_bytes_and_values(x, exponent, mantissa)


@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
@pytest.mark.parametrize("power", [-120, -90, 0, 100, 126])
def test_ties(exponent, mantissa, power):
    """Every code's value, every tie between two of them, and the floats next to these."""
    values = SmallFloat(exponent, mantissa).values[: 2 ** (exponent + mantissa)].double()
    x = torch.cat([values[1:], (values[1:] + values[:-1]) / 2])
    x = neighbours((x * 2.0**power).float().clamp(min=2.0**-120))
    blocks = []
    for chunk in x.split(BLOCK // 2 - 2):
        scaled = torch.cat([values[-1:].float() * 2.0**power, chunk, -chunk])
        blocks.append(torch.nn.functional.pad(scaled, (0, BLOCK - scaled.numel())))
    same_bytes_and_values(torch.cat(blocks), exponent, mantissa)


@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
@pytest.mark.parametrize("top", [-126, -124, -115, -100, -60, 0, 126])
def test_subnormals(exponent, mantissa, top):
    """Subnormals, the smallest normal floats and zeros next to a value of 2^top; then a block of these alone."""
    powers = torch.logspace(0, 23, 30, base=2).long()
    bits = torch.cat([torch.arange(64), (1 << 23) + torch.arange(-80, 80), powers, torch.tensor([71362])])
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([2.0**top]), x])
    same_bytes_and_values(torch.cat([x, -x[1:-1]])[: BLOCK + 100], exponent, mantissa)
    same_bytes_and_values(torch.cat([x[:BLOCK], -x[1:]]), exponent, mantissa)


@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
@pytest.mark.parametrize("rest", [0, 1, 2, 7])
def test_zeros(exponent, mantissa, rest):
    x = torch.zeros(2 * BLOCK + rest)
    x[BLOCK:] = -0.0
    same_bytes_and_values(x, exponent, mantissa)


@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
def test_largest_scales(exponent, mantissa):
    """Scales around 253, NaN and infinities: the same scale bytes, and the same codes in blocks that are accepted."""
    one = 1 << 23
    tie = one >> (mantissa + 1)
    finite = [253 * one, 254 * one - tie - 1, 254 * one - tie, 254 * one, 255 * one - tie - 1, 255 * one - 1]
    infinite_or_nan = [255 * one, 255 * one + 1, 255 * one + one // 2, 2**31 - 1]
    bits = torch.tensor(finite + infinite_or_nan, dtype=torch.int32)
    bits = torch.cat([bits, bits | -(2**31)])
    for rest in (0, 1, 3):
        x = torch.randn(bits.numel() * BLOCK + rest, generator=torch.Generator().manual_seed(0))
        x[5 : bits.numel() * BLOCK : BLOCK] = bits.view(torch.float32)
        if rest:
            x[-1] = torch.nan
        packed, want = encoded(x, exponent, mantissa), reference(x, exponent, mantissa)
        blocks = bits.numel() + (rest > 0)
        scales = want[:blocks]
        assert packed[:blocks].tolist() == scales.tolist()
        assert {253, 254, 255} <= set(scales.tolist())
        each = BLOCK * (1 + exponent + mantissa) // 8
        accepted = (scales[: bits.numel()] <= 253).repeat_interleave(each)
        codes = slice(blocks, blocks + bits.numel() * each)
        assert torch.equal(packed[codes][accepted], want[codes][accepted])


@pytest.mark.parametrize(("exponent", "mantissa"), FORMATS)
def test_every_code_decodes(exponent, mantissa):
    """All bytes, at every scale that the encoder gives."""
    codec = SmallFloat(exponent, mantissa)
    scales = torch.arange(codec.least_scale, 254).to(torch.uint8)
    numel = scales.numel() * BLOCK
    each = torch.arange(256) if codec.bits == 8 else torch.arange(256).view(2, 128)[torch.arange(scales.numel()) % 2]
    codes = each.expand(scales.numel(), -1).reshape(-1).to(torch.uint8)
    packed = torch.cat([scales, codes])
    got, want = decoded(packed, numel, exponent, mantissa), codec.decode(packed, numel)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize(("exponent", "mantissa"), [(2, 0), (2, 2), (5, 1)])
def test_other_widths_are_refused(exponent, mantissa):
    with pytest.raises(ValueError, match="pack 4 and 8"):
        kernels.encode(torch.zeros(3), exponent, mantissa)
    with pytest.raises(ValueError, match="pack 4 and 8"):
        kernels.decode(torch.zeros(9, dtype=torch.uint8), 3, exponent, mantissa)
