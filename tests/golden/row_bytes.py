#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads and writes rows of FP8, NVFP4, MX and ggml, and records of DeepSeek, vLLM and MLX, from their published definitions; shares no
code with kvq.

Prints row_bytes.inc, or with --records record_bytes.inc: the bytes of test::row_input() in every layout, and the values that these bytes
stand for. With --check FILE it compares instead and ends with 1 where they differ. Arithmetic is that of floats: every
result of two floats is rounded once, which double arithmetic and a conversion do for + - * / exactly.
"""

import math
import struct
import sys

TOKENS, DIM = 9, 96


def f32(x):
    """The float nearest to x; overflow is an infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def half_bits(x):
    return struct.pack("<e", max(-65504.0, min(65504.0, x)))


def half_value(b):
    return struct.unpack("<e", b)[0]


def minifloat_values(exponent_bits, mantissa_bits, bias):
    """The magnitude of every pattern without its sign, as if no pattern were special."""
    values = []
    for pattern in range(1 << (exponent_bits + mantissa_bits)):
        e, m = pattern >> mantissa_bits, pattern & ((1 << mantissa_bits) - 1)
        if e == 0:
            values.append(m * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((1 + m / (1 << mantissa_bits)) * 2.0 ** (e - bias))
    return values


E4M3 = minifloat_values(4, 3, 7)[:0x7F]  # 0x7f is NaN
E5M2 = minifloat_values(5, 2, 15)[:0x7C]  # then the infinity and NaN
E2M1 = minifloat_values(2, 1, 1)


def nearest(values, sign, x):
    """The pattern nearest to x, ties to the even one, saturating; `sign` is the bit of negative numbers."""
    magnitude = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda i: (abs(values[i] - magnitude), i & 1))
    return best | (sign if math.copysign(1.0, x) < 0 else 0)


def value_of(values, sign, pattern):
    return -values[pattern - sign] if pattern & sign else values[pattern]


def finite(group):
    return [x for x in group if math.isfinite(x)]


def cleaned(x):
    if x != x:
        return 0.0
    return max(-3.4028234663852886e38, min(3.4028234663852886e38, x))


def largest(group):
    """The first value of the largest magnitude."""
    found = 0.0
    for x in finite(group):
        if abs(x) > abs(found):
            found = x
    return found


def inverse(x):
    if x == 0.0:
        return 0.0
    y = f32(1.0 / x)
    return y if math.isfinite(y) else 0.0


def floor_codes(group, minimum, step, half, top):
    """min(top, int((x - minimum) / step + half)), as ggml has it: by the inverse of the step."""
    by = inverse(step)
    codes = []
    for x in group:
        at = f32(f32(f32(cleaned(x) - minimum) * by) + half)
        codes.append(0 if not at > 0 else top if at >= top else int(at))
    return codes


def nibbles(codes):
    return bytes(codes[i] & 15 | (codes[i + 16] & 15) << 4 for i in range(16))


def fifth_bits(codes):
    return struct.pack("<I", sum((c >> 4) << i for i, c in enumerate(codes)))


def halves(data):
    return [b & 15 for b in data] + [b >> 4 for b in data]


def with_fifth(bits, data):
    word = struct.unpack("<I", bits)[0]
    return [c | (word >> i & 1) << 4 for i, c in enumerate(halves(data))]


def write_q8_0(group):
    step = f32(abs(largest(group)) / 127.0)
    by = inverse(step)
    codes = []
    for x in group:
        at = f32(cleaned(x) * by)
        codes.append(int(math.copysign(min(127, math.floor(abs(at) + 0.5)), at)))
    return half_bits(step) + struct.pack("32b", *codes)


def read_q8_0(data):
    step = half_value(data[:2])
    return [f32(q * step) for q in struct.unpack("32b", data[2:])]


def write_q4_0(group):
    step = f32(largest(group) / -8.0)
    return half_bits(step) + nibbles(floor_codes(group, 0.0, step, 8.5, 15))


def read_q4_0(data):
    return [f32((q - 8) * half_value(data[:2])) for q in halves(data[2:])]


def write_q5_0(group):
    step = f32(largest(group) / -16.0)
    codes = floor_codes(group, 0.0, step, 16.5, 31)
    return half_bits(step) + fifth_bits(codes) + nibbles(codes)


