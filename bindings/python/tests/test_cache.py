"""What caches and sequences do beside attention."""
import io
import os
import pathlib
import tempfile
import unittest

import numpy as np
from support import generator

import kvq

KV, Q, D = 2, 4, 64


class Reserve(unittest.TestCase):
    def test_reserve(self):
        cache = kvq.Cache(2, 1, 32, "std4", page_tokens=32, byte_budget=1 << 20, preallocate=True)
        self.assertEqual((cache.info().bytes_held, cache.info().bytes_in_use), (1 << 20, 0))
        self.assertGreater(cache.footprint(100).unused, 0)
        a, b = cache.new_sequence(), cache.new_sequence()
        space, threads = kvq.Workspace(), kvq.Threads(2)
        cache.reserve([a, b], [90, 1], 2, workspace=space, threads=threads)
        self.assertGreater(a.usage().reserved, 0)
        held, scratch = cache.info().bytes_in_use, space.bytes
        random = np.random.default_rng(3)

        def tensor(n, heads):
            return random.standard_normal((n, heads, 32)).astype(np.float32)

        for layer in (1, 0):
            k, v = [tensor(90, 1), tensor(1, 1)], [tensor(90, 1), tensor(1, 1)]
            cache.prefill(layer, [a, b], k, v, [tensor(90, 2), tensor(1, 2)], workspace=space, threads=threads)
            self.assertEqual(space.bytes, scratch)
        self.assertLessEqual(cache.info().bytes_in_use, held)
        self.assertEqual(a.usage().reserved, 0)
        cache.reserve([a], [200], 2, q_tokens=[0], workspace=space)
        self.assertGreater(a.usage().reserved, 0)
        a.release_reserved()
        self.assertEqual(a.usage().reserved, 0)
        with self.assertRaises(kvq.OutOfMemoryError):
            cache.reserve([a], [100000], 2, q_tokens=[0], workspace=space)
        with self.assertRaisesRegex(kvq.ArgumentError, "sequence 1 of the batch is sequence 0 again"):
            cache.reserve([a, a], [1, 1], 2, workspace=space)
        with self.assertRaisesRegex(kvq.ArgumentError, "q_tokens has 2 entries for 1"):
            cache.reserve([a], [1], 2, q_tokens=[1, 1], workspace=space)
        with self.assertRaisesRegex(kvq.HandleError, "options.workspace"):
            cache.reserve([a], [1], 2, workspace=None)


class Base(unittest.TestCase):
    def setUp(self):
        self.rng = generator(self.id())

    def tensor(self, n, heads=KV, dtype=np.float32):
        return self.rng.standard_normal((n, heads, D)).astype(dtype)

    def cache(self, keys="std4", values=None, layers=2, **others):
        return kvq.Cache(layers, KV, D, keys, values, **{"page_tokens": 32, "recent": 16, "rollback": 8, **others})

    def fill(self, s, n):
        for layer in range(s.cache.info().layers):
            s.append(layer, self.tensor(n), self.tensor(n))
        return s

    def keys(self, s, layer=0):
        return s.dequantize(layer, "key", np.empty((s.tokens(layer), KV, D), np.float32))


