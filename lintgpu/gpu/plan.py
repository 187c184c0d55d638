"""Which GEMMs to measure for a calibration: the sizes that models have, what a fix would turn them into, and random ones.

Each group is one weight at one token count with its padded and neighbouring sizes, so that their ratios are measured side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from lintgpu.verify.timing import Shape

_HIDDEN = (
    64, 96, 128, 160, 192, 240, 256, 288, 312, 320, 336, 384, 416, 448, 480, 512, 544, 576, 600, 640, 672, 704, 720, 768, 800, 832, 864,
    896, 960, 1000, 1024, 1088, 1120, 1152, 1200, 1280, 1344, 1408, 1440, 1472, 1536, 1600, 1664, 1728, 1792, 1920, 2016, 2048, 2176, 2304,
    2400, 2560, 2688, 2816, 2880, 3072, 3200, 3328, 3456, 3584, 3840, 4096, 4352, 4544, 4608, 5120, 5376, 5632, 6144, 6656, 7168,
    8192, 9216,
)  # fmt: skip
_VOCABULARIES = (
    250, 1000, 1024, 5000, 8192, 10001, 21128, 21841, 28895, 28996, 29794, 30145, 30522, 31002, 31090, 32000, 32001, 32003, 32016, 32064,
    32100, 32128, 36000, 40000, 40478, 42000, 44512, 46145, 49152, 49408, 50000, 50257, 50258, 50259, 50264, 50265, 50267, 50272, 50277,
    50280, 50288, 50295, 50304, 50358, 50400, 50432, 51200, 51864, 51865, 51866, 52000, 54944, 57513, 58101, 60000, 61952, 62518, 64000,
    65024, 65536, 73448, 79800, 92416, 92544, 96103, 100277, 100352, 101980, 102400, 105879, 119547, 122753, 125696, 126464, 128000, 128100,
    128112, 128256, 129280, 131072, 131125, 150528, 151552, 151646, 151936, 152064, 152576, 163840, 180000, 200064, 202048, 248320, 250002,
    250112, 250680, 250880, 251000, 255001, 256000, 256206, 256512, 261019, 262144, 262208,
)  # fmt: skip
_TOKENS = (1, 4, 8, 16, 32, 64, 128, 197, 256, 512, 512, 512, 1024, 2048, 2048, 2048, 4096, 6304, 8192, 8192, 12608, 16384, 16384)
_LAYOUTS = ("NT", "NN", "TN")
_TYPICAL_US = 900.0


def groups(seed: int) -> Iterator[list[Shape]]:
    """An endless, deterministic sequence of groups of shapes."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.74:
            group = _linear(rng, "bf16")
        elif kind < 0.89:
            group = _linear(rng, rng.choice(("fp16", "tf32", "tf32", "fp8", "fp8", "fp32", "int8", "int8")))
        elif kind < 0.95:
            group = _batched(rng)
        else:
            group = _free(rng)
        # Large groups teach little that smaller ones do not; taking fewer leaves time for more sizes.
        if group and rng.random() < _TYPICAL_US / max(_TYPICAL_US, sum(map(estimate_us, group)) / len(group)):
            yield group


def estimate_us(shape: Shape) -> float:
    """A rough guess of the time on a large GPU, to budget a run by."""
    flops = 2.0 * shape.batch * shape.m * shape.n * shape.k
    aligned = all(x % 8 == 0 for x in (shape.n, shape.k))
    rate = {"fp32": 40e12, "tf32": 300e12, "fp8": 1000e12}.get(shape.dtype, 600e12) * (1.0 if aligned or shape.dtype == "fp32" else 0.22)
    moved = shape.batch * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n) * 2.0
    return 5.0 + max(flops / rate, moved / 3.5e12) * 1e6


