#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""kvq_convert on pages that are laid out as other systems do; their bytes are made and read by tests/golden/row_bytes.py, not by kvq.

    test.py PROGRAM FOLDER
"""
import json
import math
import pathlib
import random
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/golden"))
sys.dont_write_bytecode = True
import row_bytes  # noqa: E402

PROGRAM, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
LAYERS, HEADS, DIM, TOKENS, BLOCK = 2, 2, 64, 90, 16
generator = random.Random(7)
VALUES = [
    [[[[row_bytes.f32(generator.gauss(0, 1)) for _ in range(DIM)] for _ in range(HEADS)] for _ in range(TOKENS)] for _ in range(2)]
    for _ in range(LAYERS)
]
SHAPE = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "tokens": TOKENS}


def run(*arguments, refused=None):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False)
    if refused is None:
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout
    assert done.returncode == 1 and refused in done.stderr and done.stderr.count("\n") == 1, (arguments, done.returncode, done.stderr)
    return done.stderr


def errors(output):
    found = re.search(r"error added: keys (\S+), values (\S+) of", output)
    return float(found[1]), float(found[2])


def described(name, description):
    path = FOLDER / name
    path.write_text(json.dumps({**SHAPE, **description}))  # the description may say another shape
    return path


def each():
    for layer in range(LAYERS):
        for tensor in range(2):
            for token in range(TOKENS):
                for head in range(HEADS):
                    yield layer, tensor, token, head


def offset(strides, table, layer, tensor, token, head):
    block = table[token // BLOCK]
    return (
        strides.get("at", 0)
        + layer * strides["layer"]
        + tensor * strides["tensor"]
        + block * strides.get("block", 0)
        + token % BLOCK * strides["token"]
        + head * strides["head"]
    )


def vllm_fp8():
    """[layer][key, value][block][token of the block][head][channel], blocks in any order."""
    blocks = math.ceil(TOKENS / BLOCK) + 3
    table = generator.sample(range(blocks), math.ceil(TOKENS / BLOCK))
    token = HEADS * DIM
    strides = {"layer": 2 * blocks * BLOCK * token, "tensor": blocks * BLOCK * token, "block": BLOCK * token, "token": token, "head": DIM}
    data = bytearray(LAYERS * strides["layer"])
    scale = row_bytes.FLOATS["fp8"][4]
    values = {}
    for at in each():
        layer, tensor, t, head = at
        row, _ = row_bytes.write_floats("fp8", VALUES[layer][tensor][t][head])
        first = offset(strides, table, *at)
        data[first : first + DIM] = row
        values[at] = row_bytes.read_floats("fp8", row, b"")
    description = {"format": "fp8", "block_tokens": BLOCK, "blocks": table, "tensor_scales": [scale, scale], "strides": strides}
    return bytes(data), description, values


def relative(a, b):
    error = sum((x - y) ** 2 for at in a for x, y in zip(a[at], b[at]))
    return error / sum(x * x for at in a for x in a[at])


def test_pages_of_two_systems():
    data, fp8, values = vllm_fp8()
    (FOLDER / "fp8.bin").write_bytes(data)
    source = described("fp8.json", fp8)
    # llama.cpp: rows of all heads of a token, keys of a layer behind those of the layer before.
    row = DIM // 32 * 34
    strides = {"layer": TOKENS * HEADS * row, "tensor": LAYERS * TOKENS * HEADS * row, "token": HEADS * row, "head": row}
    q8_0 = described("q8_0.json", {"format": "q8_0", "strides": strides})
    said = errors(run("--from", source, "--to", q8_0, FOLDER / "fp8.bin", FOLDER / "q8_0.bin"))
    tensors = (FOLDER / "q8_0.bin").read_bytes()
    assert len(tensors) == 2 * strides["tensor"]
    read = {}
    for at in each():
        layer, tensor, t, head = at
        first = layer * strides["layer"] + tensor * strides["tensor"] + t * strides["token"] + head * strides["head"]
        wanted = b"".join(row_bytes.write_q8_0(values[at][c : c + 32]) for c in range(0, DIM, 32))
        assert tensors[first : first + row] == wanted, at
        read[at] = sum((row_bytes.read_q8_0(wanted[c : c + 34]) for c in range(0, row, 34)), [])
    whole = relative(values, read)
    assert 0 < whole < 6e-5 and abs((said[0] + said[1]) / 2 / whole - 1) < 0.02, (said, whole)

    # Back again: scales apart from the numbers.
    for name, channels in (("nvfp4", 16), ("mxfp8", 32), ("mxfp4", 32)):
        numbers = DIM if name == "mxfp8" else DIM // 2
        of_scales = DIM // channels
        apart = {
            "format": name,
            "strides": {"layer": 2 * TOKENS * HEADS * numbers, "tensor": TOKENS * HEADS * numbers, "token": numbers, "head": TOKENS * numbers},
            "scales": {
                "at": LAYERS * 2 * TOKENS * HEADS * numbers,
                "layer": 2 * TOKENS * HEADS * of_scales,
                "tensor": TOKENS * HEADS * of_scales,
                "token": of_scales,
                "head": TOKENS * of_scales,
            },
        }
        if name == "nvfp4":
            apart["tensor_scales"] = [row_bytes.FLOATS[name][4]] * 2
        there = described(name + ".json", apart)
        run("--from", source, "--to", there, FOLDER / "fp8.bin", FOLDER / "apart.bin")
        written = (FOLDER / "apart.bin").read_bytes()
        for at in each():
            layer, tensor, t, head = at
            place = {k: v["layer"] * layer + v["tensor"] * tensor + v["token"] * t + v["head"] * head + v.get("at", 0) for k, v in apart.items() if k in ("strides", "scales")}
            row_wanted, scales = row_bytes.write_floats(name, values[at])
            assert written[place["strides"] : place["strides"] + numbers] == row_wanted, (name, at)
            assert written[place["scales"] : place["scales"] + of_scales] == scales, (name, at)
        bad = bytearray(written)
        bad[apart["scales"]["at"] + 1] = 0x7F if name == "nvfp4" else 0xFF
        (FOLDER / "bad.bin").write_bytes(bad)
        said = run("--from", there, FOLDER / "bad.bin", FOLDER / "x.safetensors", refused="is not finite")
        assert f"layer 0, keys, token 0, head 0: the scale of channels {channels} to {2 * channels - 1}" in said, said


def test_latents():
    """DeepSeek V3.2's records in blocks of 16 tokens of a layer, as vLLM has them, and MLX's arrays."""
    dim, layers, tokens = 576, 1, 40
    values = {t: [row_bytes.f32(generator.gauss(0, 1)) for _ in range(dim)] for t in range(tokens)}
    table = [2, 0, 1]
    data, held = bytearray(3 * 16 * 656), {}
    for t, row in values.items():
        record, _, held[t] = row_bytes.mla_656(row, False)
        first = (table[t // 16] * 16 + t % 16) * 656
        data[first : first + 656] = record
    (FOLDER / "656.bin").write_bytes(data)
    shape = {"layers": layers, "kv_heads": 1, "head_dim": dim, "tokens": tokens, "latent": [512, 64], "block_tokens": 16, "blocks": table}
    strides = {"strides": {"block": 16 * 656, "token": 656}}
    source = described("656.json", {**shape, "format": "mla-656", **strides})
    other = described("pow2.json", {**shape, "format": "mla-656-pow2", **strides})
    run("--from", source, "--to", other, FOLDER / "656.bin", FOLDER / "pow2.bin")
    written = (FOLDER / "pow2.bin").read_bytes()
    for t, row in held.items():
        first = (table[t // 16] * 16 + t % 16) * 656
        assert written[first : first + 656] == row_bytes.mla_656(row, True)[0], t
    lost = errors(run("--from", source, "--keys", "std4-fp16x64", FOLDER / "656.bin", FOLDER / "latent.safetensors"))
    assert lost[1] == 0 and lost[0] < 2e-2, lost
    run("--to", source, "--page-tokens", 32, FOLDER / "latent.safetensors", FOLDER / "656.bin")
    data[512] = data[513] = data[514] = data[515] = 0xFF  # a scale of the first record in memory, that of token 16
    (FOLDER / "bad.bin").write_bytes(data)
    run("--from", source, FOLDER / "bad.bin", FOLDER / "x.safetensors", refused="layer 0, keys, token 16, head 0: the scale of channels 0 to 127 is")
    run("--from", described("wrong.json", {**shape, "format": "mla-656", "kv_heads": 2, **strides}), FOLDER / "656.bin", "x", refused="has 1 kv head")
    run("--from", described("wrong.json", {**shape, "format": "nvfp4-v4", **strides}), FOLDER / "656.bin", "x", refused="in turns")

    codes, apart = DIM // 2, 2
    mlx = {
        "format": "mlx-4-g64",
        "strides": {"layer": 2 * TOKENS * HEADS * codes, "tensor": TOKENS * HEADS * codes, "head": TOKENS * codes, "token": codes},
    }
    for i, name in enumerate(("scales", "biases")):
        at = LAYERS * 2 * TOKENS * HEADS * (codes + i * apart)
        mlx[name] = {"at": at, "layer": 2 * TOKENS * HEADS * apart, "tensor": TOKENS * HEADS * apart, "head": TOKENS * apart, "token": apart}
    data, fp8, values = vllm_fp8()
    (FOLDER / "fp8.bin").write_bytes(data)
    source, there = described("fp8.json", fp8), described("mlx.json", mlx)
    lost = errors(run("--from", source, "--to", there, FOLDER / "fp8.bin", FOLDER / "mlx.bin"))
    assert all(3e-3 < e < 1e-2 for e in lost), lost
    written = (FOLDER / "mlx.bin").read_bytes()
    for at in each():
        row, scale, _, bias = row_bytes.mlx(values[at], 4)
        for part, wanted in (("strides", row), ("scales", scale), ("biases", bias)):
            s = mlx[part]
            first = s.get("at", 0) + at[0] * s["layer"] + at[1] * s["tensor"] + at[2] * s["token"] + at[3] * s["head"]
            assert written[first : first + len(wanted)] == wanted, (part, at)
    run("--from", described("wrong.json", {k: v for k, v in mlx.items() if k != "biases"}), FOLDER / "mlx.bin", "x", refused="must say biases")


def test_sequences():
    data, fp8, _ = vllm_fp8()
    (FOLDER / "fp8.bin").write_bytes(data)
    source = described("fp8.json", fp8)
    kept, four, back = (FOLDER / f"{n}.safetensors" for n in ("kept", "four", "back"))
    # Pages of fp32 are what was read, and raw pages of them the bytes that were there.
    assert errors(run("--from", source, "--model", "m", FOLDER / "fp8.bin", kept)) == (0, 0)
    run("--to", source, kept, FOLDER / "again.bin")
    again = (FOLDER / "again.bin").read_bytes()
    strides, table = fp8["strides"], fp8["blocks"]
    assert all(again[f : f + DIM] == data[f : f + DIM] for f in (offset(strides, table, *at) for at in each()))
    lost = errors(run("--format", "std4", "--page-tokens", 32, "--sinks", 4, "--recent", 20, kept, four))
    assert all(3e-3 < e < 1.2e-2 for e in lost), lost
    lost = errors(run("--keys", "fp8", "--values", "int8", "--page-tokens", 64, four, back))
    assert 1e-4 < lost[0] < 8e-4 and lost[1] < 8e-5, lost
    out = run(back, FOLDER / "same.safetensors")
    assert errors(out) == (0, 0) and "keys fp8, values int8" in out and "pages of 64" in out, out
    assert (FOLDER / "same.safetensors").read_bytes() == back.read_bytes()
    run("--model", "another", back, four, refused="saved for model m, not for another")
    damaged = bytearray(back.read_bytes())
    damaged[-1] ^= 1
    (FOLDER / "damaged.safetensors").write_bytes(damaged)
    run(FOLDER / "damaged.safetensors", FOLDER / "x.safetensors", refused="is damaged")
    run("--format", "std6-h", kept, four, refused="std6")


def test_refusals():
    data, fp8, _ = vllm_fp8()
    (FOLDER / "fp8.bin").write_bytes(data)
    (FOLDER / "short.bin").write_bytes(data[:1000])
    strides = fp8["strides"]
    out = FOLDER / "refused.safetensors"
    out.unlink(missing_ok=True)
    for change, sentence in (
        ({"format": "fp9"}, "no rows of the name fp9"),
        ({"format": None}, "format must be a text"),
        ({"colour": 1}, "no member colour"),
        ({"tokens": 0}, "tokens must be a whole number from 1"),
        ({"tokens": 1.5}, "tokens must be a whole number"),
        ({"tokens": 1 << 63}, "tokens must be a whole number"),
        ({"tokens": 1000}, "1000 tokens in blocks of 16 need 63 blocks, but there are 6"),
        ({"blocks": [0] * 6}, "overlap"),
        ({"blocks": [*range(5), -1]}, "a block must be"),
        ({"blocks": [*range(5), 1 << 20]}, "but there are"),
        ({"strides": {**strides, "token": 1}}, "overlap"),
        ({"strides": {**strides, "row": 1}}, "no member row"),
        ({"strides": {**strides, "layer": -1}}, "strides.layer must be"),
        ({"scales": strides}, "no scales apart"),
        ({"format": "nvfp4"}, "must say scales"),
        ({"tensor_scales": [1, 0]}, "positive scale of the tensor, but got 0"),
        ({"tensor_scales": [1]}, "two numbers"),
        ({"format": "q8_0", "head_dim": 48}, "takes no scale of the tensor"),
        ({"format": "q8_0", "head_dim": 48, "tensor_scales": [1, 1]}, "a scale for 32 channels, but head_dim is 48"),
    ):
        run("--from", described("wrong.json", {**fp8, **change}), FOLDER / "fp8.bin", out, refused=sentence)
    run("--from", described("fp8.json", fp8), FOLDER / "short.bin", out, refused="but there are 1000 bytes")
    infinite = bytearray(data)
    infinite[offset(strides, fp8["blocks"], 1, 1, 5, 0)] = 0x7F
    (FOLDER / "nan.bin").write_bytes(infinite)
    run("--from", FOLDER / "fp8.json", FOLDER / "nan.bin", out, refused="1 values that are NaN or infinite")
    (FOLDER / "wrong.json").write_text("{")
    run("--from", FOLDER / "wrong.json", FOLDER / "fp8.bin", out, refused="is no JSON")
    run("--from", FOLDER / "fp8.json", FOLDER / "none.bin", out, refused="cannot be read")
    run(FOLDER / "fp8.bin", out, refused="not a safetensors file")
    assert not out.exists()


def test_errors():
    rows = dict(re.findall(r"^\| (\S+) \| [\d.]+ \| ([\d.e-]+) \|", run("--errors"), re.M))
    for name, wanted in (("int8", 4.2e-5), ("nvfp4-4over6", 7.6e-3), ("mla-656", 5.9e-4), ("fp8", 7e-4), ("e4m3", 6.6e-4), ("nvfp4", 9.1e-3), ("mxfp4", 1.33e-2)):
        assert abs(float(rows[name]) / wanted - 1) < 0.05, (name, rows[name])


FOLDER.mkdir(parents=True, exist_ok=True)
for test in (test_pages_of_two_systems, test_latents, test_sequences, test_refusals, test_errors):
    test()
