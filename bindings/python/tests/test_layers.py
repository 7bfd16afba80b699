"""Caches of models whose layers differ: shapes, windows and chunks, recurrent state."""
import gc
import random
import sys
import unittest
from unittest import mock

import numpy as np
from support import SEED, attention, generator

import kvq

OPTIONS = {"page_tokens": 32, "recent": 16, "rollback": 8}
PARTS = (kvq.StatePart("recurrent", heads=2, rows=8, columns=16),
         kvq.StatePart("conv", "bfloat16", rows=3, columns=40))


class Base(unittest.TestCase):
    def setUp(self):
        self.rng = generator(self.id())

    def tensor(self, n, heads, dim):
        return self.rng.standard_normal((n, heads, dim)).astype(np.float32)

    def append(self, s, n):
        """Random tokens for every layer with keys and values, and what its queries get."""
        out = []
        for i, of in enumerate(s.cache.layers):
            if of.kind != "state":
                out.append(s.prefill(i, self.tensor(n, of.kv_heads, of.head_dim), self.tensor(n, of.kv_heads, of.value_dim),
                                     self.tensor(n, 2 * of.kv_heads, of.head_dim)))
        return out

    def refused(self, text, function, *arguments, **others):
        with self.assertRaisesRegex(kvq.ArgumentError, "^kvq: .*" + text):
            function(*arguments, **others)


class Shapes(Base):
    def test_one_cache_per_shape(self):
        layers = [kvq.full_attention(2, 64), kvq.full_attention(kv_heads=1, head_dim=32, value_dim=64),
                  kvq.full_attention(4, 32)]
        mixed = kvq.Cache(layers, keys="std4", values="int8", **OPTIONS)
        self.assertEqual([(l.kv_heads, l.head_dim, l.value_dim) for l in mixed.layers],
                         [(2, 64, 64), (1, 32, 64), (4, 32, 32)])
        self.assertEqual(mixed.layers, kvq.Cache(iter(mixed.layers), keys="int8").layers)
        self.assertEqual((mixed.info().layers, mixed.info().kv_heads, mixed.info().value_dim), (3, 0, 0))
        single = [kvq.Cache(1, l.kv_heads, l.head_dim, "std4", "int8", value_dim=l.value_dim, **OPTIONS) for l in layers]
        s, others, seed = mixed.new_sequence(), [c.new_sequence() for c in single], self.rng.integers(2**31)
        for n in (70, 1, 45):
            self.rng = np.random.default_rng([seed, n])
            got = self.append(s, n)
            self.rng = np.random.default_rng([seed, n])
            for out, of in zip(got, others):
                self.assertTrue((out == self.append(of, n)[0]).all())
        for member in ("quantized", "window", "rollback", "tokens"):
            sizes = [getattr(of.usage(), member) for of in others]
            self.assertEqual(getattr(s.usage(), member), max(sizes) if member == "tokens" else sum(sizes))
        self.assertEqual(mixed.footprint(116).quantized, sum(c.footprint(116).quantized for c in single))
        self.assertGreaterEqual(kvq.Cache.budget(116, layers=layers, keys="std4", values="int8", chunk=70, **OPTIONS),
                                mixed.info().bytes_in_use)
        q = [self.tensor(1, 4, 64), self.tensor(2, 2, 64)]
        for out, x, of in zip(mixed.attend(0, [s, s.fork()], q), q, (s, s)):
            self.assertTrue((out == of.attend(0, x)).all())
        again = mixed.from_bytes(s.to_bytes())
        q = self.tensor(1, 2, 32)
        self.assertTrue((again.attend(1, q) == s.attend(1, q)).all())

    def test_short_way(self):
        short = kvq.Cache(3, 2, 32, "int8", **OPTIONS)
        listed = kvq.Cache([kvq.full_attention(2, 32)] * 3, keys="int8", **OPTIONS)
        self.assertEqual(short.layers, listed.layers)
        self.assertEqual((short.info(), short.footprint(500)), (listed.info(), listed.footprint(500)))

    def test_layer_formats(self):
        cache = kvq.Cache([kvq.full_attention(2, 64), kvq.full_attention(1, 32)], keys="std4",
                          layer_formats={1: ("int8", None)}, **OPTIONS)
        s = cache.new_sequence()
        self.append(s, 100)
        parts = [kvq.Cache(1, 2, 64, "std4", **OPTIONS), kvq.Cache(1, 1, 32, "int8", "std4", **OPTIONS)]
        self.assertEqual(s.usage().quantized, sum(c.footprint(100).quantized for c in parts))

    def test_errors(self):
        full = kvq.full_attention(2, 64)
        with self.assertRaisesRegex(TypeError, r"layers\[1\] is a dict, not a kvq.Layer"):
            kvq.Cache([full, {}])
        self.refused("at least 1 layer, got 0", kvq.Cache, [])
        self.refused("kv_heads, head_dim and value_dim must be 0, not 2, 64 and 0", kvq.Cache, [full], 2, 64)
        self.refused("between 1 and 65536 kv heads, got 0", kvq.Cache, 2)
        self.refused("layer 1, full attention of 2 x 0", kvq.Cache, [full, kvq.full_attention(2, 0)])
        self.refused("value_dim of layer 0 is 0", kvq.Cache, [kvq.full_attention(2, 64, 0)])
        self.refused("layer 1, sliding window of 0", kvq.Cache, [full, kvq.sliding_attention(0, 2, 64)])
        self.refused("layer 0, .* its queries see 9 sinks, the cache has 4", kvq.Cache,
                     [kvq.chunked_attention(64, 2, 64, sinks=9)])
        self.refused("kind is 'other', none of full, ", kvq.Cache, [kvq.Layer("other", 2, 64)])
        self.refused("layer 0, full attention of 2 x 64: it has a window of 3", kvq.Cache,
                     [kvq.Layer("full", 2, 64, window=3)])
        s = kvq.Cache([full, kvq.state_layer(PARTS)], keys="int8").new_sequence()
        x = self.tensor(1, 2, 64)
        for layer, text in ((1, "layer 1, state of 2 parts: it holds no keys and values"),
                            (2, "layer 2 is not among the 2"), (-1, "layer -1 is not")):
            self.refused(text, s.append, layer, x, x)
            self.refused(text, s.attend, layer, x)
            self.refused(text, s.cache.attend, layer, [s], [x])
        self.assertEqual(len(s), 0)


