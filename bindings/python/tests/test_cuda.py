"""kvq.cuda and kvq.transformers on a GPU: outputs and bytes of the CPU's caches, graphs, refusals; transformers with its own cache.

Skipped without torch, without a GPU, and where the library was built without KVQ_LIBRARY_CUDA. KVQ_TEST_DEVICE=cpu is for a library
whose kernels are emulated.
"""
import os
import tempfile
import types
import unittest

try:
    import torch
except ImportError:
    torch = None

import kvq
import kvq.press

DEVICE = os.environ.get("KVQ_TEST_DEVICE", "cuda")
ready = torch is not None and (DEVICE == "cpu" or torch.cuda.is_available())
if ready:
    import kvq.cuda

    ready = kvq.cuda.available()
KV, Q, D, LAYERS = 2, 4, 64, 2

import test_transformers as of_cpu  # noqa: E402


def latents_of_library():
    """Formats of latents that the library was compiled for; None: it has none."""
    return next((e for e in kvq.cuda.formats() if "-fp16x" in e.formats[0]), None)


def normal(*shape):
    return torch.randn(*shape).to(DEVICE, torch.float16)


class OnGpu(unittest.TestCase):
    def setUp(self):
        if not ready:
            self.skipTest("there is no GPU, or the library has no kvq_cuda.h")
        kept = kvq.cuda._KIND
        kvq.cuda._KIND = DEVICE
        self.addCleanup(setattr, kvq.cuda, "_KIND", kept)
        torch.manual_seed(1)


