"""Bad input: an exception of the right class with one sentence, and nothing changed."""
import copy
import os
import pickle
import subprocess
import sys
import tempfile
import unittest

import numpy as np

import kvq
from kvq._engine_pages import expect_blocks, order_of, row_strides, tensor_scale

KV, Q, D = 2, 4, 32


def zeros(n, heads, dim=D, dtype=np.float32):
    return np.zeros((n, heads, dim), dtype)


class OfAGpu:
    """What kvq.cuda.Pages reads of a tensor, where there is no torch."""

    def __init__(self, *shape, dtype=np.uint8, axes=None):
        self.a = np.zeros(shape, dtype) if axes is None else np.zeros([shape[i] for i in axes], dtype).transpose(np.argsort(axes))
        self.shape, self.dtype = self.a.shape, self.a.dtype

    def stride(self):
        return tuple(n // self.a.itemsize for n in self.a.strides)

    def element_size(self):
        return self.a.itemsize


class EnginePages(unittest.TestCase):
    """Shapes and orders of pages in an engine's memory, of 9 pages of 16 tokens and 8 heads."""

    def strides(self, x, order=None, format="fp8", tokens=16, heads=8, row=128):
        return row_strides("keys", x, order_of(format, order, "keys", x, tokens, heads), tokens, heads, row)

    def test_orders(self):
        page = 16 * 8 * 128
        for order in ("NHD", None):
            self.assertEqual(self.strides(OfAGpu(9, 16, 8, 128), order), (page, 8 * 128, 128))
        self.assertEqual(self.strides(OfAGpu(9, 8, 16, 128), "HND"), (page, 128, 16 * 128))
        # vLLM's HND: the axes of NHD, with heads before tokens in memory.
        self.assertEqual(self.strides(OfAGpu(9, 16, 8, 128, axes=(0, 2, 1, 3))), (page, 128, 16 * 128))
        self.assertEqual(self.strides(OfAGpu(9, 1, 8, 128), tokens=1)[::2], (8 * 128, 128))
        self.assertEqual(self.strides(OfAGpu(9, 16, 8, 64), format="nvfp4", row=64)[1:], (8 * 64, 64))
        # One page: what it holds, since the library refuses pages that share bytes.
        self.assertEqual(self.strides(OfAGpu(1, 16, 8, 8), row=8), (16 * 8 * 8, 8 * 8, 8))
        self.assertEqual(self.strides(OfAGpu(9, 8, 8, 128), "HND", tokens=8), (8 * 8 * 128, 128, 8 * 128))
        for format, shape in (("fp8", (9, page)), ("int8", (9, page)), ("fp16", (9, 8, 16, 128)), ("fp8/std4", (9, page))):
            self.assertIsNone(order_of(format, None, "keys", OfAGpu(*shape), 16, 8))
        self.assertEqual([tensor_scale("key_scale", x) for x in (2, 0.5, np.float32(4), np.ones(1))], [2.0, 0.5, 4.0, 1.0])

    def test_refused(self):
        for text, x, given in (
            (r'\[9, 16, 8, 128\], not bytes \[pages\]\[8\]\[16\]\[128\] \(order="HND", 16 tokens, 8 kv heads\); they are order="NHD"',
             OfAGpu(9, 16, 8, 128), dict(order="HND")),
            (r'not bytes \[pages\]\[16\]\[8\]\[128\].*they are order="HND"$', OfAGpu(9, 8, 16, 128), {}),
            (r"\(order=.NHD., 32 tokens, 8 kv heads\)$", OfAGpu(9, 16, 8, 128), dict(tokens=32)),
            (r"order=.NHD. or order=.HND., since 8 kv heads are as many", OfAGpu(9, 8, 8, 128), dict(tokens=8)),
            ("neither .NHD. nor .HND.", OfAGpu(9, 16, 8, 128), dict(order="DHN")),
            ("not contiguous bytes", OfAGpu(9, 16, 8, 128, dtype=np.float16), {}),
            ("not contiguous bytes", OfAGpu(9, 16, 8, 128, axes=(0, 1, 3, 2)), {}),
            ("is of rows of others .fp8, .*a page of int8 is not", OfAGpu(9, 16, 8, 128), dict(format="int8", order="NHD")),
        ):
            with self.subTest(text), self.assertRaisesRegex(kvq.ArgumentError, text):
                self.strides(x, **given)
        with self.assertRaisesRegex(kvq.ArgumentError, r"pages of fp16 are the blocks of 8 kv heads.*\[8\]\[...\]; these are NHD"):
            expect_blocks("fp16", "keys", OfAGpu(9, 16, 8, 128), 16, 8, 1)
        with self.assertRaisesRegex(kvq.UnsupportedError, "key_scale has 8 numbers; .* one scale of the tensor"):
            tensor_scale("key_scale", np.ones(8))
        with self.assertRaisesRegex(kvq.ArgumentError, "value_scale is nan, which must be positive"):
            tensor_scale("value_scale", float("nan"))


class Errors(unittest.TestCase):
    def setUp(self):
        self.cache = kvq.Cache(2, KV, D, "int8")
        self.sequence = self.cache.new_sequence()
        self.sequence.append(0, zeros(10, KV), zeros(10, KV))

    def tearDown(self):
        self.assertEqual(self.sequence.tokens(0), 10)

    def expect(self, error, text, function, *arguments, **others):
        with self.assertRaisesRegex(error, text) as raised:
            function(*arguments, **others)
        if isinstance(raised.exception, kvq.Error):
            self.assertTrue(str(raised.exception).startswith("kvq: "), raised.exception)

    def test_classes(self):
        for error, base in ((kvq.ArgumentError, ValueError), (kvq.HandleError, ValueError), (kvq.DataError, ValueError),
                            (kvq.OutOfMemoryError, MemoryError), (kvq.UnsupportedError, NotImplementedError),
                            (kvq.StructError, RuntimeError), (kvq.CallbackError, RuntimeError),
                            (kvq.InternalError, RuntimeError)):
            self.assertTrue(issubclass(error, base) and issubclass(error, kvq.Error))
        self.assertEqual(sorted(e.status for e in kvq.Error.__subclasses__()), list(range(1, 10)))

    def test_options(self):
        self.expect(kvq.ArgumentError, 'no format "std44" for keys in this program; the nearest', kvq.Cache, 2, KV, D, "std44")
        self.expect(kvq.ArgumentError, "at least 1 layer, got -1", kvq.Cache, -1, KV, D)
        self.expect(kvq.ArgumentError, "layers is 4294967297, none of the integers", kvq.Cache, 2**32 + 1, KV, D)
        self.expect(kvq.ArgumentError, "layer 2, the cache has 2", kvq.Cache, 2, KV, D, layer_formats={2: ("int8", None)})
        self.expect(kvq.ArgumentError, "zero in it", kvq.Cache, 2, KV, D, "int8\0")
        self.expect(kvq.ArgumentError, "byte_budget is 0", kvq.Cache, 2, KV, D, byte_budget=0)
        for name in ("sinks", "recent", "rollback"):
            for number in (-1, -5):
                self.expect(kvq.ArgumentError, f"{name} is {number}, which must be at least 0", kvq.Cache, 2, KV, D, **{name: number})
        for name in ("page_tokens", "value_dim"):
            self.expect(kvq.ArgumentError, f"{name} is 0, which must be at least 1", kvq.Cache, 2, KV, D, **{name: 0})
        cache = kvq.Cache(2, KV, D, "int8")
        self.expect(kvq.ArgumentError, "chunk is 0", cache.footprint, 100, chunk=0)
        self.expect(kvq.ArgumentError, "slack is -1", kvq.Ring, cache.new_sequence(), 64, slack=-1)
        self.expect(kvq.ArgumentError, "min_prefix_tokens is -1", kvq.PrefixCache, cache, min_prefix_tokens=-1)
        self.expect(kvq.ArgumentError, "layout is 'neox', none of", kvq.Rotary, 8, layout="neox")
        self.expect(TypeError, "a format name is a int, not a str", kvq.Cache, 2, KV, D, 4)
        self.expect(TypeError, "float", kvq.Cache, 2.0, KV, D)
        self.expect(kvq.ArgumentError, "rotates 7 channels from 0 on, in pairs", kvq.Cache, 2, KV, D, rotary=kvq.Rotary(7))
        self.expect(kvq.ArgumentError, "3 rotary embeddings for 2 layers", kvq.Cache, 2, KV, D, rotary=[kvq.Rotary(8)] * 3)

    def test_tensors(self):
        append, k = self.sequence.append, zeros(1, KV)
        for bad, text in (
            (zeros(1, 3), "k is 3 heads x 32 channels but the cache holds 2 x 32"),
            (zeros(1, KV)[0], r"k has shape \[2, 32\], not \[tokens\]"),
            (zeros(1, KV, dtype=np.float64), "k is float64, none of float32"),
            (zeros(1, KV, dtype=np.int16), "k is int16"),
            (zeros(1, KV, dtype=">f4"), "order of bytes"),
            (zeros(1, KV, 2 * D)[:, :, ::2], "channels must be contiguous"),
            (np.broadcast_to(np.zeros(D, np.float32), (3, KV, D)), "share memory"),
            (np.zeros(1 * KV * D * 5, np.uint8)[1 : 1 + 4 * KV * D].view(np.float32).reshape(1, KV, D), "aligned"),
            (np.lib.stride_tricks.as_strided(zeros(3, KV), (2, KV, D), (130, 128, 4)), "not multiples of 4"),
        ):
            with self.subTest(text=text):
                self.expect(kvq.ArgumentError, text, append, 0, bad, k)
        self.expect(kvq.ArgumentError, "k has 2 tokens but v has 1", append, 0, zeros(2, KV), zeros(1, KV))
        self.expect(TypeError, "k is a list, neither a numpy array nor a torch tensor", append, 0, [1.0], k)
        self.expect(TypeError, "k is a NoneType", append, 0, None, k)
        self.expect(kvq.ArgumentError, "layer 2 is not among the 2", append, 2, k, k)
        self.expect(kvq.ArgumentError, "layer -1 is not among the 2", append, -1, k, k)
        append(0, zeros(0, KV), zeros(0, KV))

    def test_outputs(self):
        attend, q = self.sequence.attend, zeros(1, Q)
        fixed = zeros(1, Q)
        fixed.flags.writeable = False
        self.expect(kvq.ArgumentError, "out cannot be written", attend, 0, q, fixed)
        self.expect(kvq.ArgumentError, "out is 2 x 4 x 32 but must be 1 x 4 x 32", attend, 0, q, zeros(2, Q))
        same = np.lib.stride_tricks.as_strided(zeros(1, Q), (2, Q, D), (0, 4 * D, 4))
        self.expect(kvq.ArgumentError, "share memory", attend, 0, zeros(2, Q), same)
        self.expect(kvq.ArgumentError, "3 heads, not a multiple of the 2 kv heads", attend, 0, zeros(1, 3))
        self.expect(kvq.ArgumentError, "q has 11 tokens but layer 0 holds 10", attend, 0, zeros(11, Q))
        for lse, text in ((np.zeros((1, Q)), r"lse is float64 \[1, 4\], not float32 \[1, 4\]"),
                          (np.zeros((2, Q), np.float32), r"lse is float32 \[2, 4\]"),
                          (np.zeros((1, 2 * Q), np.float32)[:, ::2], "must be contiguous")):
            self.expect(kvq.ArgumentError, text, attend, 0, q, lse=lse)

    def test_numbers(self):
        s = self.sequence
        self.expect(kvq.ArgumentError, "cannot trim to 11 tokens: the sequence holds 10", s.trim, 11)
        self.expect(kvq.ArgumentError, "argument 2 of kvq_sequence_trim is 4294967296", s.trim, 2**32)
        self.expect(TypeError, "cannot be interpreted as an integer", s.trim, 1.0)
        self.expect(TypeError, "cannot be interpreted as an integer", s.trim, None)
        self.expect(kvq.ArgumentError, "keys cannot move by -5 positions", s.erase, 0, 5)
        self.expect(kvq.ArgumentError, "token 3 at place 0", s.keep, [3])
        self.expect(kvq.ArgumentError, "32-bit integer", s.keep, [2**31])
        self.expect(TypeError, "cannot be interpreted as an integer", s.keep, [0.5])
        self.expect(kvq.ArgumentError, "negative", s.tokens, -1)
        self.expect(kvq.ArgumentError, "cannot splice tokens 0 to 11", s.splice, s, 0, 11)
        self.expect(kvq.ArgumentError, r"layers \[1, 1\) are none", s.requantize, "int8", layers=(1, 1))
        self.expect(kvq.ArgumentError, 'the cache lists no key format "std4", only int8', s.requantize, "std4")
        self.expect(kvq.ArgumentError, "at least 1 thread, got 0", kvq.Threads, 0)
        self.expect(kvq.ArgumentError, "role is 'keys', none of key, value", kvq.Format, "int8", "keys")
        self.expect(kvq.ArgumentError, "window is 0", kvq.Mods, window=0)
        self.expect(kvq.ArgumentError, "scale is 0", kvq.Mods, scale=0.0)
        self.expect(kvq.ArgumentError, "direction is 'Causal'", kvq.Mods, direction="Causal")
        self.expect(kvq.ArgumentError, "softcap nan must be finite", s.attend, 0, zeros(1, Q), mods=kvq.Mods(softcap=float("nan")))
        self.expect(kvq.ArgumentError, "3 slopes for 4 query heads", s.attend, 0, zeros(1, Q), mods=kvq.Mods(alibi_slopes=[1, 2, 3]))

    def test_objects(self):
        s, q = self.sequence, zeros(1, Q)
        self.expect(TypeError, "other is a int, not a kvq.Sequence", s.splice, 5, 0, 1)
        self.expect(TypeError, "threads is a int, not a kvq.Threads", s.attend, 0, q, threads=2)
        self.expect(TypeError, "mods is a dict, not a kvq.Mods", s.attend, 0, q, mods={})
        self.expect(TypeError, r"sequences\[0\] is a Cache", self.cache.attend, 0, [self.cache], [q])
        self.expect(TypeError, "cache is a Sequence", kvq.PrefixCache, s)
        self.expect(TypeError, "policy is a list, not a kvq.StepDownPolicy", s.step_down, [])
        other = kvq.Cache(2, KV, D, "int8")
        self.expect(kvq.HandleError, "another cache", s.splice, other.new_sequence(), 0, 0)
        self.expect(kvq.HandleError, "another cache", other.requantize, [s], "int8")
        self.expect(kvq.ArgumentError, "q has 2 entries for 1", self.cache.attend, 0, [s], [q, q])
        self.expect(kvq.ArgumentError, "sequence 1 of the batch is sequence 0 again", self.cache.prefill, 0, [s, s], [zeros(1, KV)] * 2, [zeros(1, KV)] * 2, [q, q])
        for f in (copy.copy, copy.deepcopy, pickle.dumps):
            self.expect(TypeError, "fork", f, s)

    def test_closed(self):
        s = self.cache.new_sequence()
        s.close()
        s.close()
        self.assertTrue(s.closed)
        for f, arguments in ((s.trim, (0,)), (s.fork, ()), (s.usage, ()), (s.append, (0, zeros(1, KV), zeros(1, KV))),
                             (self.sequence.splice, (s, 0, 0)), (self.cache.requantize, ([s], "int8"))):
            self.expect(kvq.HandleError, "this Sequence was closed", f, *arguments)
        workspace = kvq.Workspace()
        workspace.close()
        self.expect(kvq.HandleError, "this Workspace was closed", self.sequence.attend, 0, zeros(1, Q), workspace=workspace)

    def test_budget(self):
        s = kvq.Cache(1, KV, D, "fp16", byte_budget=200_000).new_sequence()
        s.append(0, zeros(400, KV), zeros(400, KV))
        used = s.cache.info().bytes_in_use
        self.expect(kvq.OutOfMemoryError, "200000", s.append, 0, zeros(4000, KV), zeros(4000, KV))
        self.assertEqual((len(s), s.cache.info().bytes_in_use), (400, used))

    def test_library(self):
        """A library that is missing, or none of kvq, is named in an ImportError."""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in ((folder, "set KVQ_LIBRARY_PATH"), ("libc.so.6", "is no library of this version of kvq")):
                environment = {**os.environ, "KVQ_LIBRARY_PATH": path}
                ended = subprocess.run([sys.executable, "-c", "import kvq"], env=environment, capture_output=True, text=True)
                self.assertEqual(ended.returncode, 1)
                self.assertIn("ImportError: kvq: ", ended.stderr)
                self.assertIn(text, ended.stderr)


if __name__ == "__main__":
    unittest.main()