def read_q5_0(data):
    return [f32((q - 16) * half_value(data[:2])) for q in with_fifth(data[2:6], data[6:])]


def of_range(group, top):
    values = finite(group) or [0.0]
    low = max(-65504.0, min(65504.0, min(values)))
    step = max(0.0, f32(f32(max(values) - low) / top))
    return low, step, floor_codes(group, low, step, 0.5, top)


def write_q4_1(group):
    low, step, codes = of_range(group, 15)
    return half_bits(step) + half_bits(low) + nibbles(codes)


def read_q4_1(data):
    return [f32(f32(q * half_value(data[:2])) + half_value(data[2:4])) for q in halves(data[4:])]


def write_q5_1(group):
    low, step, codes = of_range(group, 31)
    return half_bits(step) + half_bits(low) + fifth_bits(codes) + nibbles(codes)


def read_q5_1(data):
    step, low = half_value(data[:2]), half_value(data[2:4])
    return [f32(f32(q * step) + low) for q in with_fifth(data[4:8], data[8:])]


def write_q6_0(group):
    step = f32(largest(group) / -32.0)
    by = inverse(step)
    codes = floor_codes(group, 0.0, step, 32.5, 63)
    products = squares = 0.0
    for i in range(16):
        p, q = [], []
        for j in (i, i + 16):
            x = cleaned(group[j])
            at = f32(x * by)
            w = f32(at * at)
            p.append(f32(f32(w * x) * (codes[j] - 32)))
            q.append(f32(f32(w * (codes[j] - 32)) * (codes[j] - 32)))
        products = f32(products + f32(p[0] + p[1]))
        squares = f32(squares + f32(q[0] + q[1]))
    high = bytes(
        codes[i] >> 4 | codes[i + 16] >> 4 << 2 | codes[i + 8] >> 4 << 4 | codes[i + 24] >> 4 << 6 for i in range(8)
    )
    return half_bits(fitted(products, squares, step)) + high + nibbles(codes)


