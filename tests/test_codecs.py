"""Codecs: every code, every size, nearest values, exact byte counts, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lowcomm.choices import options
from lowcomm.codecs import Codec, make_codec, message_seed
from lowcomm.codecs.bits import BLOCK, NotFinite
from lowcomm.codecs.small_float import PowerOfTwo, SmallFloat

CODECS = list(options(Codec))
SMALL_FLOATS = [n for n, codec in options(Codec).items() if issubclass(codec, SmallFloat)]
SIZES = (0, 1, 2, 7, 8, 255, 256, 257, 511, 1000, 256 * 256 + 3)


def _values(numel: int, seed: int = 0) -> torch.Tensor:
    """Return values of many magnitudes, with zeros and both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    return x * (torch.rand(numel, generator=generator) > 0.05)


def _codec(name: str, keep: float = 0.1) -> Codec:
    return make_codec(name, keep if options(Codec)[name].sparse else 1.0)


#: Those that encode shares at block boundaries one by one.
IN_BLOCKS = [n for n in CODECS if _codec(n).block]


def _zeros_are_neutral(codec: Codec) -> bool:
    """Tell whether zeros in a block leave the codes of its other values as they are: not where its scale is a mean."""
    half = _values(math.lcm(BLOCK, codec.block) // 2).clamp(-6e4, 6e4)
    twice, once = (torch.cat([half, other]) for other in (half, torch.zeros_like(half)))
    decoded = [codec.decode(codec.encode(x), x.numel())[: half.numel()] for x in (twice, once)]
    return torch.equal(*decoded)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_and_shapes_at_every_size(name: str, numel: int) -> None:
    codec, x = _codec(name), _values(numel).clamp(-6e4, 6e4)
    packed = codec.encode(x, seed=3)
    assert packed.dtype == torch.uint8
    assert packed.numel() == codec.nbytes(numel)
    back = codec.decode(packed, numel)
    assert back.shape == x.shape
    assert back.dtype == torch.float32
    assert torch.equal(back, x) or not codec.lossless
    assert torch.equal(back, codec.decode(codec.encode(x, seed=3), numel))


def test_codecs_of_one_name_encode_alike() -> None:
    """The members of a mean see by the name that they use one codec, settings included."""
    seen: dict[str, torch.Tensor] = {}
    x = _values(1000).clamp(-6e4, 6e4)
    for name, keep in itertools.product(CODECS, (0.1, 0.5, 1.0)):
        codec = _codec(name, keep)
        packed = codec.encode(x, seed=3)
        assert torch.equal(packed, seen.setdefault(codec.name, packed)), codec.name
    sparse = [n for n in CODECS if options(Codec)[n].sparse]
    assert {_codec(n, 0.1).name for n in sparse}.isdisjoint(_codec(n, 0.5).name for n in sparse)
    assert len({_codec(n, 0.1).name for n in CODECS}) == len(CODECS)


@pytest.mark.parametrize("name", CODECS)
def test_a_message_is_read_wherever_it_lies(name: str) -> None:
    """Of several sections in one message, the second may begin at any byte."""
    codec, x = _codec(name), _values(1000).clamp(-6e4, 6e4)
    packed = codec.encode(x)
    inside = torch.cat([packed.new_zeros(3), packed])[3:]
    assert torch.equal(codec.decode(inside, 1000), codec.decode(packed, 1000))


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_a_small_float_takes_the_nearest_of_its_values(name: str) -> None:
    """Against a search over all codes in float64; ties go away from zero."""
    codec = make_codec(name)
    assert isinstance(codec, SmallFloat)
    x = _values(8 * BLOCK)
    packed = codec.encode(x)
    back = codec.decode(packed, x.numel()).view(-1, BLOCK).double()
    for byte, block, got in zip(packed[:8].tolist(), x.view(-1, BLOCK).double(), back, strict=True):
        scale = 2.0 ** (byte - 127)
        ulp = 2.0**-codec.mantissa
        assert 1 - ulp / 4 <= block.abs().max() / scale < 2 - ulp / 2  # rounds to [1, 2) with this mantissa
        errors = (codec.values.double()[:, None] * scale - block).abs()
        assert torch.equal((got - block).abs(), errors.min(0).values)
        nearest = codec.values.double()[:, None].mul(scale).abs().where(errors == errors.min(0).values, 0)
        assert torch.equal(got.abs(), nearest.max(0).values)  # of two, the one further from zero


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_code_is_used_and_comes_back(name: str) -> None:
    codec = make_codec(name)
    assert isinstance(codec, SmallFloat)
    assert codec.values.numel() == 2**codec.bits
    x = codec.values.repeat(-(-BLOCK // codec.values.numel()))[:BLOCK] * 2.0**-9
    packed = codec.encode(x)
    assert torch.equal(codec.decode(packed, BLOCK), x)
    assert torch.equal(torch.signbit(codec.decode(packed, BLOCK)), torch.signbit(x))  # minus zero has a code too
    if codec.bits == 8:
        assert sorted(packed[1:].tolist()) == list(range(256))


def test_e3m0_is_two_codes_a_byte_and_a_byte_a_block() -> None:
    codec = make_codec("e3m0")
    assert codec.values[:8].tolist() == [0, 2**-6, 2**-5, 2**-4, 2**-3, 2**-2, 2**-1, 1]
    x = torch.zeros(BLOCK)
    x[0], x[1], x[2] = 4.0, 1.0, -0.125
    packed = codec.encode(x)
    assert packed.numel() == 1 + BLOCK // 2
    assert packed[:3].tolist() == [127 + 2, 5 << 4 | 7, 2 | 8]
    assert codec.nbytes(10**9) / 10**9 < 1.02 * 0.5


def test_e3m0_by_hand() -> None:
    """The largest decides the scale; half of the least value rounds up, less to zero, minus zero stays one."""
    x = torch.tensor([1.0, 0.76, 0.74, 0.375, -0.3, 2.0**-6, 0.5 * 2.0**-6, -0.49 * 2.0**-6])
    codec = make_codec("e3m0")
    back = codec.decode(codec.encode(x), 8)
    assert back.tolist() == [1.0, 1.0, 0.5, 0.5, -0.25, 2.0**-6, 2.0**-6, -0.0]
    assert torch.signbit(back[-1])
    up = torch.tensor([1.5, 0.75])  # nearer to 2 than to 1 by the rule for ties
    assert codec.decode(codec.encode(up), 2).tolist() == [2.0, 1.0]


def test_a_sign_is_a_bit_and_its_scale_the_best_there_is() -> None:
    codec, x = make_codec("sign"), torch.tensor([3.0, -1.0, 0.5, -0.5, 0.0])
    packed = codec.encode(x)
    assert packed[:4].view(torch.float32).tolist() == [1.0]
    assert packed[4:].tolist() == [0b01010]
    assert codec.decode(packed, 5).tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert codec.nbytes(BLOCK) == 4 + BLOCK // 8


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_shares_at_block_boundaries_are_encoded_alike(name: str) -> None:
    codec = _codec(name)
    block = math.lcm(BLOCK, codec.block)
    x, at = _values(5 * block + 17), 2 * block
    whole = codec.decode(codec.encode(x), x.numel())
    parts = [codec.decode(codec.encode(p), p.numel()) for p in (x[:at], x[at:])]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", [n for n in IN_BLOCKS if _zeros_are_neutral(_codec(n))])
@pytest.mark.parametrize("numel", [n for n in SIZES if n])
def test_a_short_last_block_is_one_filled_up_with_zeros(name: str, numel: int) -> None:
    codec, x = _codec(name), _values(numel).clamp(-6e4, 6e4)
    filled = torch.nn.functional.pad(x, (0, -numel % math.lcm(BLOCK, codec.block)))
    assert torch.equal(codec.decode(codec.encode(x), numel), codec.decode(codec.encode(filled), filled.numel())[:numel])


@pytest.mark.parametrize("name", IN_BLOCKS)
@pytest.mark.parametrize("part", [1, 2, 4, 32, 128])
def test_a_short_last_block_is_one_filled_up_with_copies_of_itself(name: str, part: int) -> None:
    """Whatever its scale is of it, the largest magnitude or a mean. Of whole numbers, whose sums are exact."""
    codec = _codec(name)
    block = math.lcm(BLOCK, codec.block)
    x = torch.randint(-20, 21, (block + part,), generator=torch.Generator().manual_seed(part)).float()
    filled = torch.cat([x[:block], x[block:].repeat(block // part)])
    short, whole = (codec.decode(codec.encode(values), values.numel()) for values in (x, filled))
    assert torch.equal(short, whole[: x.numel()])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_name(name: str, bad: float) -> None:
    x = torch.zeros(600)
    x[599] = bad
    with pytest.raises(ValueError, match=f"value 599 of 600 is {bad}"):
        _codec(name).encode(x)


def test_a_value_too_large_for_the_codec_is_refused() -> None:
    with pytest.raises(NotFinite, match=r"values up to 70000 do not fit torch.float16 \(largest 65504\)"):
        make_codec("fp16").encode(torch.tensor([1.0, -70000.0]))
    with pytest.raises(NotFinite, match="are too large to scale"):
        make_codec("e3m0").encode(torch.tensor([3e38]))
    with pytest.raises(NotFinite, match="are too large to scale"):
        make_codec("dare", 0.25).encode(torch.full((64,), 1e38))


def test_zeros_and_the_least_floats_survive() -> None:
    for name in SMALL_FLOATS:
        codec = make_codec(name)
        assert codec.decode(codec.encode(torch.zeros(300)), 300).abs().max() == 0
        tiny = torch.full((300,), 1e-40)
        assert codec.decode(codec.encode(tiny), 300).abs().max() <= 2.0**-126


@pytest.mark.parametrize("exponent", [2, 3, 4, 5])
def test_floats_without_mantissa_are_the_general_ones(exponent: int) -> None:
    general, quick = SmallFloat(exponent, 0), make_codec(f"e{exponent}m0")
    assert type(quick) is PowerOfTwo
    generator = torch.Generator().manual_seed(exponent)
    powers = 2.0 ** torch.randint(-149, 127, (20_000,), generator=generator)
    ties = powers * torch.tensor([1.0, 1.5, -1.5, 1.25]).repeat(5000)  # halfway between codes, and beside
    nearly = ties.view(torch.int32) + torch.randint(-1, 2, ties.shape, generator=generator, dtype=torch.int32)
    for x in (ties, nearly.view(torch.float32), torch.randn(70_001, generator=generator), torch.zeros(300)):
        for part in (x, x[:1000].sort().values):
            part = part.nan_to_num(0.0, 0.0, 0.0).clamp(-(2.0**126), 2.0**126)
            packed = general.encode(part)
            assert torch.equal(quick.encode(part), packed)
            values = quick.decode(packed, part.numel())
            assert torch.equal(values.view(torch.int32), general.decode(packed, part.numel()).view(torch.int32))


def test_every_value_is_zero_or_a_normal_float() -> None:
    """So that devices which flush subnormal floats to zero decode the same."""
    for name in SMALL_FLOATS:
        codec = make_codec(name)
        for scale in (2.0**-149, 2.0**-126, 2.0**-110, 2.0**-95):
            values = codec.decode(codec.encode(torch.randn(2000) * scale), 2000).abs()
            assert (values[values > 0] >= 2.0**-126).all()


def test_int8_is_a_step_a_block() -> None:
    codec = make_codec("int8")
    small = torch.tensor([1e-37, 5e-38, 0.0])
    assert torch.allclose(codec.decode(codec.encode(small), 3), small, rtol=0.01, atol=0)
    x = torch.arange(-127, 128).float() * 0.5
    assert torch.equal(codec.decode(codec.encode(x), x.numel()), x)
    x = _values(8 * BLOCK)
    apart = (codec.decode(codec.encode(x), x.numel()) - x).abs().view(-1, BLOCK)
    step = x.view(-1, BLOCK).abs().amax(1, keepdim=True) / 127
    assert (apart <= 0.501 * step).all()  # the nearest: half a step


def test_bf16_rounds_to_the_nearest() -> None:
    codec, x = make_codec("bf16"), _values(8 * BLOCK)
    assert torch.equal(codec.decode(codec.encode(x), x.numel()), x.bfloat16().float())


def test_every_message_has_a_seed_of_its_own() -> None:
    keys = list(itertools.product((0, 1, 2**62), range(9), (0, 1), (0, 1)))  # run's seed, step, fragment, replica
    seeds = [message_seed(*key) for key in keys]
    assert seeds == [message_seed(*key) for key in keys]
    gaps = torch.tensor(seeds).sort().values.diff()
    assert gaps.min() > 1000  # sections of a message take the next ones
    assert min(seeds) >= 0
    assert max(seeds) < 1 << 62


def test_topk_keeps_the_largest_and_dropout_and_dare_what_the_seed_says() -> None:
    x = _values(1000)
    top = make_codec("topk", 0.1)
    back = top.decode(top.encode(x), 1000)
    assert (back != 0).sum() == 100
    assert torch.equal(back[back != 0], x[back != 0])
    assert x[back == 0].abs().max() <= back[back != 0].abs().min()
    few = make_codec("topk", 0.01)  # so few that their indices are shorter than a bit for each value
    assert few.nbytes(1000) == 8 * 10
    assert torch.equal(few.decode(few.encode(x), 1000)[x.abs().argmax()], x[x.abs().argmax()])
    ones = torch.ones(1000)
    for name, value in (("dropout", 1.0), ("dare", 10.0)):
        codec = make_codec(name, 0.1)
        a, b, c = (codec.decode(codec.encode(ones, seed=s), 1000) for s in (1, 1, 2))
        assert a.unique().tolist() == [0.0, value]
        assert (a != 0).sum() == 100
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize(("name", "value"), [("int8", torch.finfo(torch.float32).max), ("levels", 1e21)])
def test_what_a_codec_cannot_give_back_is_refused(name: str, value: float) -> None:
    """The largest value of fp32 decodes to infinity from 127 steps that are rounded up; squares overflow."""
    x = torch.linspace(-1, 1, 256) * value
    with pytest.raises(NotFinite, match="are too large to scale"):
        make_codec(name).encode(x)


def test_what_is_too_large_for_a_scale_is_refused_by_name() -> None:
    with pytest.raises(NotFinite, match=r"values up to 3e\+38 are too large to scale"):
        make_codec("sign").encode(torch.full((300,), 3e38))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="codec = 'e3m1x' is not a valid choice; did you mean 'e3m1'"):
        make_codec("e3m1x")
    with pytest.raises(ValueError, match="e6m0 needs 2 to 5 exponent bits"):
        SmallFloat(6, 0)