class EnginePages(OnGpu):
    def test_conversion(self):
        """Pages of kivi-4-g64 to pages in another order and back, a part of them; the CPU's bytes."""
        tokens, pages, columns = 130, 5, 3
        of = [kvq.Format("kivi-4-g64", role) for role in ("key", "value")]
        x = torch.randn(2, 64 * columns, KV, D)
        made = [[f.quantize(x[i, 64 * c:64 * c + 64]) for c in range(columns)] for i, f in enumerate(of)]
        held = [torch.zeros(pages, len(made[i][0]), dtype=torch.uint8) for i in range(2)]
        for i in range(2):
            for c, page in enumerate((3, 0, 4)):
                held[i][page] = torch.frombuffer(bytearray(made[i][c]), dtype=torch.uint8)
        source = [h.to(DEVICE) for h in held]
        target = [torch.zeros_like(h) for h in source]
        tables = [torch.tensor([t], dtype=torch.int32, device=DEVICE) for t in ([3, 0, 4], [1, -1, 2])]
        given = dict(kv_heads=KV, head_dim=D, page_tokens=64)
        views = [kvq.cuda.Pages("kivi-4-g64", *of_side, table, **given) for of_side, table in zip((source, target), tables)]
        lengths = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
        kvq.cuda.convert_pages(*views, lengths, pages_at_once=2)
        for i, f in enumerate(of):
            for column, page in ((0, 1), (2, 2)):
                n = min(64, tokens - 64 * column)
                values = torch.zeros(64, KV, D)
                values[:n] = f.dequantize(made[i][column], torch.empty(64, KV, D))[:n]
                self.assertEqual(bytes(target[i][page].cpu().tolist()), f.quantize(values))
            self.assertEqual(int(target[i][0].sum()) + int(target[i][3:].sum()), 0)
        # Attention over pages as they lie: of the last tokens, and of two new ones.
        q, new = normal(2, Q, D), [normal(2, KV, D) for _ in range(2)]
        starts = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
        outs = (kvq.cuda.attend_pages(views[0], q, lengths), kvq.cuda.prefill_pages(views[0], *new, q, lengths, starts, 2, most_tokens=tokens))
        paged = [torch.cat([f.dequantize(page, torch.empty(64, KV, D)) for page in of_side])[:tokens] for f, of_side in zip(of, made)]
        for out, first, (k, v) in zip(outs, (tokens - 1, tokens + 1),
                                      (paged, [torch.cat([x, y.cpu().float()]) for x, y in zip(paged, new)])):
            for i in range(2):
                k_seen, v_seen = (x[:first + i].repeat_interleave(Q // KV, 1) for x in (k, v))
                weights = (torch.einsum("hd,thd->ht", q[i].cpu().float(), k_seen) / D ** 0.5).softmax(1)
                want = torch.einsum("ht,thd->hd", weights, v_seen)
                self.assertLess(((out[i].cpu().float() - want).norm() / want.norm()).item(), 3e-3)
        with self.assertRaisesRegex(kvq.ArgumentError, "for 1 sequences"):
            kvq.cuda.attend_pages(views[0], q, lengths[:0])
        with self.assertRaisesRegex(kvq.ArgumentError, "none of the formats|none for std5|no kernels"):
            kvq.cuda.Pages("std5", *source, tables[0], **given)
        with self.assertRaisesRegex(kvq.ArgumentError, "a page of kivi-4-g64 is [0-9]+ contiguous bytes"):
            kvq.cuda.Pages("kivi-4-g64", source[0][:, :64], source[1], tables[0], **given)
        with self.assertRaisesRegex(kvq.ArgumentError, "source has 1 sequences of 2 kv heads, target 1 of 1"):
            kvq.cuda.convert_pages(views[0], kvq.cuda.Pages("kivi-4-g64", *target, tables[1], **{**given, "kv_heads": 1}), lengths)
        with self.assertRaisesRegex(kvq.ArgumentError, "a page of kivi-4-g64 is not bytes of tokens"):
            kvq.cuda.Pages("kivi-4-g64", *source, tables[0], order="NHD", **given)

    def test_new_tokens_of_an_engine(self):
        """vLLM's FP8 pages, NHD: new tokens by slots with the CPU's bytes, attention over them; HND; shapes of the other order."""
        entry = next((e for e in kvq.cuda.formats() if e.formats == ("fp8",) and e.window == "fp16" and not e.alibi), None)
        if entry is None:
            self.skipTest("the library has no kernels for fp8")
        dim, size, pages = entry.head_dim, entry.page_tokens, 3
        scales = dict(key_scale=0.5, value_scale=torch.tensor([2.0]))
        table = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
        tokens, given = size + 5, dict(kv_heads=KV, head_dim=dim, page_tokens=size)
        k, v, q = normal(tokens, KV, dim), normal(tokens, KV, dim), normal(1, Q, dim)
        slots = torch.tensor([int(table[0, t // size]) * size + t % size for t in range(tokens)], dtype=torch.int64, device=DEVICE)
        outs = []
        for order, shape in ((None, (pages, size, KV, dim)), ("HND", (pages, KV, size, dim))):
            held = [torch.zeros(*shape, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
            of = kvq.cuda.Pages("fp8", *held, table, order=order, **given, **scales)
            kvq.cuda.store_pages(of, k, v, slots)
            kvq.cuda.store_pages(of, k[:0], v[:0], slots[:0])
            for x, memory, scale in zip((k, v), held, (0.5, 2.0)):
                wanted = torch.zeros(*shape, dtype=torch.uint8)
                kvq.write_rows(kvq.Rows("fp8", wanted, order=order or "NHD", tensor_scale=scale), x.cpu(), block_table=[2, 0])
                self.assertTrue(torch.equal(memory.cpu(), wanted))
            outs.append(kvq.cuda.attend_pages(of, q, torch.tensor([tokens], dtype=torch.int32, device=DEVICE)))
        want = kvq.attend_rows(*(kvq.Rows("fp8", x.cpu(), order="HND", tensor_scale=s) for x, s in zip(held, (0.5, 2.0))), q.cpu(),
                               tokens=tokens, block_table=[2, 0])
        for out in outs:
            self.assertLess(((out.cpu().float() - want.float()).norm() / want.float().norm()).item(), 3e-3)
        with self.assertRaisesRegex(kvq.ArgumentError, 'they are order="HND"'):
            kvq.cuda.Pages("fp8", *held, table, **given)
        with self.assertRaisesRegex(kvq.ArgumentError, r"slots \[[0-9]+\], for pages of 2 kv heads"):
            kvq.cuda.store_pages(of, k, v, slots[1:])


class Caches(OnGpu):
    def both(self, **options):
        given = dict(sinks=4, recent=40, rollback=16, page_tokens=64)
        return (kvq.cuda.Cache(LAYERS, KV, D, "kivi-4-g64", dtype=torch.float16, max_batch=3, max_tokens=1000, **given, **options),
                kvq.Cache(LAYERS, KV, D, "kivi-4-g64", window="fp16", **given))

    def prefilled(self, gpu, cpu, rows, host, n, step, **options):
        """n new tokens of every row in all layers, compared with the CPU's."""
        if step:
            gpu.begin_step(rows, n)
        else:
            gpu.begin_prompt(rows[0], n)
        for layer in range(LAYERS):
            k, v, q = normal(len(rows) * n, KV, D), normal(len(rows) * n, KV, D), normal(len(rows) * n, Q, D)
            out = gpu.prefill(layer, k, v, q, **options)
            mods = kvq.Mods(**options) if options else None
            for row, s in enumerate(host):
                of = slice(row * n, (row + 1) * n)
                if s is None:
                    self.assertEqual(out[of].abs().max().item(), 0.0)
                    continue
                hk, hv, hq = (x[of].cpu() for x in (k, v, q))
                if step:
                    s.append(layer, hk, hv)
                    want = s.attend(layer, hq, mods=mods)
                else:
                    want = s.prefill(layer, hk, hv, hq, mods=mods)
                error = (out[of].cpu().float() - want.float()).norm() / want.float().norm()
                self.assertLess(error.item(), 3e-3)

    def same(self, s, cpu, host):
        moved = s.offload(cpu)
        self.assertEqual((len(s), len(moved)), (len(host), len(host)))
        for layer in range(LAYERS):
            for role in ("key", "value"):
                a, b = (x.dequantize(layer, role, torch.empty(len(host), KV, D)) for x in (moved, host))
                self.assertTrue(torch.equal(a, b))
        return moved

    def test_scenario(self):
        gpu, cpu = self.both()
        rows, host = [gpu.new_sequence() for _ in range(2)], [cpu.new_sequence() for _ in range(2)]
        self.prefilled(gpu, cpu, rows[:1], host[:1], 150, False)
        self.prefilled(gpu, cpu, rows[1:], host[1:], 70, False, window=30, softcap=2.0, scale=0.2)
        for i in range(12):
            self.prefilled(gpu, cpu, rows, host, 1, True)
        self.prefilled(gpu, cpu, [rows[0], None], [host[0], None], 1, True)
        rows.append(rows[0].fork())
        host.append(host[0].fork())
        rows[0].trim(155)
        host[0].trim(155)
        self.prefilled(gpu, cpu, rows, host, 1, True)
        for s, h in zip(rows, host):
            self.same(s, cpu, h)
        again = gpu.onload(rows[1].offload(cpu))
        self.prefilled(gpu, cpu, [again], [host[1]], 1, True)
        self.same(again, cpu, host[1])
        file = host[1].to_bytes("model")
        self.assertEqual(again.to_bytes("model"), file)
        again = gpu.from_bytes(file, "model")
        self.prefilled(gpu, cpu, [again], [host[1]], 1, True)
        self.same(again, cpu, host[1])
        with self.assertRaisesRegex(kvq.Error, "saved for model"):
            gpu.from_bytes(file, "other")
        plan = gpu.requantize([again], "kivi-4-g64", dry_run=True)
        self.assertEqual((plan.pages, plan.bytes_after), (0, plan.bytes_before))
        for call in (lambda: again.retain(0, [[0]]), again.hold, lambda: kvq.press.retain(again, 0, None, 0.5)):
            with self.assertRaisesRegex(kvq.UnsupportedError, "head by head on the CPU alone"):
                call()
        usage, of_cpu = again.usage(), host[1].usage()
        self.assertEqual((usage.bytes, usage.quantized, usage.rollback, usage.tokens),
                         (again.bytes, of_cpu.quantized, of_cpu.rollback, of_cpu.tokens))
        gpu.commit_to("kivi-4-g64")
        with self.assertRaisesRegex(kvq.ArgumentError, "std5 is not a format of this cache"):
            gpu.commit_to("std5")
        tiers = [(0, "kivi-4-g64")]
        self.assertEqual(gpu.plan_step_down([again], tiers).bytes_after, plan.bytes_before)
        with tempfile.TemporaryDirectory() as folder:
            store = kvq.cuda.PrefixCache(gpu, device_bytes=1, host_bytes=1 << 22, folder=folder, min_prefix_tokens=1)
            text, saved = list(range(len(again))), again.to_bytes("model")
            store.park(text, again)
            self.assertEqual(len(again), 0)
            match, place = store.lookup(text + [5])
            self.assertEqual((match.kind, match.tokens, place), ("prefix", len(text), "host"))
            again, match, place = store.fetch(text)
            self.assertEqual((match.kind, match.tokens, place, again.to_bytes("model")), ("exact", len(text), "host", saved))
            store.store(text, again)
            store.step_down([again], tiers)
            store.release(1)
            self.assertEqual(len(store.fetch([-1])[0]), 0)
            seen = store.statistics()
            self.assertEqual((seen.entries, seen.fetches["host"], seen.fetches[None], seen.lost), (0, 1, 1, 0))
            store.close()
        info = gpu.info()
        self.assertEqual(info.bytes, info.quantized + info.window + info.state + info.unused + info.tables + info.workspace
                         + info.prompt)
        self.assertGreaterEqual(info.bytes_in_use, rows[0].bytes)
        self.assertEqual(gpu.not_finite(), [0] * LAYERS)
        self.assertIn("kivi-4-g64", [name for e in kvq.cuda.formats() for name in e.formats])

    def test_keys_that_move(self):
        """erase, shift and splice as on the CPU, text without an end, pages in host memory and messages."""
        given = dict(sinks=4, recent=40, rollback=16, page_tokens=64, rotary=kvq.Rotary(D))
        gpu = kvq.cuda.Cache(LAYERS, KV, D, "kivi-4-g64", dtype=torch.float16, max_batch=3, max_tokens=1000, query_heads=Q, **given)
        cpu = kvq.Cache(LAYERS, KV, D, "kivi-4-g64", window="fp16", repack=0, **given)
        a, host = gpu.new_sequence(), cpu.new_sequence()
        self.prefilled(gpu, cpu, [a], [host], 300, False)
        for s in (a, host):
            s.erase(70, 100)
            s.shift(140, 160, -9)
        self.prefilled(gpu, cpu, [a], [host], 1, True)
        self.same(a, cpu, host)
        b, other = gpu.new_sequence(), cpu.new_sequence()
        for s, of in ((b, a), (other, host)):
            s.splice(of, 0, 132)
            s.splice(of, 4, 271)
        self.prefilled(gpu, cpu, [a, b], [host, other], 1, True)
        self.same(b, cpu, other)
        pages = gpu.host_pages()
        held, receiver = b.offload(pages), kvq.Receiver(pages)
        for layer in range(LAYERS):
            for message in held.send_pages(layer):
                receiver.accept(message)
        self.same(gpu.onload(receiver.finish()), cpu, other)
        store = kvq.PrefixCache(pages)
        self.assertEqual(store.store(range(len(b)), held), "stored")
        self.assertEqual(len(gpu.onload(store.fetch(range(1000))[0])), len(b))
        dropped = a.drop_front(100)
        self.assertGreater(dropped, 0)
        self.assertEqual(len(a), 272 - dropped)
        with self.assertRaisesRegex(kvq.ArgumentError, "at least 1 token"):
            a.drop_front(0)

    def test_list_of_layers(self):
        """A window or chunks, full attention in a format of its own, and another text."""
        given = dict(sinks=4, recent=40, rollback=16, page_tokens=64, layer_formats={1: ("kivi-4-g64", None)})
        for first, kind in ((kvq.sliding_attention(50, KV, D), "sliding window of 50"), (kvq.chunked_attention(100, KV, D), "chunks of 100")):
            layers = [first, kvq.full_attention(KV, D), kvq.cross_layer(KV, D)]
            gpu = kvq.cuda.Cache(layers, formats="kivi-4-g64", dtype=torch.float16, max_batch=2, max_tokens=1000, **given)
            cpu = kvq.Cache(layers, keys="kivi-4-g64", window="fp16", **given)
            self.assertEqual(gpu.layers, cpu.layers)
            rows, host = [gpu.new_sequence()], [cpu.new_sequence()]
            text = [normal(130, KV, D) for _ in range(2)]
            gpu.begin_cross(rows[0], 130)
            gpu.append(2, *text)
            host[0].append(2, *(x.cpu() for x in text))
            with self.assertRaisesRegex(kvq.ArgumentError, "holds 130 tokens in its layers with cross attention"):
                gpu.begin_cross(rows[0], 1)
            self.prefilled(gpu, cpu, rows, host, 250, False)
            for _ in range(3):
                self.prefilled(gpu, cpu, rows, host, 1, True)
            q = normal(1, Q, D)
            want = host[0].attend(2, q.cpu()).float()
            self.assertLess(((gpu.attend(2, q).cpu().float() - want).norm() / want.norm()).item(), 3e-3)
            self.assertEqual(rows[0].trim_limit(), host[0].trim_limit())
            self.assertGreater(rows[0].trim_limit(), 100)
            with self.assertRaisesRegex(kvq.ArgumentError, f"layer 0, {kind}, 2 x 64: cannot trim"):
                rows[0].trim(100)
            moved = rows[0].offload(cpu)
            self.assertEqual(len(moved), len(host[0]))
            for layer, tokens in ((1, len(moved)), (2, 130)):
                a, b = (x.dequantize(layer, "key", torch.empty(tokens, KV, D)) for x in (moved, host[0]))
                self.assertTrue(torch.equal(a, b))

    def test_state(self):
        """Layers with state beside full attention, read and written in place; snapshots, trims, forks, and the way to the CPU."""
        given = dict(sinks=4, recent=40, rollback=16, page_tokens=64, snapshot_every=16, snapshot_prompt_end=False)
        layers = [kvq.state_layer([kvq.StatePart("recurrent", heads=2, rows=3, columns=5),
                                   kvq.StatePart("convolution", "bfloat16", rows=2, columns=7)]), kvq.full_attention(KV, D)]
        gpu = kvq.cuda.Cache(layers, formats="kivi-4-g64", dtype=torch.float16, max_batch=2, max_tokens=1000, **given)
        cpu = kvq.Cache(layers, keys="kivi-4-g64", window="fp16", **given)
        self.assertEqual(gpu.layers, cpu.layers)
        rows = [gpu.new_sequence() for _ in range(2)]
        self.assertIsNone(rows[0].state(0, "convolution"))
        gpu.begin_step([None], 1)
        empty = gpu.state(0)
        self.assertEqual((tuple(empty.values.shape), empty.slots.tolist()), ((0, 2, 3, 5), [-1]))
        for step in range(10):
            gpu.begin_step(rows, 1)
            for part, dtype in (("recurrent", torch.float32), ("convolution", torch.bfloat16)):
                view = gpu.state(0, part)
                self.assertEqual(view.values.dtype, dtype)
                chosen = view.slots.long()
                now = view.values[chosen]
                self.assertTrue((now == (0 if step == 0 else step)).all())
                view.values[chosen] = now + 1
                self.assertTrue(torch.equal(rows[1].state(0, part), view.values[chosen[1]]))
            x = normal(2, KV, D)
            gpu.prefill(1, x, x, normal(2, Q, D))
        rows[0].snapshot()
        for n in (4, 8):
            gpu.begin_prompt(rows[0], n)
            view = gpu.state(0)
            view.values[view.slots.long()] += 1
            x = normal(n, KV, D)
            gpu.prefill(1, x, x, normal(n, Q, D))
        self.assertEqual([s.tokens for s in rows[0].snapshots], [10, 22])
        self.assertEqual(rows[0].reach(21), 10)
        fork = rows[0].fork()
        self.assertEqual((rows[0].trim(21), len(rows[0]), len(fork)), (11, 10, 22))
        self.assertEqual([s.state(0)[0, 0, 0].item() for s in (*rows, fork)], [10, 10, 12])
        moved = fork.offload(cpu)
        self.assertEqual([s.tokens for s in moved.snapshots], [10, 22])
        self.assertEqual(float(moved.state(0, "recurrent")[1, 2, 4]), 12)
        fork.drop_snapshots()
        self.assertEqual(fork.snapshots, [])
        for call, text in ((lambda: gpu.state(1), "it has no state"), (lambda: gpu.state(0, 2), "has no part 2"),
                           (lambda: gpu.state(0, "other"), "only recurrent, convolution")):
            with self.assertRaisesRegex(kvq.ArgumentError, text):
                gpu.begin_step(rows, 1)
                call()

    def test_drafts(self):
        gpu, cpu = self.both(draft_tokens=8)
        rows, host = [gpu.new_sequence() for _ in range(2)], [cpu.new_sequence() for _ in range(2)]
        self.prefilled(gpu, cpu, rows[:1], host[:1], 90, False)
        gpu.begin_draft(rows, 5)
        for layer in range(LAYERS):
            k, v = normal(10, KV, D), normal(10, KV, D)
            gpu.append(layer, k, v)
            out = gpu.attend(layer, normal(10, Q, D))
            self.assertTrue(torch.isfinite(out.float()).all())
            for row, h in enumerate(host):
                h.append_draft(layer, k[row * 5 : row * 5 + 5].cpu(), v[row * 5 : row * 5 + 5].cpu())
        gpu.keep(rows, [[0, 1, 4], []])
        host[0].keep([0, 1, 4])
        host[1].keep([])
        for s, h in zip(rows, host):
            self.same(s, cpu, h)

    def test_strides(self):
        """[heads][tokens][dim] of a model, transposed: no copy; and log-sums."""
        gpu, _ = self.both()
        outs = []
        k, v, q = normal(50, KV, D), normal(50, KV, D), normal(50, Q, D)
        for moved in (False, True):
            given = [x.transpose(0, 1).contiguous().transpose(0, 1) if moved else x for x in (k, v, q)]
            out = torch.empty(Q, 50, D, dtype=q.dtype, device=DEVICE).transpose(0, 1) if moved else None
            lse = torch.empty(50, Q, device=DEVICE)
            s = gpu.new_sequence()
            gpu.begin_prompt(s, 50)
            outs.append(gpu.prefill(0, *given, out, lse=lse))
            self.assertTrue(torch.isfinite(lse).all())
            with self.assertRaisesRegex(kvq.ArgumentError, "it has the tokens of this step already"):
                gpu.prefill(0, *given)
            with self.assertRaisesRegex(kvq.ArgumentError, "lack tokens 0 to 50"):
                s.fork()
            s.trim(0)
        self.assertTrue(torch.equal(*outs))

    def test_graph(self):
        if DEVICE == "cpu":
            self.skipTest("there are no graphs of torch without a GPU")
        gpu, cpu = self.both(pool_tokens=1000, pool_sequences=4)
        s = gpu.new_sequence()
        gpu.begin_prompt(s, 100)
        k, v, q = normal(100, KV, D), normal(100, KV, D), normal(100, Q, D)
        for layer in range(LAYERS):
            gpu.prefill(layer, k, v, q)
        k, v, q = normal(1, KV, D), normal(1, KV, D), normal(1, Q, D)
        out = torch.empty_like(q)
        torch.cuda.synchronize()
        gpu.begin_step([s])
        graph, number = torch.cuda.CUDAGraph(), gpu.graph_id()
        with torch.cuda.graph(graph):
            for layer in range(LAYERS):
                gpu.prefill(layer, k, v, q, out)
        graph.replay()
        for _ in range(80):
            other = s.fork()
            for x in (k, v, q):
                x.copy_(normal(*x.shape))
            gpu.begin_step([other])
            for layer in range(LAYERS):
                want = gpu.prefill(layer, k, v, q)
            gpu.begin_step([s])
            self.assertEqual(gpu.graph_id(), number)
            graph.replay()
            self.assertTrue(torch.equal(out, want))

    def test_refused(self):
        gpu, cpu = self.both()
        s = gpu.new_sequence()
        k, q = normal(3, KV, D), normal(3, Q, D)
        with self.assertRaisesRegex(kvq.ArgumentError, "no step has begun"):
            gpu.prefill(0, k, k, q)
        gpu.begin_prompt(s, 3)
        for bad, error, text in (
            (k.float(), kvq.ArgumentError, "k is torch.float32"),
            (k[0], kvq.ArgumentError, "k has shape"),
            (k.transpose(1, 2), kvq.ArgumentError, "channels must be contiguous"),
            (k[:2], kvq.ArgumentError, "have .* tokens"),
            (torch.empty(3, KV, D, device="meta"), kvq.UnsupportedError, "k is on meta"),
            ([1], TypeError, "k is a list"),
        ):
            with self.assertRaisesRegex(error, text):
                gpu.prefill(0, bad, k, q)
        with self.assertRaisesRegex(kvq.ArgumentError, "scale is -1"):
            gpu.prefill(0, k, k, q, scale=-1.0)
        gpu.prefill(0, k, k, q)
        with self.assertRaisesRegex(kvq.ArgumentError, "build it with KVQ_CUDA_FORMATS=ref8"):
            kvq.cuda.Cache(1, KV, D, "ref8")
        with self.assertRaisesRegex(kvq.ArgumentError, "KVQ_CUDA_HEAD_DIMS=80"):
            kvq.cuda.Cache(1, KV, 80, "std4")
        for keys, text in (("fp16", r"no kernels for latents of 40 \+ 8 channels .* KVQ_CUDA_LATENTS=40\+8"), ("int8-fp16x8", "of latents")):
            with self.assertRaisesRegex(kvq.ArgumentError, text):
                kvq.cuda.Cache([kvq.latent_attention(40, 8)], formats=keys)
        with self.assertRaisesRegex(kvq.ArgumentError, "not torch.float32"):
            kvq.cuda.Cache(1, KV, D, dtype=torch.float32)
        with self.assertRaisesRegex(TypeError, "not a kvq.Sequence"):
            gpu.begin_step([cpu.new_sequence()])
        with self.assertRaises(kvq.ArgumentError):
            s.trim(9)
        gpu.close()
        with self.assertRaises(kvq.HandleError):
            gpu.begin_step([s])
        self.assertEqual(len(s), 3)


class StandInOnGpu(OnGpu, of_cpu.StandIn):
    """The tests of the CPU's adapter, with attention in float16."""

    device, most, on_gpu = DEVICE, 0.05, True

    def setUp(self):
        OnGpu.setUp(self)
        self.dtype = torch.float16
        of_cpu.StandIn.setUp(self)
        self.module._DEVICE = DEVICE

    def exact(self, **others):
        return self.module.Cache("fp16", max_tokens=600, max_batch=6, **others)

    def test_quantized(self):
        """Near what 16 bit gives, in fewer bytes."""
        ids = torch.randint(0, of_cpu.WORDS, (3, 400)).to(DEVICE)
        expected, errors, used = of_cpu.Everything(), [], []
        self.model(ids, expected, of_cpu.eager)
        last = self.model(ids[:, :1], expected, of_cpu.eager)
        for keys in ("fp16", "kivi-4-g64"):
            cache = self.module.Cache(keys, max_tokens=600)
            for first in (0, 130):  # in chunks
                self.model(ids[:, first : (130, 400)[first > 0]], cache, self.attention)
            errors.append((self.model(ids[:, :1], cache, self.attention) - last).abs().max().item())
            used.append(cache.bytes())
        self.assertLess(errors[0], self.most)
        self.assertLess(errors[0], errors[1])
        self.assertLess(errors[1], 0.3 * last.abs().max().item())
        self.assertLess(used[1], 0.7 * used[0])

    def test_latents(self):
        """In 16 bit, and in fewer bytes."""
        entry = latents_of_library()
        if entry is None:
            self.skipTest("the library was built without KVQ_CUDA_LATENTS")
        name, rotary = entry.formats[0], int(entry.formats[0].rpartition("x")[2])
        self.dtype, self.most = {"fp16": torch.float16, "bf16": torch.bfloat16}[entry.window], 0.1
        module = self.latent_module(entry.head_dim - rotary, rotary)

        def made(keys=entry.window):
            return self.module.Cache.for_model(self.of_latents(module), keys, max_tokens=600, max_batch=2)

        used = []
        for keys in (entry.window, name.partition("-fp16x")[0]):
            cache = made(keys)
            for n in (300, 1):
                out = self.latent_step(module, cache, module.latents(1, n))[1]()
            self.assertTrue(torch.isfinite(out).all())
            used.append(cache.layers[0].sequences[0].bytes)
        self.assertLess(used[1], 0.9 * used[0])
        self.check_latents(module, made)

    def test_windows_free_pages(self):
        """Of a cache for a model; a crop that needs them changes nothing."""
        self.model.kinds = (of_cpu.window(20), of_cpu.causal)
        ids = torch.randint(0, of_cpu.WORDS, (3, 400)).to(DEVICE)
        config = types.SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=20, num_attention_heads=Q,
                                       num_key_value_heads=KV, head_dim=D)
        given = dict(max_tokens=600, sinks=0, recent=16, rollback=16)
        ours, kept = self.module.Cache.for_model(config, "kivi-4-g64", **given), self.module.Cache("kivi-4-g64", **given)
        for part in (*ids.split(130, dim=1), ids[:, :1]):
            a, b = (self.model(part, cache, self.attention, None, self.mask) for cache in (ours, kept))
            self.assertLess((a - b).abs().max().item(), self.most)
        freed, all_of = (cache.layers[0].pages.info().bytes_in_use for cache in (ours, kept))
        self.assertLess(freed, all_of)
        self.assertGreater(min(s.trim_limit() for s in ours.layers[0].sequences), 200)
        with self.assertRaisesRegex(kvq.ArgumentError, "layer 0, sliding window of 20"):
            ours.crop(-350)
        for cache in (ours, kept):
            cache.crop(-10)
        a, b = (self.model(ids[:, :3], cache, self.attention, None, self.mask) for cache in (ours, kept))
        self.assertLess((a - b).abs().max().item(), self.most)
        with self.assertRaisesRegex(kvq.UnsupportedError, "a window of 20 tokens by its config, its mask says neither"):
            self.model.kinds = (of_cpu.causal,) * 2
            self.model(ids[:, :3], ours, self.attention, None, self.mask)

    def test_failed_calls_change_nothing(self):
        ours, theirs = self.exact(), of_cpu.Everything()
        self.both(self.ids, ours, theirs)
        layer = ours.layers[0]
        for n in (1, 5):
            k, q = normal(3, KV, n, D), normal(3, 3, n, D)  # 3 query heads on 2
            with self.assertRaises(kvq.ArgumentError):
                layer.attend(k, k, q, self.module.Said(), (None, None, None), None)
            self.assertEqual([len(s) for s in layer.sequences], [120] * 3)
        self.both(self.ids[:, :1], ours, theirs)

    def test_refused(self):
        q, key = torch.zeros(1, Q, 1, D, device=DEVICE), torch.zeros(1, KV, 1, D, device=DEVICE)
        for cache, given, value, text in (
            (self.module.Cache("fp16"), key, key, "the keys are torch.float32"),
            (self.module.Cache("fp16", "int8"), key.half(), key.half(), "keys and values have one format"),
            (self.module.Cache("fp16"), key.half(), key.half()[..., :32], "have one head_dim, not 64 and 32"),
        ):
            with self.assertRaisesRegex(kvq.UnsupportedError, text):
                self.attention(self.model, q.to(given.dtype), *cache.update(given, value, 0), None)
        with self.assertRaisesRegex(kvq.ArgumentError, "max_tokens is 10"):
            cache = self.module.Cache("fp16", max_tokens=10)
            self.model(self.ids, cache, self.attention)


class Real(OnGpu):
    def setUp(self):
        super().setUp()
        if of_cpu.real_package is None or DEVICE == "cpu":
            self.skipTest("transformers is not there")
        torch.manual_seed(3)
        config = of_cpu.real_package.LlamaConfig(
            vocab_size=200, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0)
        self.model = of_cpu.real_package.LlamaForCausalLM(config).eval().to(DEVICE, torch.float16)

    def check_ids(self, model, make):
        """Greedy ids of a model in 16 bit are those with the package's own cache: alone, padded, beams, drafts; also of decode steps in graphs."""
        import kvq.transformers

        ids = torch.randint(2, 200, (3, 300)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[1, :115] = 0
        for name, of, options in (("alone", slice(0, 1), {}), ("padded", slice(None), {}), ("beams", slice(None), {"num_beams": 3}),
                                  ("drafts", slice(0, 1), {"prompt_lookup_num_tokens": 3})):
            with self.subTest(name=name):
                options = dict(attention_mask=mask[of], max_new_tokens=30, do_sample=False, **options)
                beams = "num_beams" in options
                if beams:  # equally good ones may change places where 16 bit round: their scores agree
                    options.update(return_dict_in_generate=True, output_scores=True)
                model.set_attn_implementation("sdpa")
                expected = model.generate(ids[of], **options)
                model.set_attn_implementation("kvq")
                for graphs in (False, True):
                    cache = make()
                    if graphs:
                        kvq.transformers.decode_in_graphs(model)
                    found = model.generate(ids[of], past_key_values=cache, **options)
                    if beams:
                        self.assertLess((found.sequences_scores - expected.sequences_scores).abs().max().item(), 0.02)
                    else:
                        self.assertTrue(torch.equal(found, expected))
                    if graphs:
                        del model.forward
                        if name != "drafts":
                            self.assertIsNotNone(cache._graph._graph)
        return ids, mask

    def test_generate(self):
        """The package's ids; with formats that quantize, as many tokens."""
        import kvq.transformers

        model = self.model
        ids, mask = self.check_ids(model, lambda: kvq.transformers.Cache("fp16", max_tokens=1024))
        used = []
        for keys in ("fp16", "std4"):
            cache = kvq.transformers.Cache(keys, max_tokens=1024, page_tokens=64)
            out = model.generate(ids, past_key_values=cache, attention_mask=mask, max_new_tokens=60, do_sample=False)
            self.assertEqual(out.shape, (3, 360))
            used.append(cache.bytes())
        self.assertLess(used[1], 0.8 * used[0])

    def check_logits(self, model, config, kinds, keys="fp16"):
        """Logits in 16 bit, of a prompt in two parts and of steps, are as near those in float32 as with the package's own cache: of caches of
        for_model, and of Cache() where `kinds` of layers are not those of latents. Returns the last cache."""
        import kvq.transformers

        ids = torch.randint(2, 200, (3, 400)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[1, :115] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)

        def logits(cache):
            outs = []
            for first, last in ((0, 130), (130, 375), *((i, i + 1) for i in range(375, 400))):
                outs.append(model(ids[:, first:last], attention_mask=mask[:, :last], position_ids=positions[:, first:last],
                                  past_key_values=cache).logits)
            return torch.cat(outs, dim=1)[mask.bool()].double()

        with torch.no_grad():
            model.set_attn_implementation("eager")
            right = logits(of_cpu.real_package.DynamicCache(config=config))
            model = model.to(torch.float16)
            own = (logits(of_cpu.real_package.DynamicCache(config=config)) - right).square().mean().sqrt().item()
            model.set_attn_implementation("kvq")
            makes = [lambda: kvq.transformers.Cache.for_model(model, keys, max_tokens=1024, max_batch=3)]
            if "latent" not in kinds:
                makes.append(lambda: kvq.transformers.Cache(keys, max_tokens=1024, max_batch=3))
            for make in makes:
                cache = make()
                found = logits(cache)
                if keys == "fp16":
                    self.assertLess((found - right).square().mean().sqrt().item(), 1.2 * own)
                self.assertTrue(torch.isfinite(found).all())
                self.assertEqual([layer._device.layer.kind for layer in cache.layers], kinds)
        return cache

    def test_chunks(self):
        """Llama 4 behind its first chunks."""
        package = of_cpu.real_package
        if not hasattr(package, "Llama4ForCausalLM"):
            self.skipTest("this version of transformers has no Llama4ForCausalLM")
        config = package.Llama4TextConfig(
            vocab_size=200, hidden_size=256, intermediate_size=384, intermediate_size_mlp=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None,
            pad_token_id=0, attention_chunk_size=96, no_rope_layers=[1, 1, 0], num_local_experts=2, moe_layers=[],
            layer_types=["chunked_attention", "chunked_attention", "full_attention"])
        cache = self.check_logits(package.Llama4ForCausalLM(config).eval().to(DEVICE), config, ["chunked", "chunked", "full"])
        self.assertGreater(cache.layers[0].sequences[0].trim_limit(), 200)  # pages were freed

    def test_latents(self):
        """DeepSeek V3 with latents in 16 bit, with the package's ids, and quantized in fewer bytes."""
        import kvq.transformers

        package, entry = of_cpu.real_package, latents_of_library()
        if entry is None or not hasattr(package, "DeepseekV3ForCausalLM"):
            self.skipTest("the library was built without KVQ_CUDA_LATENTS, or this version of transformers has no DeepseekV3ForCausalLM")
        name, rotary = entry.formats[0], int(entry.formats[0].rpartition("x")[2])
        used = []
        for keys in ("fp16", name.partition("-fp16x")[0]):
            config = package.DeepseekV3Config(
                vocab_size=200, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=16,
                num_key_value_heads=16, q_lora_rank=64, kv_lora_rank=entry.head_dim - rotary, qk_rope_head_dim=rotary, qk_nope_head_dim=32,
                v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=3,
                moe_intermediate_size=32, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0)
            model = package.DeepseekV3ForCausalLM(config).eval().to(DEVICE)
            cache = self.check_logits(model, config, ["latent"] * 3, keys)
            used.append(cache.bytes())
            if keys == "fp16":
                self.check_ids(model, lambda: kvq.transformers.Cache.for_model(model, keys, max_tokens=1024, max_batch=9))
        self.assertLess(used[1], 0.8 * used[0])

    def test_decode_graph(self):
        """Logits and caches of steps without a graph: with padding, when pools move, behind a crop."""
        import kvq.transformers

        self.model.set_attn_implementation("kvq")
        ids = torch.randint(2, 200, (3, 200)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[1, :115] = 0
        for keys, padded in (("std4", False), ("std4", True), ("fp16", False)):
            with self.subTest(keys=keys, padded=padded), torch.no_grad():
                caches = [kvq.transformers.Cache(keys, max_tokens=1024) for _ in range(2)]
                given = mask if padded else None
                positions = (mask.cumsum(-1) - 1).clamp(min=0) if padded else None
                for cache in caches:
                    logits = self.model(ids, attention_mask=given, position_ids=positions, past_key_values=cache).logits[:, -1:]
                step = kvq.transformers.DecodeGraph(self.model, caches[0])
                for i in range(150):
                    token = logits.argmax(-1)
                    if i == 90:
                        for cache in caches:
                            cache.crop(-10)
                    lengths = [len(s) for s in caches[1].layers[0].sequences]
                    given = None
                    if padded:
                        real = caches[1].layers[0].real
                        given = torch.cat([real.long(), torch.ones(3, 1, dtype=torch.long)], dim=1).to(DEVICE)
                    want = self.model(token, attention_mask=given, position_ids=torch.tensor(lengths, device=DEVICE)[:, None],
                                      past_key_values=caches[1]).logits
                    logits = step(token)
                    error = ((logits - want).float().abs().max() / want.float().abs().max()).item()
                    self.assertLess(error, 0.01, f"step {i}")
                self.assertEqual(*[[len(s) for s in cache.layers[2].sequences] for cache in caches])
                self.assertEqual(caches[0].get_seq_length(), 340)
        with self.assertRaisesRegex(kvq.ArgumentError, "not .3..1."):
            step(token[:2])
        # A model that fails between two layers: the first step, one that is captured, and one behind it.
        cache = kvq.transformers.Cache("std4", max_tokens=1024)
        with torch.no_grad():
            token = self.model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            want = self.model(token, past_key_values=cache).logits
            cache.crop(-1)
        step = kvq.transformers.DecodeGraph(self.model, cache)

        def fail(*_):
            raise RuntimeError("a layer fails")

        for _ in range(3):
            hook = self.model.model.layers[1].register_forward_pre_hook(fail)
            step._number = None  # captured again
            with self.assertRaisesRegex(RuntimeError, "a layer fails"):
                step(token)
            hook.remove()
            for layer in cache.layers:
                self.assertEqual((layer.tokens, [len(s) for s in layer.sequences]), (200, [200] * 3))
            logits = step(token)
            self.assertLess(((logits - want).float().abs().max() / want.float().abs().max()).item(), 0.01)
            cache.crop(-1)
        with self.assertRaisesRegex(kvq.ArgumentError, "holds a prompt"):
            kvq.transformers.DecodeGraph(self.model, kvq.transformers.Cache("fp16"))(token)


if __name__ == "__main__":
    unittest.main()