def read_q6_0(data):
    step, low = half_value(data[:2]), halves(data[10:])
    out = []
    for i, code in enumerate(low):
        place = (i % 16, i // 16)  # byte of the low bits, and which half
        pair = data[2 + place[0] % 8] >> (4 * (place[0] // 8)) >> (2 * place[1]) & 3
        out.append(f32(((code | pair << 4) - 32) * step))
    return out


IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def fitted(products, squares, before):
    """Least squares, or the step before where that is no number."""
    if not squares > 0:
        return before
    if math.isinf(squares) or math.isnan(squares) or math.isinf(products) or math.isnan(products):
        return 0.0 if math.isinf(squares) and math.isfinite(products) else before
    step = f32(products / squares)
    return step if math.isfinite(step) else before


def write_iq4_nl(group):
    if not abs(largest(group)) >= f32(1e-15):
        return bytes(18)
    step = f32(largest(group) / -127.0)
    by = f32(1.0 / step)
    codes, products, squares = [], 0.0, 0.0
    for x in map(cleaned, group):
        at = max(-1000.0, min(1000.0, f32(x * by)))
        # The nearest, the higher one of two that are equally near.
        code = min(range(16), key=lambda c: (f32(abs(at - IQ4_NL[c])), -c))
        wq = f32(f32(x * x) * IQ4_NL[code])
        products = f32(products + f32(wq * x))
        squares = f32(squares + f32(wq * IQ4_NL[code]))
        codes.append(code)
    return half_bits(fitted(products, squares, step)) + nibbles(codes)


def read_iq4_nl(data):
    return [f32(IQ4_NL[q] * half_value(data[:2])) for q in halves(data[2:])]


GGML = {
    "q8_0": (write_q8_0, read_q8_0, 34),
    "q4_0": (write_q4_0, read_q4_0, 18),
    "q4_1": (write_q4_1, read_q4_1, 20),
    "q5_0": (write_q5_0, read_q5_0, 22),
    "q5_1": (write_q5_1, read_q5_1, 24),
    "q6_0": (write_q6_0, read_q6_0, 26),
    "iq4_nl": (write_iq4_nl, read_iq4_nl, 18),
}


def pairs(codes):
    return bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2))


def unpaired(data):
    return [c for b in data for c in (b & 15, b >> 4)]


# name: (values, bit of the sign, channels of a scale, kind of scale, scale of the tensor)
FLOATS = {
    "fp8": (E4M3, 0x80, 0, "tensor", 0.03125),
    "fp8-e5m2": (E5M2, 0x80, 0, "tensor", 1.0),
    "nvfp4": (E2M1, 8, 16, "e4m3", 0.0625),
    "mxfp8": (E4M3, 0x80, 32, "e8m0", 1.0),
    "mxfp4": (E2M1, 8, 32, "e8m0", 1.0),
    "nvfp4-4over6": (E2M1, 8, 16, "e4m3", 0.0625),
}
ORDER = ["fp8", "fp8-e5m2", "nvfp4", "mxfp8", "mxfp4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "nvfp4-4over6", "q6_0", "iq4_nl"]


def two_levels(group, magnitude, tensor, most):
    """The squared error, the scale and the codes of a group of NVFP4 whose largest value becomes `most`."""
    scale = nearest(E4M3, 0x80, f32(f32(magnitude / most) / tensor))
    step = f32(E4M3[scale] * tensor)
    codes = [nearest(E2M1, 8, f32(cleaned(x) / step)) if step > 0 else 0 for x in group]
    error = 0.0
    for x, code in zip(group, codes):
        d = f32(cleaned(x) - f32(value_of(E2M1, 8, code) * step))
        error = f32(error + f32(d * d))
    return error, scale, codes


def write_floats(name, row):
    values, sign, channels, kind, tensor = FLOATS[name]
    codes, scales = [], []
    size = channels or len(row)
    for first in range(0, len(row), size):
        group = row[first : first + size]
        magnitude = abs(largest(group))
        if kind == "tensor":
            step = tensor
        elif kind == "e4m3":
            tried = [two_levels(group, magnitude, tensor, most) for most in ((6.0, 4.0) if "4over6" in name else (6.0,))]
            _, scale, of_group = min(tried, key=lambda t: t[0])  # the first one of equals
            scales.append(scale)
            codes += of_group
            continue
        else:
            emax = 8 if values is E4M3 else 2
            exponent = math.frexp(magnitude)[1] - 1 - emax if magnitude > 0 else -127
            exponent = max(-127, exponent)
            scales.append(exponent + 127)
            step = 2.0**exponent
        for x in group:
            codes.append(nearest(values, sign, f32(cleaned(x) / step)) if step > 0 else 0)
    return (pairs(codes) if values is E2M1 else bytes(codes)), bytes(scales)


def read_floats(name, data, scales):
    values, sign, channels, kind, tensor = FLOATS[name]
    codes = unpaired(data) if values is E2M1 else list(data)
    out = []
    for i, code in enumerate(codes):
        if kind == "tensor":
            step = tensor
        elif kind == "e4m3":
            step = f32(E4M3[scales[i // channels]] * tensor)
        else:
            step = 2.0 ** (scales[i // channels] - 127)
        out.append(f32(value_of(values, sign, code) * step))
    return out


def row_input(dim=DIM):
    """test::row_input(): numbers of all sizes, ties, a group of zeros, a constant one, NaN and infinities."""
    state, x = 12345, []
    for i in range(TOKENS * dim):
        state = (state * 1103515245 + 12345) % (1 << 31)
        token = i // dim
        value = ((state >> 7) % 4001 - 2000) * 2.0 ** (token - 10)
        if i % 37 == 5:
            value *= 16.0
        if token == 3 and i % dim < 32:
            value = 0.0
        if token == 4 and i % dim < 32:
            value = -2.5
        x.append(value)
    x[2 * dim + 7] = math.nan
    x[5 * dim + 40] = math.inf
    x[6 * dim + 70] = -math.inf
    return x


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 % (1 << 64)
    return h


def block(name, x):
    """The bytes of a page and its values."""
    rows, behind, values = [], [], []
    for t in range(TOKENS):
        row = x[t * DIM : (t + 1) * DIM]
        if name in GGML:
            write, read, size = GGML[name]
            data = b"".join(write(row[c : c + 32]) for c in range(0, DIM, 32))
            for at in range(0, len(data), size):
                values += read(data[at : at + size])
            scales = b""
        else:
            data, scales = write_floats(name, row)
            values += read_floats(name, data, scales)
        rows.append(data)
        behind.append(scales)
    data = b"".join(rows) + b"".join(behind)
    return data + bytes(-len(data) % 16), values


def limited(x):
    return max(-(2.0**126), min(2.0**126, cleaned(x)))


def bfloat(x):
    """The two bytes of the bfloat16 nearest to x, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)


def bfloat_value(b):
    return struct.unpack("<f", b"\0\0" + b)[0]


def power_above(x):
    mantissa, exponent = math.frexp(x)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def e4m3_codes(group, step):
    return [nearest(E4M3, 0x80, f32(limited(x) / step)) for x in group]


def e2m1_codes(group, step):
    return [nearest(E2M1, 8, f32(limited(x) / step)) if step > 0 else 0 for x in group]


def e4m3_values(codes, step):
    return [f32(value_of(E4M3, 0x80, c) * step) for c in codes]


def e2m1_values(codes, step):
    return [f32(value_of(E2M1, 8, c) * step) for c in codes]


def cut(row, size):
    return [row[i : i + size] for i in range(0, len(row), size)]


def mla_656(row, pow2):
    """512 e4m3, a float for each 128 of them, 64 bfloat16."""
    codes, scales, values = b"", b"", []
    for group in cut(row[:512], 128):
        scale = f32(abs(largest(group)) / 448.0)
        scale = power_above(max(scale, f32(1e-4))) if pow2 else max(scale, 2.0**-126)
        c = e4m3_codes(group, scale)
        codes += bytes(c)
        scales += struct.pack("<f", scale)
        values += e4m3_values(c, scale)
    rotated = b"".join(bfloat(limited(x)) for x in row[512:])
    return codes + scales + rotated, b"", values + [bfloat_value(rotated[i : i + 2]) for i in range(0, 128, 2)]


def mla_584(row):
    """448 e4m3 and 64 bfloat16; behind the page 7 powers of two and a zero."""
    codes, scales, values = b"", b"", []
    for group in cut(row[:448], 64):
        scale = power_above(max(f32(abs(largest(group)) / 448.0), f32(1e-4)))
        c = e4m3_codes(group, scale)
        codes += bytes(c)
        scales += bytes([int(math.log2(scale)) + 127])
        values += e4m3_values(c, scale)
    rotated = b"".join(bfloat(limited(x)) for x in row[448:])
    return codes + rotated, scales + b"\0", values + [bfloat_value(rotated[i : i + 2]) for i in range(0, 128, 2)]


def mla_528(row):
    codes, scales, values = b"", b"", []
    for group in cut(row, 32):
        scale = power_above(max(f32(abs(largest(group)) / 448.0), f32(1e-4)))
        c = e4m3_codes(group, scale)
        codes += bytes(c)
        scales += bytes([int(math.log2(scale)) + 127])
        values += e4m3_values(c, scale)
    return codes + scales, b"", values


def mla_288(row):
    codes, scales, values = [], b"", []
    for group in cut(row, 16):
        scale = nearest(E4M3, 0x80, f32(abs(largest(group)) / 6.0))
        c = e2m1_codes(group, E4M3[scale])
        codes += c
        scales += bytes([scale])
        values += e2m1_values(c, E4M3[scale])
    return pairs(codes) + scales, b"", values


def index_132(row):
    scale = f32(max(abs(largest(row)), f32(1e-4)) / 448.0)
    codes = e4m3_codes(row, scale)
    return bytes(codes), struct.pack("<f", scale), e4m3_values(codes, scale)


def index_68(row):
    codes, scales, values = [], b"", []
    for group in cut(row, 32):
        scale = power_above(max(f32(abs(largest(group)) / 6.0), f32(1e-4)))
        c = e2m1_codes(group, scale)
        codes += c
        scales += bytes([int(math.log2(scale)) + 127])
        values += e2m1_values(c, scale)
    return pairs(codes), scales, values


def int8_token_head(row):
    scale = max(f32(abs(largest(row)) / 127.0), f32(1e-6))
    by = f32(1.0 / scale)
    codes = [int(max(-128.0, min(127.0, f32(limited(x) * by)))) for x in row]
    return struct.pack(f"{len(codes)}bf", *codes, scale), b"", [f32(c * scale) for c in codes]


def fp8_token_head(row):
    scale = max(f32(abs(largest(row)) / 448.0), f32(1e-6))
    by = f32(1.0 / scale)
    codes = [nearest(E4M3, 0x80, f32(limited(x) * by)) for x in row]
    return bytes(codes) + struct.pack("<f", scale), b"", e4m3_values(codes, scale)


def rint(x):
    return float(round(x))  # ties to even


def mlx(row, bits, write=half_bits, read=half_value):
    """Codes in words of 32 bits; behind the page halves, or bfloat16: scales of all tokens, then their biases."""
    stream, scales, biases, values = 0, b"", b"", []
    top = (1 << bits) - 1
    for g, group in enumerate(cut(row, 64)):
        low, high = min(finite(group)), max(finite(group))
        step = max(f32(f32(high - low) / top), f32(1e-7))
        step = step if abs(low) > abs(high) else -step
        edge = low if abs(low) > abs(high) else high
        steps = rint(f32(edge / step))
        start = 0.0 if steps == 0 else edge
        if steps != 0:
            step = f32(edge / steps)
        codes = [int(max(0.0, min(float(top), rint(max(-1e6, min(1e6, f32(f32(limited(x) - start) / step))))))) for x in group]
        for i, c in enumerate(codes):
            stream |= c << (bits * (64 * g + i))
        scales += write(step)
        biases += write(start)
        values += [f32(f32(c * read(scales[-2:])) + read(biases[-2:])) for c in codes]
    return stream.to_bytes(len(row) * bits // 8, "little"), scales, values, biases


def nvfp4(row):
    """As nvfp4 without a scale of the tensor."""
    codes, scales, values = [], b"", []
    for group in cut(row, 16):
        _, scale, of_group = two_levels(group, abs(largest(group)), 1.0, 6.0)
        codes += of_group
        scales += bytes([scale])
        values += e2m1_values(of_group, E4M3[scale])
    return pairs(codes), scales, values


def mxfp4_16(row):
    """SGLang's fp4_e2m1: halfway between two numbers is the larger one."""
    codes, scales, values = [], b"", []
    for group in cut(row, 16):
        scale = power_above(max(f32(abs(largest(group)) / 6.0), f32(1e-10)))
        sizes = [f32(limited(x) / scale) for x in group]
        c = [8 * (x < 0) + sum(abs(x) >= bound for bound in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)) for x in sizes]
        codes += c
        scales += bytes([int(math.log2(scale)) + 127])
        values += e2m1_values(c, scale)
    return pairs(codes), scales, values


def in_turns(scales, per_token):
    """Scales of four tokens take turns: place (t // 4) * 4 * S + s * 4 + t % 4, with fewer turns at the end."""
    out = b""
    for first in range(0, TOKENS, 4):
        tokens = [scales[t * per_token : (t + 1) * per_token] for t in range(first, min(first + 4, TOKENS))]
        out += bytes(of_token[s] for s in range(per_token) for of_token in tokens)
    return out


def torch_signs(n):
    """torch.bernoulli(0.5) with vLLM's seed: bit 23 of MT19937's numbers."""
    state = [0x9E3779B9]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    signs = []
    for i in range(n):
        y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7FFFFFFF)
        state[i] = state[(i + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        y = state[i] ^ (state[i] >> 11)
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        signs.append(-1.0 if ((y ^ (y >> 18)) >> 23) & 1 else 1.0)
    return signs


def hadamard(row):
    """By halves: [H, H; H, -H]."""
    if len(row) == 1:
        return row
    a, b = hadamard(row[: len(row) // 2]), hadamard(row[len(row) // 2 :])
    return [f32(x + y) for x, y in zip(a, b)] + [f32(x - y) for x, y in zip(a, b)]


def int4_token_head(row):
    """vLLM: behind the matrix, 4 bits between the smallest and the largest, and a zero point in the scale."""
    signs = torch_signs(len(row))
    y = hadamard([limited(x) * s if abs(limited(x)) < 2.0**100 else math.copysign(2.0**100, x) * s for x, s in zip(row, signs)])

    def code(q):
        return int(min(f32(q + 0.5), 15.0)) if q > 0 else 0

    scale = max(f32(f32(max(y) - min(y)) / 15.0), f32(1e-6))
    zero = code(f32(-min(y) / scale))
    inverse = f32(1.0 / scale)
    codes = [code(f32(f32(v * inverse) + zero)) for v in y]
    bits = struct.unpack("<I", struct.pack("<f", scale))[0] & ~15
    step = struct.unpack("<f", struct.pack("<I", bits))[0]
    back = hadamard([f32((c - zero) * step) for c in codes])
    return pairs(codes) + struct.pack("<I", bits | zero), b"", [f32(v * s / len(row)) for v, s in zip(back, signs)]


# name: (channels, writer of a token, page ends at a multiple of)
RECORDS = {
    "mla-656": (576, lambda row: mla_656(row, False), 16),
    "mla-656-pow2": (576, lambda row: mla_656(row, True), 16),
    "mla-584": (512, mla_584, 576),
    "mla-528": (512, mla_528, 16),
    "mla-288": (512, mla_288, 16),
    "index-132": (128, index_132, 16),
    "index-68": (128, index_68, 16),
    "int8-token-head": (96, int8_token_head, 16),
    "fp8-token-head": (96, fp8_token_head, 16),
    "mlx-2-g64": (128, lambda row: mlx(row, 2), 16),
    "mlx-3-g64": (128, lambda row: mlx(row, 3), 16),
    "mlx-4-g64": (128, lambda row: mlx(row, 4), 16),
    "mlx-6-g64": (128, lambda row: mlx(row, 6), 16),
    "mlx-8-g64": (128, lambda row: mlx(row, 8), 16),
    "nvfp4-v4": (128, nvfp4, 16),
    "mlx-2-g64-bf16": (128, lambda row: mlx(row, 2, bfloat, bfloat_value), 16),
    "mlx-3-g64-bf16": (128, lambda row: mlx(row, 3, bfloat, bfloat_value), 16),
    "mlx-4-g64-bf16": (128, lambda row: mlx(row, 4, bfloat, bfloat_value), 16),
    "mlx-6-g64-bf16": (128, lambda row: mlx(row, 6, bfloat, bfloat_value), 16),
    "mlx-8-g64-bf16": (128, lambda row: mlx(row, 8, bfloat, bfloat_value), 16),
    "mxfp4-g16": (128, mxfp4_16, 16),
    "int4-token-head": (128, int4_token_head, 16),
}


def record_table():
    lines = []
    for name, (dim, write, multiple) in RECORDS.items():
        x, rows, behind, biases, values = row_input(dim), b"", b"", b"", []
        for t in range(TOKENS):
            row, scales, of_row, *more = write(x[t * dim : (t + 1) * dim])
            rows += row
            behind += scales
            biases += b"".join(more)
            values += of_row
        if name == "nvfp4-v4":
            behind = in_turns(behind, dim // 16)
        data = rows + behind + biases
        data += bytes(-len(data) % multiple)
        of_values = fnv1a(b"".join(struct.pack("<f", v) for v in values))
        lines.append(f'    {{"{name}", {dim}, {len(data)}, 0x{fnv1a(data):016x}u, 0x{of_values:016x}u, "{data[:16].hex()}"}},\n')
    return "".join(lines)


def table():
    lines, x = [], row_input()
    for name in ORDER:
        data, values = block(name, x)
        of_values = fnv1a(b"".join(struct.pack("<f", v) for v in values))
        scale = FLOATS[name][4] if name in FLOATS else 1.0
        lines.append(
            f'    {{"{name}", {scale}f, {len(data)}, 0x{fnv1a(data):016x}u, 0x{of_values:016x}u, "{data[:16].hex()}"}},\n'
        )
    return "".join(lines)


def main():
    records = "--records" in sys.argv
    printed = record_table() if records else table()
    if "--check" in sys.argv:
        with open(sys.argv[-1]) as f:
            if f.read() == printed:
                return 0
        print(f"{sys.argv[-1]} is not what {sys.argv[0]} prints", file=sys.stderr)
        return 1
    sys.stdout.write(printed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