class Sequences(Base):
    def test_fork_and_trim(self):
        s = self.fill(self.cache().new_sequence(), 150)
        before = self.keys(s)
        f = s.fork()
        f.trim(100)
        self.fill(f, 5)
        self.assertEqual((len(s), len(f)), (150, 105))
        self.assertTrue((self.keys(s) == before).all())
        self.assertTrue((self.keys(f)[:64] == before[:64]).all())
        self.assertTrue(s and self.cache().new_sequence())

    def test_keys_move(self):
        rotary = kvq.Rotary(D, base=1000.0)
        s = self.fill(self.cache("fp32", window="fp32", rotary=rotary).new_sequence(), 60)
        k = self.keys(s).astype(np.float64)
        angles = 1000.0 ** (-2.0 * np.arange(D // 2) / D)

        def rotated(x, by):
            a, b, c, sn = x[..., : D // 2], x[..., D // 2 :], np.cos(by * angles), np.sin(by * angles)
            return np.concatenate([a * c - b * sn, a * sn + b * c], axis=-1)

        s.erase(10, 30)
        expected = np.concatenate([k[:10], rotated(k[30:], -20)])
        self.assertEqual(len(s), 40)
        np.testing.assert_allclose(self.keys(s), expected, atol=1e-5)
        s.shift(0, 40, 7)
        np.testing.assert_allclose(self.keys(s), rotated(expected, 7), atol=1e-5)
        t = s.cache.new_sequence()
        t.splice(s, 5, 25)
        self.assertEqual(len(t), 20)

    def test_own_rotation(self):
        turned = []

        def rotate(row, by):
            turned.append(by)
            row *= 2.0**by

        s = self.fill(self.cache("fp32", window="fp32", rotary=kvq.Rotary(rotate=rotate), layers=1).new_sequence(), 20)
        k = self.keys(s)
        s.erase(0, 3)
        self.assertTrue((self.keys(s) == k[3:] / 8).all())
        self.assertIn(-3, turned)
        frequencies = kvq.Rotary.llama3(8)._c.frequencies[:4]
        self.assertEqual(frequencies[0], 1.0)
        self.assertLess(frequencies[3], 500000.0 ** (-6 / 8))
        kvq.Rotary.yarn(8, factor=4, original_context=2048)

    def test_requantize(self):
        cache = self.cache("std4,low2,int8")
        s = self.fill(cache.new_sequence(), 200)
        before = cache.info().bytes_in_use
        plan = s.requantize("low2", "low2", dry_run=True)
        self.assertGreater(plan.bytes_before, plan.bytes_after)
        self.assertEqual(cache.info().bytes_in_use, before)
        part = s.requantize("low2", "low2", layers=(0, 1), tokens=(0, 100), most_pages=1)
        self.assertGreater(part.pages_left, 0)
        s.requantize("low2", "low2", most_seconds=60.0, threads=kvq.Threads(2))
        self.assertEqual(cache.info().bytes_in_use, plan.bytes_after)
        self.assertEqual(s.requantize("low2", "low2", only_smaller=True).pages, 0)

    def test_step_down(self):
        cache = self.cache("int8,std4,low2")
        sequences = [self.fill(cache.new_sequence(), n) for n in (250, 130)]
        policy = kvq.StepDownPolicy([kvq.Tier(40, "std4", "std4"), kvq.Tier(120, "low2", "low2")], first_layers_kept=1)
        plan = cache.plan_step_down(sequences, policy)
        self.assertEqual(plan.bytes_before, cache.info().bytes_in_use)
        report = cache.step_down(sequences, policy)
        self.assertEqual(plan, report)
        self.assertGreater(report.pages, 0)
        self.assertTrue(report.fits)
        self.assertEqual(report.bytes_after, cache.info().bytes_in_use)
        tight = sequences[0].step_down(kvq.StepDownPolicy(byte_budget=1))
        self.assertFalse(tight.fits)
        self.assertEqual(sequences[0].plan_step_down(kvq.StepDownPolicy(byte_budget=1)), tight)

    def test_estimates(self):
        cache = self.cache(rollback=0)
        for n in (0, 10, 300):
            usage = self.fill(cache.new_sequence(), n).usage()
            plan = cache.footprint(n)
            self.assertEqual((plan.quantized, plan.window, plan.bookkeeping),
                             (usage.quantized, usage.window, usage.bookkeeping))
        s = cache.new_sequence()
        for n in (1, 20, 100):
            before, bound = cache.info().bytes_in_use, s.append_bytes(n)
            self.fill(s, n)
            self.assertLessEqual(cache.info().bytes_in_use - before, bound)
            self.assertGreater(s.prefill_bytes(n) + s.draft_bytes(1), 0)
        longest = cache.longest_context(10**6, q_heads=Q)
        self.assertLessEqual(cache.footprint(longest, q_heads=Q).total, 10**6)
        self.assertGreater(longest, 100)
        self.assertEqual(cache.longest_context(0), -1)
        shape = dict(layers=2, kv_heads=2, head_dim=32, keys="int8")
        budget = kvq.Cache.budget(300, chunk=64, **shape)
        self.assertGreater(kvq.Cache.budget(300, chunk=64, cuts=1, **shape), budget)
        self.assertEqual(kvq.Cache.budget(300, sequences=3, chunk=64, **shape), 3 * budget)
        self.assertGreaterEqual(budget, kvq.Cache(**shape).footprint(300).quantized)
        with self.assertRaisesRegex(kvq.ArgumentError, "chunks of -1"):
            kvq.Cache.budget(300, chunk=-1, **shape)
        policy = kvq.StepDownPolicy([kvq.Tier(64)])
        self.assertGreater(cache.footprint(500, sequences=3, threads=2, chunk=64, policy=policy).total, 0)

    def test_options(self):
        info = kvq.Cache(1, 1, 32).info()
        self.assertEqual((info.page_tokens, info.sinks, info.recent, info.rollback, info.value_dim, info.byte_budget),
                         (128, 4, 32, 16, 32, None))
        info = kvq.Cache(1, 1, 32, sinks=0, recent=0, rollback=0, byte_budget=10**6, value_dim=16).info()
        self.assertEqual((info.sinks, info.recent, info.rollback, info.value_dim, info.byte_budget), (0, 0, 0, 16, 10**6))
        mixed = self.cache(["std4", "low2"], layer_formats={1: ("int8", None)})
        s = self.fill(mixed.new_sequence(), 100)
        errors = []
        for layer in range(2):
            k = self.tensor(100)
            t = mixed.new_sequence()
            t.append(layer, k, k)
            errors.append(np.abs(self.keys(t, layer) - k).max())
        self.assertLess(errors[1], errors[0])
        s.close()
        mixed.add_format(kvq.Format("affine-6-g64", "key"), "wide")
        self.fill(mixed.new_sequence(), 80).requantize("wide")

    def test_names_of_one_format(self):
        """Values of two names may be one format, which then has both names."""
        for names in ("int8,int8", "std4,mix4", "std4,std4-h", "kivi-4-g64,affine-4-g64", "int8,int8-bounds"):
            with self.subTest(names=names):
                cache = self.cache(names)
                first, second = names.split(",")
                s = self.fill(cache.new_sequence(), 100)
                before = s.to_bytes()
                self.assertEqual(s.requantize(values=second).pages, 0)  # it is that format
                self.assertEqual(s.to_bytes(), before)
                s.requantize(second, second)
                cache.commit_to("value", second)
        other = self.cache("std4", layer_formats={0: ("mix4", "mix4")})
        self.fill(other.new_sequence(), 100)
        with self.assertRaisesRegex(kvq.ArgumentError, 'no value format "std5", only std4, mix4'):
            other.commit_to("value", "std5")


class Files(Base):
    def test_save_and_restore(self):
        s = self.fill(self.cache().new_sequence(), 123)
        data = s.to_bytes("m")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "ü.safetensors")
            s.save(path, "m")
            self.assertEqual(path.read_bytes(), data)
            restored = [s.cache.restore(path, "m"), s.cache.restore(str(path)), s.cache.from_bytes(data, "m")]
            with open(path, "rb") as file:
                restored.append(s.cache.restore(file))
            self.assertEqual(os.listdir(folder), [path.name])
        written = io.BytesIO()
        s.save(written, "m")
        self.assertEqual(written.getvalue(), data)
        q = self.tensor(1, Q)
        for r in restored:
            self.assertEqual(len(r), 123)
            self.assertTrue((r.attend(1, q) == s.attend(1, q)).all())
        other = self.cache("std4,int8", page_tokens=64)
        with self.assertRaises(kvq.DataError):
            other.from_bytes(data)
        self.assertEqual(len(other.from_bytes(data, convert=True)), 123)
        s = self.fill(self.cache().new_sequence(), 88)
        self.assertGreater(s.usage().rollback, 0)
        without = s.fork()
        without.drop_copies()
        self.assertEqual(without.usage().rollback, 0)
        self.assertLess(len(without.to_bytes()), len(s.to_bytes()))
        self.assertTrue((s.cache.from_bytes(without.to_bytes()).attend(1, q) == s.attend(1, q)).all())

    def test_damaged(self):
        s = self.fill(self.cache().new_sequence(), 123)
        data = s.to_bytes("m")
        pages = s.cache.info().pages_in_use
        for bad, model in ((data[:-1], "m"), (data[:10], "m"), (b"", None), (data, "another"),
                           (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "m")):
            with self.assertRaises(kvq.DataError):
                s.cache.from_bytes(bad, model)
        with self.assertRaisesRegex(kvq.DataError, "no.such.folder"):
            s.save("/no such folder/x")
        with self.assertRaises(kvq.DataError):
            s.cache.restore("/no such folder/x")
        self.assertEqual(s.cache.info().pages_in_use, pages)

    def test_files_that_raise(self):
        s = self.fill(self.cache().new_sequence(), 40)

        class File:
            def write(self, data):
                raise BrokenPipeError("gone")

            def read(self, most):
                raise BrokenPipeError("gone")

        with self.assertRaisesRegex(BrokenPipeError, "gone"):
            s.save(File())
        with self.assertRaisesRegex(BrokenPipeError, "gone"):
            s.cache.restore(File())

    def test_pages_on_the_wire(self):
        s = self.fill(self.cache().new_sequence(), 123)
        messages = [m for layer in range(2) for m in s.send_pages(layer)]
        self.rng.shuffle(messages)
        receiver = kvq.Receiver(self.cache())
        for m in messages:
            receiver.accept(m)
        with self.assertRaises(kvq.DataError):
            receiver.accept(messages[0][:-1])
        got = receiver.finish(123)
        q = self.tensor(1, Q)
        self.assertTrue((got.attend(0, q) == s.attend(0, q)).all())
        # To other formats.
        for convert in (False, True):
            receiver = kvq.Receiver(self.cache("low2,std4"), convert=convert)
            for m in messages:
                receiver.accept(m)
            quantized = receiver.finish(123).usage().quantized
            self.assertEqual(quantized < s.usage().quantized, convert)
        # From other pages.
        receiver = kvq.Receiver(self.cache(page_tokens=48, recent=20), convert=True, recent=16, page_tokens=32)
        for m in messages:
            receiver.accept(m)
        other = self.cache(page_tokens=48, recent=20).from_bytes(s.to_bytes(), convert=True)
        self.assertEqual(receiver.finish(123).to_bytes(), other.to_bytes())


class Formats(Base):
    def test_list(self):
        names = {f.name: f for f in kvq.formats()}
        for name in ("fp16", "int8", "affine-4-g64", "kivi-2-g32", "std4", "low2"):
            self.assertIn(name, names)
        self.assertTrue(names["std4"].preset and not names["int8"].preset)
        self.assertEqual(names["affine-4-g64"].group, 64)
        self.assertTrue(any(f.takes_statistics for f in kvq.formats()))

    def test_describe(self):
        d = kvq.Format("affine-4-g64", "key").describe(128, 128)
        self.assertEqual((d.bits, d.block_bytes), (4.5, 128 * 128 * 4.5 / 8))
        self.assertFalse(d.holds_values)
        self.assertEqual((d.asked_name, d.name), ("affine-4-g64", "affine4-token-g64-fp16"))
        self.assertTrue(kvq.Format("fp16", "value").describe().holds_values)
        self.assertTrue(d.attend_by.endswith(".hpp") and d.quantize_by.endswith(".hpp") == d.quantize)
        self.assertTrue(kvq.Format("std4", "key").describe(128, 70).quantize_by.startswith("portable: 70 channels"))

    def test_pages(self):
        for name in ("affine-4-g32", "int8", "fp16", "std4"):
            for role in ("key", "value"):
                f = kvq.Format(name, role)
                x = self.tensor(32, 3)
                page = f.quantize(x)
                self.assertEqual(len(page), f.page_bytes(32, 3, D))
                y = f.dequantize(page, np.empty_like(x))
                self.assertLess(np.abs(x - y).max(), 1.5)
                self.assertTrue((f.dequantize(bytearray(page), np.empty((32, 3, D), np.float16)) == y.astype(np.float16)).all())
                with self.assertRaisesRegex(kvq.ArgumentError, "bytes"):
                    f.dequantize(page[:-1], np.empty_like(x))

    def test_statistics(self):
        sums = kvq.Statistics(layers=2, kv_heads=KV, head_dim=D, products=True)
        for layer in range(2):
            sums.add_keys(layer, self.tensor(128))
            sums.add_queries(layer, self.tensor(128, Q))
        data = sums.to_bytes()
        loaded = kvq.Statistics.from_bytes(data)
        self.assertEqual(loaded.to_bytes(), data)
        x = self.tensor(64)
        self.assertEqual(kvq.Format("low2", "key", sums).quantize(x), kvq.Format("low2", "key", loaded).quantize(x))
        self.fill(self.cache("low2", statistics=loaded, page_tokens=64).new_sequence(), 200)
        with self.assertRaises(kvq.Error):
            kvq.Statistics.from_bytes(data[:-3])

    def test_statistics_by_default(self):
        """A plan of the own first tokens: 16 bit before, less error than even widths behind it."""
        scale = np.where(np.arange(D) % 8 == 0, 16.0, 1.0).astype(np.float32)
        k, v = [self.tensor(300) * scale, self.tensor(300)]
        errors = {}
        for statistics in ("own", "shared", None):
            cache = self.cache("low2", layers=1, statistics=statistics, statistics_tokens=128)
            s = cache.new_sequence()
            s.append(0, k[:120], v[:120])
            self.assertEqual(s.usage().quantized > 0, statistics is None)
            s.append(0, k[120:], v[120:])
            errors[statistics] = float(np.square(self.keys(s) - k).sum())
            if statistics == "own":
                back = cache.from_bytes(s.to_bytes())
                np.testing.assert_array_equal(self.keys(back), self.keys(s))
        self.assertLess(errors["own"], 0.5 * errors[None])
        self.assertEqual(errors["own"], errors["shared"])
        with self.assertRaisesRegex(kvq.ArgumentError, "statistics is 'mine'"):
            self.cache("low2", statistics="mine")

    def test_statistics_of_a_sequence(self):
        """Those of the keys that it holds."""
        cache, added, own = self.cache("fp32", window="fp32"), [], []
        s = cache.new_sequence()
        for layer in range(2):
            k = self.tensor(150)
            s.append(layer, k, k)
            added.append(k)
        right, own = (kvq.Statistics(layers=2, kv_heads=KV, head_dim=D) for _ in range(2))
        for layer, k in enumerate(added):
            right.add_keys(layer, k[10:138])
        own.add_sequence(s, 10, 128)
        self.assertEqual(own.to_bytes(), right.to_bytes())
        with self.assertRaisesRegex(kvq.HandleError, "no handle of a sequence"):
            own.add_sequence(cache, 0, 64)


class Prefixes(Base):
    def test_store_and_fetch(self):
        cache = self.cache("std4,low2")
        store = kvq.PrefixCache(cache, min_prefix_tokens=10, min_quantize_tokens=0, keys="low2", values="low2")
        text = [int(t) for t in self.rng.integers(0, 1000, 150)]
        s = self.fill(cache.new_sequence(), 150)
        self.assertEqual(store.store(text, s), "stored")
        self.assertEqual(store.store(text, s), "duplicate")
        self.assertEqual(store.lookup(text), kvq.Match("exact", 150))
        got, match = store.fetch(np.array(text + [1, 2, 3]))
        self.assertEqual((match.kind, match.tokens, len(got)), ("prefix", 150, 150))
        got, match = store.fetch(text[:100])
        self.assertEqual((match.kind, len(got)), ("supersequence", 100))
        self.assertEqual(store.lookup(text[:50] + [1001] * 9).kind, "lcp")
        miss, match = store.fetch([5000])
        self.assertEqual((match.kind, len(miss)), ("miss", 0))
        seen = store.statistics()
        self.assertEqual((seen.entries, seen.stored, seen.duplicates, seen.fetches["prefix"]), (1, 1, 1, 1))
        store.step_down([s], kvq.StepDownPolicy([kvq.Tier(20, "low2", "low2")]))
        self.assertTrue(store.erase(text))
        self.assertFalse(store.erase(text))
        store.store(text, s)
        self.assertGreater(store.release(1), 0)
        store.store(text, s)
        store.clear()
        self.assertEqual(store.statistics().entries, 0)


if __name__ == "__main__":
    unittest.main()
