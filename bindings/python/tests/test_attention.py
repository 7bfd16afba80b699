"""Attention against double precision: formats, masks, dtypes, strides, batches, drafts, rings."""
import unittest

import numpy as np
from support import attention, generator

import kvq
from kvq import press

LAYERS, KV, Q, D, DV = 1, 2, 6, 48, 32


class Base(unittest.TestCase):
    def setUp(self):
        self.rng = generator(self.id())

    def tensor(self, n, heads, dim=D, dtype=np.float32):
        return self.rng.standard_normal((n, heads, dim)).astype(dtype)

    def cache(self, keys="fp32", values=None, **others):
        others = {"value_dim": DV, "window": "fp32", "page_tokens": 32, **others}
        return kvq.Cache(LAYERS, KV, D, keys, values, **others)

    def filled(self, n, *arguments, **others):
        """A sequence of n tokens with its keys and values."""
        s = self.cache(*arguments, **others).new_sequence()
        k, v = self.tensor(n, KV), self.tensor(n, KV, DV)
        s.append(0, k, v)
        return s, k, v

    def expect(self, out, expected, tolerance=1e-5):
        self.assertEqual(out.shape, expected.shape)
        worst = np.abs(np.asarray(out, dtype=np.float64) - expected).max()
        self.assertLessEqual(worst, tolerance)


