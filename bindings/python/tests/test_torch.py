"""Tensors of torch: the bits of numpy. Skipped where torch is not there."""
import unittest

import numpy as np

import kvq

try:
    import torch
except ImportError:
    torch = None

KV, Q, D = 2, 4, 32


@unittest.skipIf(torch is None, "torch is not there")
class Torch(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.cache = kvq.Cache(1, KV, D, "std4", page_tokens=32, recent=8)

    def given(self, dtype):
        return [torch.randn(100, heads, D).to(dtype) for heads in (KV, KV, Q)]

    def test_same_bits(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(dtype=dtype):
                given = self.given(dtype)
                bits = [x.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else x.numpy() for x in given]
                out = self.cache.new_sequence().prefill(0, *given)
                expected = self.cache.new_sequence().prefill(0, *bits)
                self.assertIsInstance(out, torch.Tensor)
                self.assertEqual((out.dtype, tuple(out.shape)), (dtype, (100, Q, D)))
                if dtype == torch.bfloat16:
                    out = out.view(torch.int16).numpy().view(np.uint16)
                self.assertTrue((np.asarray(out) == expected).all())

    def test_strides(self):
        """[heads][tokens][dim] of a model, transposed: no copy."""
        k, v, q = self.given(torch.float32)
        expected = self.cache.new_sequence().prefill(0, k, v, q)
        moved = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v, q)]
        self.assertFalse(moved[0].is_contiguous())
        out, lse = torch.empty(Q, 100, D).transpose(0, 1), torch.empty(100, Q)
        result = self.cache.new_sequence().prefill(0, *moved, out, lse=lse)
        self.assertIs(result, out)
        self.assertTrue(torch.equal(out, expected))
        self.assertTrue(torch.isfinite(lse).all())

    def test_refused(self):
        s = self.cache.new_sequence()
        k, v, _ = self.given(torch.float32)
        for bad, error, text in (
            (k.double(), kvq.ArgumentError, "k is torch.float64"),
            (k.to_sparse(), kvq.ArgumentError, "torch.sparse_coo"),
            (torch.empty(1, KV, D, device="meta"), kvq.UnsupportedError, "k is on meta; a kvq.Cache takes tensors of the CPU"),
            (torch.zeros(1, 1, D).expand(3, KV, D), kvq.ArgumentError, "share memory"),
        ):
            with self.assertRaisesRegex(error, text):
                s.append(0, bad, v)
        if torch.cuda.is_available():
            with self.assertRaisesRegex(kvq.UnsupportedError, r"k is on cuda:0"):
                s.append(0, k.cuda(), v.cuda())
        s.append(0, torch.empty(0, KV, D), torch.empty(0, KV, D))
        self.assertEqual(len(s), 0)


if __name__ == "__main__":
    unittest.main()
