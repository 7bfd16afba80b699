"""Objects are freed in any order, also by the collector and at the end of the program; threads run beside each other."""
import gc
import itertools
import subprocess
import sys
import threading
import unittest

import numpy as np
from support import generator

import kvq

KV, Q, D = 2, 4, 32


class Lifetimes(unittest.TestCase):
    def setUp(self):
        self.rng = generator(self.id())

    def tensor(self, n, heads=KV):
        return self.rng.standard_normal((n, heads, D)).astype(np.float32)

    def test_any_order(self):
        for order in itertools.permutations(range(5)):
            cache = kvq.Cache(1, KV, D, "int8", page_tokens=32)
            s = cache.new_sequence()
            s.append(0, self.tensor(100), self.tensor(100))
            store = kvq.PrefixCache(cache)
            store.store(range(100), s)
            made = [cache, s, s.fork(), kvq.Ring(s, 16), store]
            for i in order:
                made[i].close()

    def test_last_reference(self):
        """Pages are freed with the last reference to a sequence; the cache lives in its sequences."""
        cache = kvq.Cache(1, KV, D, "int8")
        s = cache.new_sequence()
        s.append(0, self.tensor(300), self.tensor(300))
        self.assertGreater(cache.info().bytes_in_use, 0)
        f = s.fork()
        del s
        gc.collect()
        self.assertGreater(cache.info().bytes_in_use, 0)
        del f
        gc.collect()
        self.assertEqual(cache.info().bytes_in_use, 0)
        with cache.new_sequence() as s:
            s.append(0, self.tensor(1), self.tensor(1))
            self.assertGreater(cache.info().bytes_in_use, 0)
        self.assertEqual(cache.info().bytes_in_use, 0)
        s = cache.new_sequence()
        del cache
        gc.collect()
        s.append(0, self.tensor(50), self.tensor(50))
        self.assertEqual(len(s), 50)

    def test_callbacks_live_as_long_as_they_are_called(self):
        turned = []
        s = kvq.Cache(1, KV, D, "fp32", rotary=kvq.Rotary(rotate=lambda row, by: turned.append(by))).new_sequence()
        gc.collect()
        s.append(0, self.tensor(50), self.tensor(50))
        s.cache.close()
        s.erase(10, 20)
        s.attend(0, self.tensor(1, Q))
        self.assertTrue(turned)

    def test_arguments_are_not_kept(self):
        """Inputs may change or vanish after the call."""
        s = kvq.Cache(1, KV, D, "int8", page_tokens=32, recent=0).new_sequence()
        k, v, q = self.tensor(100), self.tensor(100), self.tensor(1, Q)
        s.append(0, k, v)
        out = s.attend(0, q)
        k[:], v[:] = np.nan, np.nan
        del k, v
        gc.collect()
        self.assertTrue((s.attend(0, q) == out).all())

    def test_threads(self):
        """Sequences are independent, and one that does not change is read by many."""
        cache = kvq.Cache(1, KV, D, "std4", page_tokens=32, recent=8)
        k, v, q = self.tensor(120), self.tensor(120), self.tensor(1, Q)
        shared = cache.new_sequence()
        shared.append(0, k, v)
        expected = shared.attend(0, q)
        wrong = []

        def work():
            for _ in range(20):
                s = cache.new_sequence()
                s.append(0, k, v)
                try:
                    s.trim(121)
                except kvq.ArgumentError as e:
                    if "121" not in str(e):
                        wrong.append(e)
                if not ((s.attend(0, q) == expected).all() and (shared.attend(0, q) == expected).all()):
                    wrong.append("outputs")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_end_of_program(self):
        program = """
import kvq, numpy as np
cache = kvq.Cache(1, 2, 32, "int8", rotary=kvq.Rotary(rotate=lambda row, by: None))
s = cache.new_sequence()
s.append(0, np.zeros((200, 2, 32), np.float32), np.zeros((200, 2, 32), np.float32))
s.me = s
kept = [cache, s, s.fork(), kvq.Ring(s, 16), kvq.PrefixCache(cache), kvq.Threads(2), kvq.Workspace(100)]
"""
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