class OtherMemory(Base):
    def test_rows_of_other_systems(self):
        blocks, block_tokens, tokens = 12, 16, 150
        for name, scale, dim in (("fp8", 0.5, 48), ("q8_0", 1.0, 64), ("nvfp4", 0.25, 48), ("mxfp8", 1.0, 64)):
            of = kvq.Format(name, "key")
            k, v = (self.tensor(blocks * block_tokens, KV, dim) for _ in range(2))
            held, memory = [], []
            for x in (k, v):
                page = np.frombuffer(of.quantize(x / np.float32(scale)), np.uint8)  # a head after the other
                got = np.empty_like(x)
                held.append(scale * of.dequantize(page.tobytes(), got))
                groups = {"nvfp4": dim // 16, "mxfp8": dim // 32}.get(name, 0)
                rows = page.size // (KV * blocks * block_tokens) - groups
                page = page.reshape(KV, -1)
                numbers = page[:, : rows * blocks * block_tokens].reshape(KV, blocks, block_tokens, rows)
                scales = page[:, rows * blocks * block_tokens :].reshape(KV, blocks, block_tokens, groups)
                memory.append([np.ascontiguousarray(part.transpose(1, 2, 0, 3)) for part in (numbers, scales)])
            table = self.rng.permutation(blocks)
            order = (table[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)[:tokens]
            q = self.tensor(2, Q, dim)
            expected, lse = attention(q, held[0][order], held[1][order])
            most = 1e-5 * np.abs(expected).max()
            if name in ("q8_0", "nvfp4"):
                # With AVX-512 VNNI these are multiplied as codes, by queries and weights of 16 bits: twice the standard
                # deviation of attend_rows.hpp, where sum p^2 |k|^2 (v - out)^2 is at most max p max|k|^2 max|v|^2.
                keys = np.repeat(held[0][order], Q // KV, axis=1)
                p = np.exp((np.einsum("mhd,nhd->mhn", q, keys) * dim**-0.5).max(axis=2) - lse).max()
                of_q = np.abs(q).max() * dim**-0.5 * np.linalg.norm(keys, axis=2).max() * p**0.5
                amplitude = np.abs(held[1]).max()
                most += 2 * amplitude * np.hypot(of_q, p * tokens**0.5) / 112625
            for layout in ("NHD", "HND"):
                views = [
                    [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if layout == "HND" else x for x in parts]
                    for parts in memory
                ]
                sides = [
                    kvq.Rows(name, numbers, order=layout, tensor_scale=scale, scales=scales if scales.size else None)
                    for numbers, scales in views
                ]
                out = kvq.attend_rows(*sides, q, tokens=tokens, block_table=table, threads=kvq.Threads(2))
                self.expect(out, expected, most)
        self.records_of_latents()
        self.scales_of_heads()
        self.memory_of_mlx()
        self.copies_of_rows()
        for name, given in (("data", {}), ("scales", {"scales": [[1]]})):
            with self.assertRaisesRegex(TypeError, f"{name} is a list, neither a numpy array"):
                kvq.Rows("fp8", [[1, 2]] if name == "data" else memory[0][0], **given)
        with self.assertRaisesRegex(kvq.ArgumentError, r"NHD in blocks: a pool of tokens is x\[:, None\]"):
            kvq.Rows("q8_0", memory[0][0][0])
        with self.assertRaisesRegex(kvq.ArgumentError, "takes no scale of the tensor, but got 0.5"):
            kvq.Rows("q8_0", memory[0][0], tensor_scale=0.5)
        with self.assertRaisesRegex(kvq.ArgumentError, "std4 is no format of rows"):
            kvq.Rows("std4", memory[0][0])
        with self.assertRaisesRegex(kvq.ArgumentError, "but 32 channels take 32, 1 and 0$"):
            kvq.attend_rows(*sides, self.tensor(1, Q, 32), tokens=tokens)
        few = kvq.Rows("nvfp4", memory[0][0][..., :36], scales=memory[0][0][..., :4])
        with self.assertRaisesRegex(kvq.ArgumentError, "have 36 bytes, 4 of scales .* 64 channels take 32, 4 and 0"):
            kvq.attend_rows(few, few, q, tokens=tokens)
        with self.assertRaisesRegex(kvq.ArgumentError, "fp8, which has no scales beside the rows"):
            of = kvq.Rows("fp8", memory[0][0], scales=memory[0][0][..., :0])
            kvq.attend_rows(of, of, q, tokens=tokens)
        with self.assertRaisesRegex(TypeError, "block_table is no flat list of integers"):
            kvq.attend_rows(*sides, q, tokens=16, block_table=np.zeros((3, 12), np.int32))
        with self.assertRaisesRegex(kvq.ArgumentError, "block 0 of the table is 12, but the memory has 12 blocks"):
            kvq.attend_rows(*sides, q, tokens=16, block_table=[12])


    def records_of_latents(self):
        """Pages of SGLang and vLLM: mla-584 with its scales behind the rows of a page, padded to 576 bytes."""
        blocks, block_tokens, tokens = 4, 20, 70
        table = self.rng.permutation(blocks)
        order = (table[:, None] * block_tokens + np.arange(block_tokens)).reshape(-1)[:tokens]
        layouts = (("mla-656", 576, 512, 656, 0), ("mla-584", 512, 512, 576, 8), ("int4-token-head", 128, 128, 68, 0),
                   ("index-132", 128, 128, 128, 4))
        for name, dim, value_dim, row, beside in layouts:
            page_bytes = (row + beside) * block_tokens
            if name == "mla-584":
                page_bytes = -(-page_bytes // 576) * 576
            of = kvq.Format(name, "key")
            pages, held = np.zeros((blocks, page_bytes), np.uint8), np.empty((blocks * block_tokens, 1, dim), np.float32)
            for b in range(blocks):
                x = self.tensor(block_tokens, 1, dim)
                page = np.frombuffer(of.quantize(x), np.uint8)
                pages[b, : min(page.size, page_bytes)] = page[:page_bytes]
                of.dequantize(page.tobytes(), held[b * block_tokens : (b + 1) * block_tokens])
            behind = row * block_tokens
            data = pages[:, :behind].reshape(blocks, block_tokens, 1, row)
            scales = pages[:, behind : behind + beside * block_tokens].reshape(blocks, block_tokens, 1, beside)
            latents = kvq.Rows(name, data, scales=scales if beside else None)
            q = self.tensor(3, 8, dim)
            out = kvq.attend_rows(latents, latents, q, tokens=tokens, block_table=table, value_dim=value_dim)
            self.expect(out, attention(q, held[order], held[order][..., :value_dim])[0], 2e-5)
            if name == "mla-656":  # selected tokens, one query: blocks of one token
                chosen, pool = self.rng.permutation(order)[:25], kvq.Rows(name, data.reshape(-1, 1, 1, row))
                out = kvq.attend_rows(pool, pool, q[:1], tokens=25, block_table=chosen, value_dim=value_dim,
                                      mods=kvq.Mods(direction="cross"))
                self.expect(out, attention(q[:1], held[chosen], held[chosen][..., :value_dim])[0], 2e-5)
        with self.assertRaisesRegex(kvq.ArgumentError, "index-132 has 128 channels, but head_dim is 64"):
            kvq.attend_rows(latents, latents, self.tensor(1, 8, 64), tokens=tokens)
        with self.assertRaisesRegex(kvq.ArgumentError, "keys are index-132, whose scales lie beside the rows, but scales is null"):
            few = kvq.Rows(name, data)
            few._row = (128, 4, 0)
            kvq.attend_rows(few, few, q, tokens=tokens)
        with self.assertRaisesRegex(kvq.ArgumentError, "mla-656 takes no scale of the tensor, but got 2"):
            kvq.Rows("mla-656", data, tensor_scale=2.0)

    def memory_of_mlx(self):
        """A QuantizedKVCache: [batch][heads][capacity] of uint32 words, fp16 scales and biases."""
        batch, capacity, tokens, dim, n = 2, 100, 90, 128, 4
        words, scales, biases = [], [], []
        for _ in range(2):
            words.append(self.rng.integers(0, 2**32, (batch, KV, capacity, dim // 8), np.uint32))
            scales.append(self.rng.uniform(-0.1, 0.1, (batch, KV, capacity, dim // 64)).astype(np.float16))
            biases.append(self.rng.standard_normal(scales[-1].shape).astype(np.float16))
        held = []
        for w, s, b in zip(words, scales, biases):
            codes = (w[..., None] >> np.arange(0, 32, 4, np.uint32) & 15).reshape(batch, KV, capacity, dim // 64, 64)
            held.append((codes * s.astype(np.float64)[..., None] + b[..., None]).reshape(batch, KV, capacity, dim))
        sides = [kvq.Rows("mlx-4-g64", w.view(np.uint8), order="HND", scales=s.view(np.uint8), biases=b.view(np.uint8))
                 for w, s, b in zip(words, scales, biases)]
        q = self.tensor(n, Q, dim)
        for row in range(batch):  # a row of the batch is one block
            k, v = (x[row, :, :tokens].transpose(1, 0, 2) for x in held)
            self.expect(kvq.attend_rows(*sides, q, tokens=tokens, block_table=[row]), attention(q, k, v)[0])
        upper = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (s, b)]  # a model in bfloat16
        exact = [(x.astype(np.uint32) << 16).view(np.float32)[..., None] for x in upper]
        rows = kvq.Rows("mlx-4-g64-bf16", w.view(np.uint8), order="HND", scales=upper[0].view(np.uint8), biases=upper[1].view(np.uint8))
        codes = (w[..., None] >> np.arange(0, 32, 4, np.uint32) & 15).reshape(batch, KV, capacity, dim // 64, 64)
        of_codes = (codes * exact[0] + exact[1]).reshape(batch, KV, capacity, dim)[1, :, :tokens].transpose(1, 0, 2)
        self.expect(kvq.read_rows(rows, np.empty((tokens, KV, dim), np.float32), block_table=[1]), of_codes, 1e-6)
        of = [w.view(np.uint8), s.view(np.uint8), b.view(np.uint8)]
        with self.assertRaisesRegex(kvq.ArgumentError, r"biases have shape \[2, 2, 100, 4\], beside no scales; both must be"):
            kvq.Rows("mlx-4-g64", of[0], order="HND", biases=of[2])
        with self.assertRaisesRegex(kvq.ArgumentError, "with other strides; both must be laid out alike"):
            kvq.Rows("mlx-4-g64", of[0], order="HND", scales=of[1], biases=of[2][:, ::-1])
        one = [np.ascontiguousarray(x[1:]) for x in sides[0]._held]
        one[2] = np.lib.stride_tricks.as_strided(one[2], one[2].shape, (7, *one[2].strides[1:]))  # nothing lies 7 bytes on
        alone = kvq.Rows("mlx-4-g64", one[0], order="HND", scales=one[1], biases=one[2])
        self.expect(kvq.attend_rows(alone, alone, q, tokens=tokens),
                    kvq.attend_rows(sides[0], sides[0], q, tokens=tokens, block_table=[1]), 1e-6)
        few = kvq.Rows("mlx-4-g64", of[0], order="HND", scales=of[1])
        with self.assertRaisesRegex(kvq.ArgumentError, "64 bytes, 4 of scales and 0 of biases .* 128 channels take 64, 4 and 4"):
            kvq.attend_rows(few, few, q, tokens=tokens)

    def copies_of_rows(self):
        """Pages of FP8 to pages of another size, to q8_0 cells, to a cache of kvq and back."""
        tokens, dim, scale = 50, 64, 0.5
        pages = np.zeros((8, 16, KV, dim), np.uint8)
        fp8, table, x = kvq.Rows("fp8", pages, tensor_scale=scale), self.rng.permutation(8), self.tensor(tokens, KV, dim)
        self.assertEqual(kvq.write_rows(fp8, x[:20], block_table=table), 0)
        self.assertEqual(kvq.write_rows(fp8, x[20:], first=20, block_table=table, threads=kvq.Threads(2)), 0)
        of = kvq.Format("fp8", "key")
        held = scale * of.dequantize(of.quantize(x / np.float32(scale)), np.empty_like(x))
        read = kvq.read_rows(fp8, np.empty_like(x), block_table=table)
        self.assertTrue((read == held).all())
        self.assertTrue((kvq.read_rows(fp8, np.empty((5, KV, dim), np.float16), first=31, block_table=table) == held[31:36]).all())
        heads_first = np.zeros((2, KV, 64, dim), np.uint8)
        kvq.convert_rows(fp8, kvq.Rows("fp8", heads_first, order="HND", tensor_scale=scale), tokens=tokens, dim=dim,
                         source_table=table, target_table=[1])
        order = (table[:, None] * 16 + np.arange(16)).reshape(-1)[:tokens]
        self.assertTrue((heads_first[1, :, :tokens].transpose(1, 0, 2) == pages.reshape(-1, KV, dim)[order]).all())
        cells = np.zeros((60, 1, KV, dim // 32 * 34), np.uint8)
        q8_0, of_cells = kvq.Rows("q8_0", cells), self.rng.permutation(60)
        self.assertEqual(kvq.convert_rows(fp8, q8_0, tokens=tokens, dim=dim, source_table=table, target_table=of_cells), 0)
        rows = np.frombuffer(kvq.Format("q8_0", "key").quantize(held), np.uint8).reshape(KV, -1)[:, : tokens * 68].reshape(KV, tokens, 68)
        self.assertTrue((cells[of_cells[:tokens], 0] == rows.transpose(1, 0, 2)).all())
        sequence = kvq.Cache(1, KV, dim, "std4", page_tokens=32, sinks=0, recent=0).new_sequence()
        sequence.append(0, read, read)
        back = np.empty_like(x)
        sequence.dequantize(0, "key", back)
        x[3, 0, 7] = np.nan
        self.assertEqual(kvq.write_rows(fp8, x, block_table=table), 1)
        kvq.write_rows(fp8, back, block_table=table)
        error = np.square(kvq.read_rows(fp8, np.empty_like(x), block_table=table) - held).sum() / np.square(held).sum()
        self.assertTrue(0 < error < 1.2e-2, error)
        with self.assertRaisesRegex(kvq.ArgumentError, "50 tokens need 4 blocks of 16, but the table has 3"):
            kvq.read_rows(fp8, back, block_table=table[:3])
        with self.assertRaisesRegex(TypeError, "target is a ndarray, not a kvq.Rows"):
            kvq.convert_rows(fp8, pages, tokens=tokens, dim=dim)
        with self.assertRaisesRegex(kvq.ArgumentError, "tokens -1 to 49 of a sequence of 49"):
            kvq.read_rows(fp8, back, first=-1, block_table=table)
        with self.assertRaisesRegex(kvq.ArgumentError, "rows have 64 bytes, 0 of scales .* but 32 channels take 32, 0 and 0"):
            kvq.write_rows(fp8, self.tensor(1, KV, 32))
        pages.flags.writeable = False
        with self.assertRaisesRegex(kvq.ArgumentError, "data of the rows cannot be written"):
            kvq.write_rows(kvq.Rows("fp8", pages), x)

    def scales_of_heads(self):
        scales = self.rng.uniform(0.5, 2, KV).astype(np.float32)
        numbers = self.rng.integers(0, 126, (3, 16, KV, 32), np.uint8)
        page = np.concatenate([numbers.transpose(2, 0, 1, 3).reshape(KV, -1)]).tobytes()
        held = kvq.Format("fp8", "key").dequantize(page, np.empty((48, KV, 32), np.float32)) * scales[:, None]
        rows = kvq.Rows("fp8", numbers, tensor_scale=scales)
        q = self.tensor(1, Q, 32) / 100
        expected = attention(q, held, held)[0]
        self.expect(kvq.attend_rows(rows, rows, q, tokens=48), expected, 1e-5 * np.abs(expected).max())
        with self.assertRaisesRegex(kvq.ArgumentError, f"fp8 has scales for 1 layers of 3 heads, but there are 1 of {KV}"):
            few = kvq.Rows("fp8", numbers, tensor_scale=[1.0, 2.0, 3.0])
            kvq.attend_rows(few, few, q, tokens=48)


class Dropped(Base):
    """Tokens that are dropped head by head (kvq.press)."""

    def test_half_of_a_prompt(self):
        n, m = 300, 8
        s, k, v = self.filled(0, "std4", sinks=4, recent=16)[0], self.tensor(n, KV), self.tensor(n, KV, DV)
        full = s.fork()
        s.hold()
        for sequence in (s, full):
            for first in range(0, n, 100):
                sequence.append(0, k[first:first + 100], v[first:first + 100])
        q = self.tensor(m, Q)
        mass = s.attention_mass(0, q)
        self.assertEqual(mass.shape, (KV, n))
        self.assertAlmostEqual(float(mass.sum()), m * Q, delta=1e-3)
        rows = np.zeros((KV, n))  # V one-hot: outputs are weights
        for h in range(KV):
            one_hot = np.broadcast_to(np.eye(n)[:, None, :], (n, 1, n))
            of = q[:, h * (Q // KV):(h + 1) * (Q // KV)]
            rows[h] = attention(of, k[:, h:h + 1], one_hot)[0].sum((0, 1))
        self.assertLess(np.abs(mass - rows).max(), 1e-3)

        scores = press.snapkv(s, 0, q)
        self.assertEqual(press.retain(s, 0, scores, 0.5, recent=m), n // 2)
        self.assertEqual(s.gap(0), (4, 4 + n // 2))
        self.assertEqual(len(s), n)
        self.assertLess(s.usage().bytes, 0.65 * full.usage().bytes)
        lists = [sorted(range(4)) + [t for t in range(4, n)][-(n // 2 - 4):] for _ in range(KV)]
        kept = press.best(full, 0, press.snapkv(full, 0, q), n // 2, m)
        self.assertTrue(all(of[:4] == lists[0][:4] and of[-m:] == list(range(n - m, n)) for of in kept))
        one = self.tensor(1, Q)
        index = np.array(press.best(full, 0, scores, n // 2, m))
        want = attention(one, np.stack([k[index[h], h] for h in range(KV)], 1),
                         np.stack([v[index[h], h] for h in range(KV)], 1))[0]
        self.expect(s.attend(0, one), want, 0.2)  # of 4 bits
        for refused in (lambda: s.trim(200), lambda: s.retain(0, [[0, 1], [0, 1, 2]]), lambda: s.retain(0, [[1, 2]] * KV)):
            self.assertRaises(kvq.ArgumentError, refused)

    def test_scores(self):
        s, k, v = self.filled(200, sinks=4)
        norms = np.linalg.norm(k.astype(np.float64), axis=2).T
        self.assertLess(np.abs(press.knorm(s, 0, k) + norms).max(), 1e-4)
        q = self.tensor(50, Q)
        scores = press.expected_attention(s, 0, q)
        of = q[:, :Q // KV].reshape(-1, D).astype(np.float64) * D**-0.5
        centred = of - of.mean(0)
        want = k[9, 0] @ of.mean(0) + 0.5 * k[9, 0] @ (centred.T @ centred / len(of)) @ k[9, 0] + np.log(np.linalg.norm(v[9, 0]))
        self.assertAlmostEqual(float(scores[0, 9]), float(want), delta=1e-3)
        self.assertEqual(press.retain(s, 0, scores, 100, recent=10), 100)
        self.assertEqual(press.retain(s, 0, press.knorm(s, 0, k), 0.5, recent=10), 50)
        self.assertEqual(press.retain(s, 0, press.knorm(s, 0, k), np.int64(40)), 40)
        for refused in (lambda: press.retain(s, 0, scores, 1.5), lambda: press.retain(s, 0, scores, float("nan")),
                        lambda: press.best(s, 0, scores, 20, -1), lambda: press.snapkv(s, 0, q, width=0)):
            self.assertRaises(kvq.ArgumentError, refused)
        self.assertEqual(press.pyramid(3, 100), [150, 100, 50])


class Selection(Base):
    def test_token_ranges(self):
        s, k, v = self.filled(200)
        q = self.tensor(3, Q)
        ranges = [(3, 40), (64, 65), (90, 200)]
        seen = np.zeros((3, 200), bool)
        for begin, end in ranges:
            seen[:, begin:end] = True
        rows = []

        def mask(scores, query, first_key):
            scores[~seen[query - 197, first_key : first_key + len(scores)]] = -np.inf
            rows.append(query)

        expected = s.attend(0, q, mods=kvq.Mods(mask_row=mask))
        self.assertTrue((s.attend(0, q, mods=kvq.Mods(token_ranges=ranges)) == expected).all())
        self.assertTrue(rows)
        seen[:] = False
        seen[0, 3:40] = seen[2, 64:65] = seen[2, 190:200] = True
        expected = s.attend(0, q, mods=kvq.Mods(mask_row=mask))
        of_queries = kvq.Mods(token_ranges=[[(3, 40)], [], [(64, 65), (190, 200)]], range_first_query=197)
        out = s.attend(0, q, mods=of_queries)
        self.assertTrue((out == expected).all())
        self.assertTrue((out[1] == 0).all())
        with self.assertRaisesRegex(kvq.ArgumentError, "range 1 of tokens is .3, 5."):
            s.attend(0, q, mods=kvq.Mods(token_ranges=[(0, 4), (3, 5)]))
        with self.assertRaisesRegex(kvq.ArgumentError, "empty"):
            kvq.Mods(token_ranges=[])

    def test_selected_pages(self):
        """Bit for bit attention under a mask that shows what was read."""
        s, k, v = self.filled(500, "kivi-4-g32", sinks=2, recent=8)
        q = self.tensor(1, Q)
        mods = kvq.Mods(selected_tokens=64)
        selection, skipping = mods.report(most_runs=100)
        out = s.attend(0, q, mods=mods)
        self.assertLess(selection.read, selection.pages)
        self.assertEqual(len(selection.chosen), selection.chosen_count)
        for head in range(KV):
            read = [(r.begin, r.end) for r in selection.chosen if r.kv_head == head]
            self.assertGreater(len(read), 1)
            shown = s.attend(0, q, mods=kvq.Mods(token_ranges=read))
            of_head = slice(head * Q // KV, (head + 1) * Q // KV)
            self.assertTrue((shown[:, of_head] == out[:, of_head]).all())
        read = selection.read
        s.attend(0, q, mods=mods)  # reports add up
        self.assertEqual((selection.read, skipping.rows), (2 * read, 0))
        with self.assertRaisesRegex(kvq.ArgumentError, "selected_tokens is 0"):
            kvq.Mods(selected_tokens=0)

    def test_skipped_values(self):
        s, k, v = self.filled(500, "std4", sinks=2, recent=8)
        q = self.tensor(1, Q)
        mods = kvq.Mods(skipped_mass=0.4)
        _, skipping = mods.report()
        out, exact = s.attend(0, q, mods=mods), s.attend(0, q)
        self.assertGreater(skipping.skipped, 0)
        self.assertEqual(skipping.rows, Q)
        self.assertLessEqual(skipping.most_left_out, 0.4)
        largest = np.abs(s.dequantize(0, "value", np.empty_like(v))).max()
        self.assertTrue((np.abs(out - exact) <= 2 * skipping.most_left_out * largest + 1e-3).all())
        self.assertTrue((out != exact).any())

    def test_two_planes(self):
        s, _, _ = self.filled(500, "nested8,nested4", sinks=2, recent=8)
        q = self.tensor(1, Q)
        both, upper = s.attend(0, q), s.attend(0, q, mods=kvq.Mods(upper_only=True))
        self.assertTrue((both != upper).any())
        whole, half = s.to_bytes(), s.to_bytes(upper_only=True)
        self.assertLess(len(half), 0.8 * len(whole))
        self.assertTrue((s.cache.from_bytes(half).attend(0, q) == upper).all())
        of = kvq.Format("nested8", "key")
        self.assertAlmostEqual(of.describe(64, D).bits, 4 + kvq.Format("nested4", "key").describe(64, D).bits)
        with self.assertRaisesRegex(kvq.ArgumentError, "nested8 .* has two planes"):
            of.page_bytes(64, KV, D)
        s.requantize("nested4", "nested4")
        self.assertTrue((s.attend(0, q) == upper).all())


class Attend(Base):
    def test_prefill_and_decode(self):
        s = self.cache().new_sequence()
        ks, vs = [], []
        for n in (70, 1, 1, 33, 1):
            k, v, q = self.tensor(n, KV), self.tensor(n, KV, DV), self.tensor(n, Q)
            lse = np.empty((n, Q), np.float32)
            out = s.prefill(0, k, v, q, lse=lse)
            ks.append(k)
            vs.append(v)
            expected, expected_lse = attention(q, np.concatenate(ks), np.concatenate(vs))
            self.expect(out, expected)
            self.expect(lse, expected_lse)
        self.assertEqual((len(s), s.tokens(0), s.tokens()), (106, 106, 106))

    def test_quantized_pages(self):
        """Over what the pages hold: dequantized keys and values."""
        for keys, values in (("std4", None), ("kivi-4-g32", "int8"), ("affine-3-g16", "affine-2-g32"), ("low3", None)):
            with self.subTest(keys=keys):
                s, k, v = self.filled(200, keys, values, sinks=2, recent=8, statistics_tokens=64)
                held_k = s.dequantize(0, "key", np.empty_like(k))
                held_v = s.dequantize(0, "value", np.empty_like(v))
                self.assertGreater(np.abs(held_k - k).max(), 1e-3)
                self.assertTrue((held_k[:2] == k[:2]).all() and (held_k[-8:] == k[-8:]).all())
                q = self.tensor(3, Q)
                # 16-bit fixed-point queries and weights: about 2^-15 of the largest one.
                self.expect(s.attend(0, q), attention(q, held_k, held_v)[0], 1e-3)
                part = s.dequantize(0, "key", np.empty((5, KV, D), np.float32), first=100)
                self.assertTrue((part == held_k[100:105]).all())

    def test_masks_and_modifiers(self):
        s, k, v = self.filled(90)
        q = self.tensor(4, Q)
        slopes = np.exp2(-np.arange(1, Q + 1.0)).astype(np.float32)
        logits = self.rng.standard_normal(Q).astype(np.float32)
        starts = [0, 20, 61]
        document = np.searchsorted(starts, np.arange(90), side="right")
        for mods, how in (
            (dict(window=10), dict(visible=lambda i, j: i - 10 < j <= i)),
            (dict(window=10, window_sinks=3), dict(visible=lambda i, j: j <= i and (j > i - 10 or j < 3))),
            (dict(direction="bidirectional"), dict(visible=lambda i, j: True)),
            (dict(direction="cross"), dict(visible=lambda i, j: True)),
            (dict(prefix=88), dict(visible=lambda i, j: j <= max(i, 87))),
            (dict(document_starts=starts), dict(visible=lambda i, j: j <= i and document[i] == document[j])),
            (dict(scale=0.3, softcap=2.0), dict(scale=float(np.float32(0.3)), softcap=2.0)),
            (dict(alibi_slopes=slopes), dict(bias=lambda h, i, j: -slopes[h] * abs(i - j))),
            (dict(sink_logits=logits), dict(sink_logits=logits.astype(float))),
            (dict(window=30, sink_logits=list(logits)),
             dict(visible=lambda i, j: i - 30 < j <= i, sink_logits=logits.astype(float))),
        ):
            with self.subTest(mods=mods):
                lse = np.empty((4, Q), np.float32)
                out = s.attend(0, q, mods=kvq.Mods(**mods), lse=lse)
                expected, expected_lse = attention(q, k, v, **how)
                self.expect(out, expected)
                self.expect(lse, expected_lse)

    def test_own_functions(self):
        s, k, v = self.filled(90)
        q = self.tensor(4, Q)
        pages = []

        def row(scores, query, first_key):
            keys = first_key + np.arange(len(scores))
            scores[(keys % 3 == query % 3) | (keys < 32)] = -np.inf

        def page(first_query, last_query, first_key, end_key):
            pages.append((first_key, end_key))
            return "none" if end_key <= 32 else "some"

        def change(scores, head, query, first_key):
            scores += 0.01 * head * (first_key + np.arange(len(scores), dtype=np.float32))

        mods = kvq.Mods(mask_row=row, mask_page=page, score_row=change)
        expected, _ = attention(q, k, v, visible=lambda i, j: j <= i and j % 3 != i % 3 and j >= 32,
                                bias=lambda h, i, j: 0.01 * h * j)
        out = s.attend(0, q, mods=mods)
        self.assertTrue(any(end <= 32 for _, end in pages))
        self.expect(out, expected, 2e-5)

    def test_exceptions_of_own_functions(self):
        s, _, _ = self.filled(50)
        q = self.tensor(1, Q)

        def raises(*_):
            raise KeyError("of the mask")

        for name in ("mask_row", "score_row"):
            for threads in (None, kvq.Threads(2)):
                with self.assertRaisesRegex(KeyError, "of the mask"):
                    s.attend(0, q, mods=kvq.Mods(**{name: raises}), threads=threads)
        with self.assertRaisesRegex(kvq.ArgumentError, "mask_page is 'perhaps', none of none, some, all"):
            s.attend(0, q, mods=kvq.Mods(mask_row=lambda *_: None, mask_page=lambda *_: "perhaps"))
        s.attend(0, q, mods=kvq.Mods(mask_row=lambda *_: None))

    def test_dtypes(self):
        """Inputs of any dtype, and outputs rounded once."""
        k, v, q = self.tensor(40, KV), self.tensor(40, KV, DV), self.tensor(3, Q)
        bits = {t: lambda x: x.astype(np.float16) for t in ("float16",)}
        bits["bfloat16"] = lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)
        exact = {"float16": lambda x: x.astype(np.float32),
                 "bfloat16": lambda x: (x.astype(np.uint32) << 16).view(np.float32)}
        for name in bits:
            with self.subTest(dtype=name):
                given = [bits[name](x) for x in (k, v, q)]
                wide = [exact[name](x) for x in given]
                s, w = self.cache().new_sequence(), self.cache().new_sequence()
                out, expected = s.prefill(0, *given), w.prefill(0, *wide)
                self.assertEqual(out.dtype, given[2].dtype)
                self.assertTrue((s.attend(0, given[2], np.empty((3, Q, DV), np.float32)) == expected).all())
                step = 2.0**-10 if name == "float16" else 2.0**-7
                self.expect(exact[name](out), expected, step * np.abs(expected).max())

    def test_strides(self):
        """[heads][tokens][dim] transposed, a slice, a reversed view: no copy, the same bits."""
        k, v, q = self.tensor(20, KV), self.tensor(20, KV, DV), self.tensor(20, Q)
        expected = self.cache().new_sequence().prefill(0, k, v, q)
        by_head = [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in (k, v, q)]
        wide = [np.concatenate([x, np.full_like(x, np.nan)], axis=1)[:, : x.shape[1]] for x in (k, v, q)]
        backward = [x[::-1].copy()[::-1] for x in (k, v, q)]
        for given in (by_head, wide, backward):
            self.assertTrue((self.cache().new_sequence().prefill(0, *given) == expected).all())
        memory = np.full((Q, 20, DV + 3), 7, np.float32)
        out = memory[:, :, :DV].transpose(1, 0, 2)
        result = self.cache().new_sequence().prefill(0, k, v, q, out)
        self.assertIs(result, out)
        self.assertTrue((out == expected).all() and (memory[:, :, DV:] == 7).all())
        # One row of all heads, many times: heads have a stride, tokens none.
        same = np.broadcast_to(k[:1], k.shape)
        self.assertTrue((self.cache().new_sequence().prefill(0, same, v, q)
                         == self.cache().new_sequence().prefill(0, same.copy(), v, q)).all())

    def test_no_queries(self):
        """A chunk that needs no output, alone and beside others; numpy gives arrays without elements the
        strides 0, 0, 0."""
        k, v = self.tensor(7, KV), self.tensor(7, KV, DV)
        none = np.empty((0, Q, D), np.float32)
        cache = self.cache()
        a, b = cache.new_sequence(), cache.new_sequence()
        self.assertEqual(a.prefill(0, k, v, none).shape, (0, Q, DV))
        self.assertEqual(a.attend(0, none, lse=np.empty((0, Q), np.float32)).shape, (0, Q, DV))
        q = self.tensor(1, Q)
        outs = cache.prefill(0, [a, b], [k, k], [v, v], [none, q])
        self.assertEqual([x.shape for x in outs], [(0, Q, DV), (1, Q, DV)])
        self.expect(outs[1], attention(q, k, v)[0])
        self.assertEqual((len(a), len(b)), (14, 7))
        a.append(0, k[:0], v[:0])
        self.assertEqual(a.dequantize(0, "key", np.empty((0, KV, D), np.float32)).shape, (0, KV, D))

    def test_threads_and_workspace(self):
        s, _, _ = self.filled(500, "std4", recent=16)
        q = self.tensor(2, Q)
        expected = s.attend(0, q)
        workspace = kvq.Workspace()
        workspace.reserve(s.cache.workspace_bytes(500, Q, 2, 3))
        size = workspace.bytes
        with kvq.Threads(3) as threads:
            out = s.attend(0, q, threads=threads, workspace=workspace)
        self.assertTrue((out == expected).all())
        self.assertEqual(workspace.bytes, size)

    def test_batch(self):
        cache = self.cache("std4", recent=16)
        lengths, new = (5, 130, 64), (1, 7, 1)
        alone, together, ks, vs, qs = [], [], [], [], []
        for n, m in zip(lengths, new):
            s = cache.new_sequence()
            s.append(0, self.tensor(n, KV), self.tensor(n, KV, DV))
            alone.append(s)
            together.append(s.fork())
            ks.append(self.tensor(m, KV))
            vs.append(self.tensor(m, KV, DV))
            qs.append(self.tensor(m, Q))
        mods = [None, kvq.Mods(window=20), kvq.Mods(softcap=5.0)]
        lse = [np.empty((m, Q), np.float32) for m in new]
        outs = cache.prefill(0, together, ks, vs, qs, mods=mods, lse=lse)
        for i, s in enumerate(alone):
            own = np.empty((new[i], Q), np.float32)
            self.assertTrue((s.prefill(0, ks[i], vs[i], qs[i], mods=mods[i], lse=own) == outs[i]).all())
            self.assertTrue((own == lse[i]).all())
        outs = cache.attend(0, together, qs, mods=kvq.Mods(window=9), threads=kvq.Threads(2))
        for i, s in enumerate(alone):
            self.assertTrue((s.attend(0, qs[i], mods=kvq.Mods(window=9)) == outs[i]).all())

    def test_drafts(self):
        s, k, v = self.filled(40)
        parents = [-1, 0, 0, 1, -1]
        dk, dv, q = self.tensor(5, KV), self.tensor(5, KV, DV), self.tensor(5, Q)
        s.append_draft(0, dk, dv)
        out = s.attend(0, q, mods=kvq.Mods(tree_parents=parents, tree_first=40))

        def visible(i, j):
            while i >= 40:
                if i == j:
                    return True
                i = parents[i - 40] + 40 if parents[i - 40] >= 0 else -1
            return j < 40

        self.expect(out, attention(q, np.concatenate([k, dk]), np.concatenate([v, dv]), visible=visible)[0])
        s.keep(np.array([0, 1, 3]))
        self.assertEqual(len(s), 43)
        kept_k, kept_v = np.concatenate([k, dk[[0, 1, 3]]]), np.concatenate([v, dv[[0, 1, 3]]])
        self.expect(s.attend(0, q[:1]), attention(q[:1], kept_k, kept_v)[0])

    def test_ring(self):
        s, k, v = self.filled(30, sinks=2, recent=8)
        ring = kvq.Ring(s, 16, slack=4)
        fork = ring.fork()
        ks, vs = [k], [v]
        for n in (50, 1, 1, 60, 1):
            k, v, q = self.tensor(n, KV), self.tensor(n, KV, DV), self.tensor(n, Q)
            ks.append(k)
            vs.append(v)
            out = ring.prefill(0, k, v, q)
            expected, _ = attention(q, np.concatenate(ks), np.concatenate(vs),
                                    visible=lambda i, j: j <= i and (j > i - 16 or j < 2))
            self.expect(out, expected)
        self.assertEqual((ring.tokens(), fork.tokens(), len(s)), (143, 30, 30))
        self.assertGreater(ring.first_token(), 0)
        self.assertLess(len(ring.held()), 143)
        ring.trim(140)
        self.assertEqual(ring.tokens(0), 140)
        ring.append(0, k, v)
        with self.assertRaises(kvq.ArgumentError):
            ring.attend(0, q, mods=kvq.Mods(window=3))


if __name__ == "__main__":
    unittest.main()
