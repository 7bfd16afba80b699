"""A small torch model over kvq against the CPU engine of examples/llama: stories15M, or another llama2.c checkpoint, greedily.

Runs where KVQ_STORIES is the checkpoint, KVQ_STORIES_TOKENIZER its tokenizer and KVQ_LLAMA the program kvq_llama; else it is skipped. CTest sets them
to the model of examples/llama/data (bindings/python/stories). With stories15M, which scripts/demo fetches, and kvq_library built in build/:

    cd bindings/python/tests
    export KVQ_STORIES=$OLDPWD/build/demo/weights/stories15M.bin KVQ_STORIES_TOKENIZER=$OLDPWD/build/demo/weights/tokenizer.bin
    export KVQ_LLAMA=$OLDPWD/build/demo/examples/llama/kvq_llama KVQ_LIBRARY_PATH=$OLDPWD/build/src/libkvq.so PYTHONPATH=../src
    python3 -m unittest -v test_stories
"""
import os
import re
import struct
import subprocess
import unittest

try:
    import torch
except ImportError:
    torch = None

import kvq

CHECKPOINT, TOKENIZER, ENGINE = (os.environ.get(name) for name in ("KVQ_STORIES", "KVQ_STORIES_TOKENIZER", "KVQ_LLAMA"))
STEPS = 200


class Model:
    """Llama in float32, weights of a llama2.c checkpoint (legacy layout, tied embeddings)."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.dim, hidden, self.layers, self.q_heads, self.kv_heads, vocab, _ = struct.unpack("7i", f.read(28))
            values = torch.frombuffer(bytearray(f.read()), dtype=torch.float32)
        at, dim, layers = 0, self.dim, self.layers
        self.head = dim // self.q_heads
        kv = self.kv_heads * self.head

        def take(*shape):
            nonlocal at
            n = 1
            for of in shape:
                n *= of
            at += n
            return values[at - n : at].view(shape)

        self.words = take(vocab, dim)
        self.norm1 = take(layers, dim)
        self.wq, self.wk, self.wv, self.wo = take(layers, dim, dim), take(layers, kv, dim), take(layers, kv, dim), take(layers, dim, dim)
        self.norm2 = take(layers, dim)
        self.w1, self.w2, self.w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
        self.norm = take(dim)

    def rotated(self, x, position):
        """Neighbouring channels are a pair."""
        angles = position * 10000.0 ** (-torch.arange(0, self.head, 2) / self.head)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def logits(self, token, position, sequence):
        """Of one token behind those of the sequence, which takes its keys and values."""
        x = self.words[token]
        for layer in range(self.layers):
            h = self.normal(x, self.norm1[layer])
            q, k, v = ((w[layer] @ h).view(1, -1, self.head) for w in (self.wq, self.wk, self.wv))
            out = sequence.prefill(layer, self.rotated(k, position), v.contiguous(), self.rotated(q, position))
            x = x + self.wo[layer] @ out.flatten()
            h = self.normal(x, self.norm2[layer])
            x = x + self.w2[layer] @ (torch.nn.functional.silu(self.w1[layer] @ h) * (self.w3[layer] @ h))
        return self.words @ self.normal(x, self.norm)

    @staticmethod
    def normal(x, weight):
        return x * (x.square().mean() + 1e-5).rsqrt() * weight


def pieces(path):
    """The bytes of every token, by id."""
    with open(path, "rb") as f:
        f.read(4)
        found = []
        while header := f.read(8):
            piece = f.read(struct.unpack("fi", header)[1])
            byte = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
            found.append(bytes([int(byte[1], 16)]) if byte else piece)
    return found


@unittest.skipIf(torch is None or not (CHECKPOINT and TOKENIZER and ENGINE), "needs torch, KVQ_STORIES, KVQ_STORIES_TOKENIZER and KVQ_LLAMA")
class Stories(unittest.TestCase):
    def test_ids(self):
        model, words = Model(CHECKPOINT), pieces(TOKENIZER)
        for name in ("fp16", "int8", "std4"):
            with self.subTest(name=name):
                cache = kvq.Cache(model.layers, model.kv_heads, model.head, name, sinks=4, recent=32, page_tokens=64, window="fp16")
                sequence, token, text = cache.new_sequence(), 1, b""
                for position in range(STEPS):
                    token = int(model.logits(token, position, sequence).argmax())
                    if token == 1:
                        break
                    text += words[token]
                scheme = name if name == "fp16" else name + "+s4+r32"
                wanted = subprocess.run(
                    [ENGINE, "generate", CHECKPOINT, "--tokenizer", TOKENIZER, "--temperature", "0", "--steps", str(STEPS), "--scheme", scheme,
                     "--page-tokens", "64"], capture_output=True, check=True).stdout
                self.assertGreater(len(text), 200)
                self.assertEqual(text.strip(), wanted.strip())


if __name__ == "__main__":
    unittest.main()