class Windows(Base):
    def test_what_queries_see(self):
        window, sinks = 20, 3
        cache = kvq.Cache([kvq.sliding_attention(window, 2, 32), kvq.sliding_attention(window, 1, 32, 16, sinks=sinks),
                           kvq.chunked_attention(window, 2, 32)], keys="fp32", window="fp32", **OPTIONS)
        sees = (lambda i, j: i - window < j <= i, lambda i, j: (i - window < j <= i) or (j < sinks and j <= i),
                lambda i, j: j <= i and i // window == j // window)
        s, held = cache.new_sequence(), [[], [], []]
        for n in (30, 1, 90, 7):
            for layer, of in enumerate(cache.layers):
                held[layer].append((self.tensor(n, of.kv_heads, of.head_dim), self.tensor(n, of.kv_heads, of.value_dim)))
                q = self.tensor(n, 2, 32)
                k, v = (np.concatenate(x) for x in zip(*held[layer]))
                np.testing.assert_allclose(s.prefill(layer, *held[layer][-1], q),
                                           attention(q, k, v, visible=sees[layer])[0], atol=2e-6)

    def test_pages_are_freed(self):
        full, window = kvq.full_attention(1, 32), kvq.sliding_attention(64, 1, 32)
        s, all_full = (kvq.Cache(layers, keys="int8", **OPTIONS).new_sequence()
                       for layers in ([full, window, window], [full] * 3))
        for of in (s, all_full):
            for _ in range(10):
                self.append(of, 100)
        self.assertEqual((s.tokens(), s.tokens(1)), (1000, 1000))
        one = all_full.usage().quantized // 3
        self.assertLess(one, s.usage().quantized)
        self.assertLess(s.usage().quantized, one * 3 // 2)
        self.assertEqual(s.usage().quantized, s.cache.footprint(1000).quantized)
        self.assertEqual((all_full.trim_limit(), all_full.trim(3)), (0, 0))
        limit = s.trim_limit()
        self.assertTrue(500 < limit <= 1000 - OPTIONS["rollback"], limit)
        self.refused(f"cannot trim to 500 tokens: layer 1, sliding window of 64, .* the limit is {limit}$", s.trim, 500)
        self.assertEqual(len(s), 1000)
        self.assertEqual((s.reach(limit), s.trim(limit), len(s)), (limit, 0, limit))
        self.assertEqual((s.trim(0), s.trim_limit(), len(s)), (0, 0, 0))


class Shared(Base):
    def test_sees_what_its_owner_saw(self):
        cache = kvq.Cache([kvq.full_attention(2, 32), kvq.sliding_attention(20, 1, 32, 16), kvq.shared_with(0),
                           kvq.shared_with(1)], keys="std4", **OPTIONS)
        self.assertEqual([(l.kind, l.owner, l.kv_heads, l.value_dim) for l in cache.layers[2:]],
                         [("shared", 0, 2, 32), ("shared", 1, 1, 16)])
        self.assertEqual(cache.layers, kvq.Cache(cache.layers, keys="std4").layers)
        s, both = cache.new_sequence(), cache.new_sequence()
        for n in (100, 1, 60):
            out = {}
            for owner, of in enumerate(cache.layers[:2]):
                k, v = self.tensor(n, of.kv_heads, 32), self.tensor(n, of.kv_heads, of.value_dim)
                q = self.tensor(n, 2, 32)
                out[owner] = s.prefill(owner, k, v, q)
                cache.prefill(owner, [both], [k], [v], [q])
                self.assertTrue((cache.prefill(owner + 2, [both], [None], [None], [q])[0] == out[owner]).all())
                out[owner + 2] = q
            for owner in (0, 1):
                self.assertTrue((s.prefill(owner + 2, None, None, out[owner + 2]) == out[owner]).all())
        self.assertEqual(s.usage(), both.usage())
        self.assertEqual(s.usage().bytes, cache.footprint(161).total)
        self.assertEqual(s.to_bytes(), both.to_bytes())
        q = self.tensor(3, 2, 32)
        self.assertTrue((cache.from_bytes(s.to_bytes()).attend(3, q) == s.attend(1, q)).all())
        self.refused("layer 3, shared with layer 1, 1 x 32 and 16: no chunk of that layer waits", s.prefill, 3, None, None, q)
        self.refused("layer 2, shared with layer 0, 2 x 32: it takes no keys and values", s.append, 2,
                     self.tensor(1, 2, 32), self.tensor(1, 2, 32))
        self.refused("layer 1, shared with layer 1", kvq.Cache, [kvq.full_attention(2, 32), kvq.shared_with(1)])


class Cross(Base):
    def test_another_text(self):
        cache = kvq.Cache([kvq.full_attention(1, 32), kvq.cross_layer(2, 32, 16)], keys="fp32", window="fp32", **OPTIONS)
        self.assertEqual((cache.layers[1].kind, cache.layers[1].value_dim), ("cross", 16))
        s = cache.new_sequence()
        k, v, q = self.tensor(90, 2, 32), self.tensor(90, 2, 16), self.tensor(100, 4, 32)
        s.append(1, k, v)
        self.assertEqual((s.tokens(), s.tokens(1)), (0, 90))
        x = self.tensor(40, 1, 32)
        s.append(0, x, x)
        self.assertEqual(s.usage().bytes, cache.footprint(40, cross_tokens=90).total)
        beams = [s.fork() for _ in range(3)]
        beams[1].trim(7)
        for of in beams:
            np.testing.assert_allclose(of.attend(1, q), attention(q, k, v, visible=lambda i, j: j >= 0)[0], atol=2e-6)
        self.assertEqual([b.tokens(1) for b in beams], [90] * 3)
        self.assertTrue((cache.from_bytes(s.to_bytes()).attend(1, q) == s.attend(1, q)).all())
        self.refused("layer 1, cross attention of 2 x 32 and 16: it has its 90 tokens", s.append, 1, k, v)
        self.refused("layer 1, cross attention .* takes no drafts", s.append_draft, 1, k[:2], v[:2])
        self.refused("layer 1, cross attention .* a prefix cache", kvq.PrefixCache, cache)
        self.assertGreater(cache.longest_context(10**6, cross_tokens=10), cache.longest_context(10**6, cross_tokens=1000))
        budget = [kvq.Cache.budget(40, cross_tokens=n, layers=cache.layers, keys="fp32") for n in (0, 90)]
        self.assertLess(budget[0], budget[1])


class Latent(Base):
    def test_keys_are_values(self):
        cache = kvq.Cache([kvq.latent_attention(64, 8)], keys="fp32,kivi-4-g32-fp16x8,kivi-4-g32-int8x8", window="fp32", **OPTIONS)
        layer = cache.layers[0]
        self.assertEqual((layer.kind, layer.head_dim, layer.value_dim, layer.window), ("latent", 72, 64, 8))
        s = cache.new_sequence()
        k, q = self.tensor(90, 1, 72), self.tensor(5, 4, 72)
        s.append(0, k, None)
        np.testing.assert_allclose(s.attend(0, q), attention(q, k, k[:, :, :64])[0], atol=2e-6)
        self.assertEqual(s.usage().bytes, cache.footprint(90).total)
        for keys in ("kivi-4-g32-fp16x8", "kivi-4-g32-int8x8"):
            cache.requantize([s], keys=keys)
            self.assertTrue((cache.from_bytes(s.to_bytes()).attend(0, q) == s.attend(0, q)).all())
        self.refused("layer 0, latent of 64 \\+ 8 channels, 1 x 72 and 64: it takes keys alone", s.append, 0, k, k)
        self.refused("does not keep its 8 rotary channels", kvq.Cache, [kvq.latent_attention(64, 8)], keys="std4")


class Index(Base):
    def test_selects_tokens_for_another_layer(self):
        cache = kvq.Cache([kvq.full_attention(2, 16), kvq.index_layer(8)], keys="fp32,int8", window="fp32", **OPTIONS)
        self.assertEqual(cache.layers[1], kvq.Layer("index", 1, 8, 8))
        s = cache.new_sequence()
        k, q, index, index_q = self.tensor(90, 2, 16), self.tensor(3, 4, 16), self.tensor(90, 1, 8), self.tensor(3, 5, 8)
        s.append(0, k, k)
        s.append(1, index, None)
        weights = np.abs(self.tensor(3, 5, 1)[:, :, 0]).copy()
        best = s.select(1, index_q, weights, 7)
        self.assertEqual(best.shape, (3, 7))
        scores = np.einsum("qh,qht->qt", weights, np.maximum(np.einsum("qhc,tc->qht", index_q, index[:, 0]), 0))
        for i in range(3):
            self.assertEqual(sorted(best[i]), sorted(np.argsort(-scores[i, : 88 + i])[:7]))
        for got in cache.select(1, [s, s], [index_q, index_q], [weights, weights], 7):
            np.testing.assert_array_equal(got, best)
        self.refused("weights\\[1\\] is float32 \\[3, 5\\]", cache.select, 1, [s, s], [index_q, index_q[:2]], [weights, weights], 7)
        self.refused("q has 1 entries for 2 sequences", cache.select, 1, [s, s], [index_q], [weights, weights], 7)
        out = s.attend(0, q, mods=kvq.Mods(listed_tokens=best))
        for i in range(3):
            np.testing.assert_allclose(out[i : i + 1], attention(q[i : i + 1], k[best[i]], k[best[i]])[0], atol=2e-6)
        apart = kvq.Mods(listed_tokens=best[:, :4], listed_window=best[:, 4:].tolist())
        np.testing.assert_allclose(s.attend(0, q, mods=apart), out, atol=2e-6)
        self.refused("query 0 lists token 90, layer 0 holds 90", s.attend, 0, q, mods=kvq.Mods(listed_tokens=[[90], [1], [2]]))
        self.refused("is not \\[queries\\]\\[n\\]", kvq.Mods, listed_tokens=[[1, 2], [3]])
        self.refused("are for \\(3,\\) and \\(2,\\) queries", kvq.Mods, listed_tokens=best, listed_window=[[1], [2]])
        self.refused("layer 0, full attention of 2 x 16: it is no index", s.select, 0, q, np.ones((3, 4), "float32"), 3)
        self.refused("weights is float32 \\[3, 5\\]", s.select, 1, index_q[:2], weights, 3)


class State(Base):
    def cache(self, parts=PARTS, **others):
        return kvq.Cache([kvq.full_attention(1, 32), kvq.state_layer(parts), kvq.state_layer(parts)], keys="int8",
                         **{**OPTIONS, **others})

    def test_arrays(self):
        s = self.cache().new_sequence()
        for layer in (1, 2):
            for number, (name, shape, dtype) in enumerate((("recurrent", (2, 8, 16), np.float32),
                                                           ("conv", (1, 3, 40), np.uint16))):
                x = s.state(layer, name)
                self.assertEqual((x.shape, x.dtype, x.flags.writeable, x.any()), (shape, dtype, True, False))
                x += 1
                self.assertTrue((s.state(layer, number) == 1).all())
        with mock.patch.dict(sys.modules, {"numpy": None}):
            x = s.state(1, "conv")
            self.assertEqual((type(x), x.shape, x[0, 2, 39]), (memoryview, (1, 3, 40), 1))
            x[0, 2, 39] = 7
        self.assertEqual(s.state(1, 1)[0, 2, 39], 7)
        x = s.state(2)
        del s
        gc.collect()
        x += 1  # the array keeps the sequence alive
        self.assertTrue((x == 2).all())

    def test_histories(self):
        """Sequences against a model that computes the state of its tokens again."""
        choose = random.Random(SEED)
        cache = self.cache(snapshot_every=16)

        class Model:
            def __init__(self, s, tokens, marks):
                self.s, self.tokens, self.marks = s, tokens, marks

            def expected(self, layer, part):
                x = 0
                for t in self.tokens:
                    x = (x * 31 + t * (layer + part)) % 65521
                return x

            def run(self, tokens, prompt_ends=False):
                before = len(self.tokens)
                for layer in (1, 2):
                    for part in (0, 1):
                        x = self.s.state(layer, part)
                        for t in tokens:
                            x[:] = (x.astype(np.int64) * 31 + t * (layer + part)) % 65521
                x = np.zeros((len(tokens), 1, 32), np.float32)
                self.s.append(0, x, x)
                self.tokens = self.tokens + tokens
                n = len(self.tokens)
                due = before // 16 < n // 16 or (prompt_ends and n > 0)
                if due:
                    self.marks = sorted({*self.marks, n})
                return due == self.s.advance(len(tokens), prompt_ends)

        models = [Model(cache.new_sequence(), [], [])]
        for _ in range(300):
            m = choose.choice(models)
            n = len(m.tokens)
            action = choose.randrange(7)
            if action < 2:
                self.assertTrue(m.run([choose.randrange(1000) for _ in range(choose.randrange(1, 12))], action == 1))
            elif action == 2:
                m.s.snapshot()
                m.marks = sorted({*m.marks, n})
            elif action == 3:
                to = choose.randrange(n + 1)
                reached = n if to == n else max([t for t in m.marks if t <= to], default=0)
                lost = m.tokens[reached:to]
                self.assertEqual((m.s.reach(to), m.s.trim(to)), (reached, len(lost)))
                m.tokens, m.marks = m.tokens[:reached], [t for t in m.marks if t <= reached]
                self.assertTrue(m.run(lost))
            elif action == 4 and len(models) < 5:
                models.append(Model(m.s.fork(), m.tokens, m.marks))
            elif action == 5:
                m.s = cache.from_bytes(m.s.to_bytes())
            elif action == 6 and choose.randrange(4) == 0:
                m.s.drop_snapshots()
                m.marks = []
            for m in models:
                self.assertEqual(len(m.s), len(m.tokens))
                self.assertEqual([x.tokens for x in m.s.snapshots], m.marks)
            m = choose.choice(models)
            looked_at = m.s.fork()  # of the sequence itself a step would be under way
            for layer in (1, 2):
                for part in (0, 1):
                    self.assertTrue((looked_at.state(layer, part) == m.expected(layer, part)).all())

    def test_int8_snapshots(self):
        part = kvq.StatePart("s", heads=2, rows=16, columns=32, snapshot="int8-columns")
        s = self.cache([part, PARTS[1]]).new_sequence()
        live = {layer: self.tensor(2, 16, 32) for layer in (1, 2)}
        for layer, x in live.items():
            s.state(layer, "s")[:] = x
            s.state(layer, "conv")[:] = layer
        self.assertTrue(s.advance(10, prompt_ends=True, threads=kvq.Threads(2)))
        (mark,) = s.snapshots
        self.assertEqual(mark.tokens, 10)
        self.assertTrue(0 < mark.error < 0.01, mark)
        self.assertLess(mark.bytes, s.usage().state)
        self.assertFalse(s.advance(5))
        self.assertEqual((s.trim(12), len(s), s.tokens(1)), (2, 10, 10))
        for layer, x in live.items():
            largest = np.abs(x).max(axis=1, keepdims=True)
            self.assertTrue((np.abs(s.state(layer, "s") - x) <= largest * (0.5001 / 127)).all())
            self.assertTrue((s.state(layer, "conv") == layer).all())

    def test_bytes(self):
        cache = self.cache(snapshot_every=64)
        s = cache.new_sequence()
        for n in (64, 64, 30):
            self.append(s, n)
            for layer in (1, 2):
                s.state(layer)[:] += 1
            s.advance(n)
        self.assertEqual([x.tokens for x in s.snapshots], [64, 128])
        usage, plan = s.usage(), cache.footprint(158)
        self.assertEqual((usage.state, usage.bookkeeping), (plan.state, plan.bookkeeping))
        one = s.snapshots[0].bytes
        self.assertEqual(self.cache(snapshot_every=64, snapshot_bytes=one).footprint(158).state * 3, plan.state * 2)
        receiver = kvq.Receiver(cache)
        for layer in range(3):
            for message in s.send_pages(layer):
                receiver.accept(message)
        other = receiver.finish()
        self.assertTrue((other.state(2) == 3).all())
        self.assertEqual((other.trim(127), len(other)), (63, 64))
        self.assertTrue((other.state(2) == 1).all())

    def test_errors(self):
        for part, text in ((kvq.StatePart("x", rows=0), "part x of layer 0 has 1 heads of 0 rows"),
                           (kvq.StatePart("x", "int8"), "dtype is 'int8', none of float32, "),
                           (kvq.StatePart("x", snapshot="int4"), "snapshot is 'int4', none of exact, ")):
            self.refused(text, kvq.Cache, [kvq.state_layer([part])])
        self.refused("layer 0 has two parts of the name conv", kvq.Cache, [kvq.state_layer([PARTS[1]] * 2)])
        self.refused("layer 0, state of 0 parts", kvq.Cache, [kvq.state_layer([])])
        self.refused("it has no parts of a state, got 1", kvq.Cache, [kvq.Layer("full", 2, 64, parts=PARTS[:1])])
        self.refused("snapshot_every is 0", self.cache, snapshot_every=0)
        self.refused("snapshots of at most 10 bytes", self.cache, snapshot_bytes=10)
        s = self.cache().new_sequence()
        s.advance(9)
        self.refused("layer 0 has no state", s.state, 0)
        self.refused("layer 0 has no state", s.state, 0, "conv")
        self.refused("layer 3 has no state", s.state, 3)
        self.refused("layer 1 has no part 2: it has 2", s.state, 1, 2)
        self.refused("layer 1 has no part -1: it has 2", s.state, 1, -1)
        self.refused("layer 1 has no part 'k' of its state, only recurrent, conv", s.state, 1, "k")
        self.refused("a step of -1 tokens", s.advance, -1)
        self.refused("cannot trim to 10 tokens: the sequence holds 9", s.trim, 10)
        self.refused("cannot trim to -1 tokens", s.reach, -1)
        self.assertEqual((len(s), s.snapshots), (9, []))
        self.refused("layer 1, state of 2 parts: a ring has layers with keys and values", kvq.Ring, s, 32)
        none = kvq.Cache(1, 1, 32, "int8").new_sequence()
        for call in (lambda: none.state(0), none.snapshot, none.drop_snapshots, lambda: none.advance(1), lambda: none.snapshots):
            self.refused("no layer of the cache has state", call)
        s.append(0, self.tensor(10, 1, 32), self.tensor(10, 1, 32))
        self.refused("a snapshot at token 10: the state has taken 9 tokens", s.snapshot)
        s.state(1)  # a step is under way
        self.assertEqual((s.trim(9), len(s)), (9, 0))


if __name__ == "__main__":
    unittest.main()