def _linear(rng: random.Random, dtype: str) -> list[Shape]:
    out, inputs = _weight(rng)
    tokens = rng.choice(_TOKENS) if rng.random() < 0.8 else max(1, int(2 ** rng.uniform(0, 14.5)))
    if dtype in ("fp8", "int8"):
        # These libraries take multiples of 16 (fp8) or 8 (int8) only.
        grain = 16 if dtype == "fp8" else 8
        out, inputs, tokens = -(-out // grain) * grain, -(-inputs // grain) * grain, max(32, tokens)
    bias = rng.random() < 0.12
    variants = _variants(rng, out, inputs, tokens)
    shapes = [shape for variant in variants for shape in _passes(dtype, bias, *variant)]
    return list(dict.fromkeys(shapes))


def _weight(rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.3:
        return _near_round(rng), _near_round(rng) if rng.random() < 0.6 else rng.choice(_HIDDEN)
    hidden = rng.choice(_HIDDEN) if rng.random() < 0.75 else _random_size(rng, 48, 10000)
    kind = rng.random()
    if kind < 0.30:
        vocabulary = rng.choice(_VOCABULARIES) if rng.random() < 0.65 else int(2 ** rng.uniform(8, 18))
        while vocabulary * hidden > 1.2e9:
            hidden = rng.choice(_HIDDEN)
        return vocabulary, hidden
    if kind < 0.62:
        ratio = rng.choice((4.0, 4.0, 8 / 3, 8 / 3, 3.5, 2.6875, 2.75, 3.0, 5.33, 2.0, 1.5, 5.5, 6.0, rng.uniform(1, 6)))
        rounding = rng.choice((1, 1, 2, 8, 64, 128, 256))
        inner = max(8, int(hidden * ratio)) // rounding * rounding or rounding
        inner = inner * 2 if rng.random() < 0.1 else inner
        return (inner, hidden) if rng.random() < 0.5 else (hidden, inner)
    if kind < 0.82:
        head = rng.choice((32, 48, 64, 64, 80, 96, 128, 128, 192, 256))
        width = rng.choice(
            (hidden, hidden, 3 * hidden, hidden + 2 * head * rng.choice((1, 2, 4, 8)), head * rng.choice((1, 2, 4, 8, 16, 32)))
        )
        return (width, hidden) if rng.random() < 0.75 else (hidden, width)
    return _random_size(rng, 16, 20000), _random_size(rng, 16, 20000)


def _near_round(rng: random.Random) -> int:
    """A size just off a round one: the sizes whose padding is in question."""
    around = 64 * max(1, int(2 ** rng.uniform(0, 7.3)))
    return around + rng.choice((-30, -10, -6, -4, -2, -2, -1, 1, 2, 2, 4, 6, 8, 10, 22))


def _random_size(rng: random.Random, low: int, high: int) -> int:
    grain = rng.choice((1, 1, 2, 4, 8, 8, 16, 32, 64, 128))
    return max(grain, int(low * (high / low) ** rng.random()) // grain * grain)


def _variants(rng: random.Random, out: int, inputs: int, tokens: int) -> list[tuple[int, int, int]]:
    """(out, in, tokens) of the base and of its fixes and neighbours."""
    found = [(out, inputs, tokens)]
    for multiple in (8, 64, 128):
        padded_out, padded_in = -(-out // multiple) * multiple, -(-inputs // multiple) * multiple
        found += [(padded_out, inputs, tokens), (out, padded_in, tokens), (padded_out, padded_in, tokens)]
    if rng.random() < (0.7 if out % 64 == 0 else 0.2):
        found += [(out + d, inputs, tokens) for d in rng.sample((-128, -64, 64, 128, 256), 3) if out + d > 0]
    if rng.random() < 0.25:
        found += [(out, inputs + d, tokens) for d in rng.sample((-128, -64, 64, 128, 256), 3) if inputs + d > 0]
    if rng.random() < 0.3:
        step = rng.choice((1, 32, 64))
        found += [(out, inputs, tokens + d) for d in (-step, step) if tokens + d > 0]
    return list(dict.fromkeys(found))


def _passes(dtype: str, bias: bool, out: int, inputs: int, tokens: int) -> list[Shape]:
    """Forward, grad-input and grad-weight of a linear layer."""
    if dtype == "fp8":
        return [Shape(dtype, "scaled_mm", "NT", 1, tokens, out, inputs)]
    if dtype == "int8":
        return [Shape(dtype, "int_mm", "NT", 1, tokens, out, inputs)]
    forward = Shape(dtype, "addmm" if bias else "mm", "NT", 1, tokens, out, inputs)
    if tokens < 16:
        return [forward]
    return [forward, Shape(dtype, "mm", "NN", 1, tokens, inputs, out), Shape(dtype, "mm", "TN", 1, out, inputs, tokens)]


def _batched(rng: random.Random) -> list[Shape]:
    """Attention written as matrix products, and batches of free size."""
    dtype = rng.choice(("bf16", "bf16", "bf16", "fp16", "tf32"))
    batch = rng.choice((2, 4, 8, 12, 16, 32, 64, 96, 128, 256, 512))
    length = (
        rng.choice((64, 128, 196, 197, 256, 512, 577, 1000, 1023, 1024, 1500, 2048)) if rng.random() < 0.7 else _random_size(rng, 16, 2048)
    )
    head = rng.choice((32, 48, 64, 64, 71, 72, 80, 96, 128, 128, 256))
    if batch * length * length > 1 << 31:
        batch = 8
    sizes = ((length, length, head), (length, head, length))
    shapes = [Shape(dtype, "bmm", layout, batch, m, n, k) for m, n, k in sizes for layout in _LAYOUTS]
    padded = -(-length // 8) * 8
    if padded != length:
        shapes += [Shape(dtype, "bmm", s.layout, batch, *(padded if x == length else x for x in (s.m, s.n, s.k))) for s in list(shapes)]
    return shapes


def _free(rng: random.Random) -> list[Shape]:
    """Sizes without a model behind them, in every layout."""
    dtype = rng.choice(("bf16", "bf16", "bf16", "fp16", "tf32"))
    m, n, k = (_random_size(rng, 1, 16384) for _ in range(3))
    op = rng.choice(("mm", "mm", "addmm"))
    return [Shape(dtype, op, layout, 1, m, n, k) for layout in (("NT",) if op == "addmm" else (*_LAYOUTS, "TT"))]
