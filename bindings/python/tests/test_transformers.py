"""kvq.transformers: against stand-ins of what it uses of transformers and a small model; against the package where it is installed.

Skipped without torch.
"""
import copy
import importlib
import sys
import types
import unittest

try:
    import torch
except ImportError:
    torch = None
try:
    import transformers as real_package
except ImportError:
    real_package = None

import kvq

LAYERS, KV, Q, D, WIDTH, WORDS, KERNEL = 2, 2, 4, 64, 32, 50, 3


def stand_in():
    """Modules with the names and the calls of transformers.cache_utils.Cache and of both registries."""

    class CacheLayerMixin:
        def __init__(self):
            self.keys = self.values = None
            self.is_initialized = False

    class Cache:
        def __init__(self, layers=None, layer_class_to_replicate=None, **_):
            self.layers = layers or []
            self.layer_class_to_replicate = layer_class_to_replicate

        def update(self, keys, values, layer_idx, *args, **kwargs):
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
            return self.layers[layer_idx].update(keys, values, *args, **kwargs)

        def get_seq_length(self, layer_idx=0):
            return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

        def get_mask_sizes(self, query, layer_idx):
            return self.layers[layer_idx].get_mask_sizes(query)

        def crop(self, n):
            for layer in self.layers:
                layer.crop(n)

        def reorder_cache(self, chosen):
            for layer in self.layers:
                layer.reorder_cache(chosen)

        def batch_select_indices(self, chosen):
            for layer in self.layers:
                layer.batch_select_indices(chosen)

        def batch_repeat_interleave(self, n):
            for layer in self.layers:
                layer.batch_repeat_interleave(n)

        def update_conv_state(self, states, layer_idx):
            return self.layers[layer_idx].update_conv_state(states)

        def update_recurrent_state(self, states, layer_idx):
            self.layers[layer_idx].recurrent_states[0] = states

        def has_previous_state(self, layer_idx=None):
            of = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)][-1] if layer_idx is None else self.layers[layer_idx]
            return of.conv_states[0] is not None

        def activate_past_recording(self):
            for layer in self.layers:
                layer.record_past = True

    class EncoderDecoderCache(Cache):
        def __init__(self, *both):
            self.self_attention_cache, self.cross_attention_cache = both

        def reorder_cache(self, chosen):
            for cache in (self.self_attention_cache, self.cross_attention_cache):
                cache.reorder_cache(chosen)

        def reset(self):
            for cache in (self.self_attention_cache, self.cross_attention_cache):
                cache.reset()

    class DynamicLayer(CacheLayerMixin):
        keeps_all = True  # crop(0)

        def update(self, keys, values):
            self.keys = keys

        def crop(self, n):
            self.keys = self.keys if n < 0 or (n == 0 and self.keeps_all) else self.keys[:, :, :n]

        def get_seq_length(self):
            return self.keys.shape[2]

    class LinearAttentionLayer:
        """With a convolution of KERNEL inputs."""

        def __init__(self):
            self.record_past = False
            self.reset()

        def reset(self):
            self.conv_states, self.recurrent_states = {0: None}, {0: None}

        def update_conv_state(self, states):
            before = torch.zeros(*states.shape[:-1], KERNEL) if self.conv_states[0] is None else self.conv_states[0]
            states = torch.cat([before, states], -1)
            self.conv_states[0] = states if self.record_past else states[..., -KERNEL:].clone()
            return states

        def reorder_cache(self, chosen):
            for states in (self.conv_states, self.recurrent_states):
                states[0] = states[0] if states[0] is None else states[0][chosen]

        @property
        def is_croppable(self):
            return self.recurrent_states[0] is None

        def crop(self, n):
            if not self.record_past:
                raise RuntimeError("does not track past states")
            self.conv_states[0] = self.conv_states[0][..., n - KERNEL : n or None]

    class Registry:
        functions = None

        @classmethod
        def register(cls, name, function):
            cls.functions[name] = function

    package, caches = types.ModuleType("transformers"), types.ModuleType("transformers.cache_utils")
    package.AttentionInterface = type("AttentionInterface", (Registry,), {"functions": {}})
    package.AttentionMaskInterface = type("AttentionMaskInterface", (Registry,), {"functions": {}})
    package.cache_utils = caches
    caches.Cache, caches.CacheLayerMixin = Cache, CacheLayerMixin
    caches.EncoderDecoderCache = EncoderDecoderCache
    caches.DynamicLayer, caches.LinearAttentionLayer = DynamicLayer, LinearAttentionLayer
    caches.DYNAMIC_LAYER_TYPE_MAPPING = {"full_attention": DynamicLayer, "linear_attention": LinearAttentionLayer,
                                         "indexed_attention": DynamicLayer}
    return package, caches


def of_package(name):
    """Gives a function the name of one that the package makes: kvq.transformers knows it by this."""

    def named(f):
        f.__module__, f.__qualname__ = "transformers.masking_utils", name
        return f

    return named


@of_package("causal_mask_function")
def causal(batch, head, query, key):
    return key <= query


def and_masks(*mask_functions):
    @of_package("and_masks.<locals>.and_mask")
    def and_mask(*at):
        seen = mask_functions[0](*at)
        for f in mask_functions[1:]:
            seen = seen & f(*at)
        return seen

    return and_mask


def window(sliding_window):
    @of_package("sliding_window_overlay.<locals>.inner_mask")
    def inner_mask(batch, head, query, key):
        return key > query - sliding_window

    return and_masks(inner_mask, causal)


def chunks(chunk_size, left_padding):
    @of_package("chunked_overlay.<locals>.inner_mask")
    def inner_mask(batch, head, query, key):
        return (query - left_padding[batch]) // chunk_size == (key - left_padding[batch]) // chunk_size

    return and_masks(inner_mask, causal)


class Everything:
    """A cache that keeps all keys and values, and eager attention on it."""

    def __init__(self):
        self.layers = {}

    def get_seq_length(self):
        return self.layers[0][0].shape[2] if self.layers else 0

    def update(self, k, v, layer, *_):
        if layer in self.layers:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(self.layers[layer], (k, v)))
        self.layers[layer] = k, v
        return k, v


def eager(module, q, k, v, mask, scaling, dropout=0.0, s_aux=None, **_):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    n, m = k.shape[2], q.shape[2]
    b, i, j = (torch.arange(*of, device=q.device) for of in ((q.shape[0],), (n - m, n), (n,)))
    seen = module.sees(b[:, None, None, None], 0, i[:, None], j[None, :])
    seen = seen & (torch.ones(1, n, dtype=torch.bool, device=q.device) if mask is None else mask.bool())[:, None, None, :]
    scores = (q.double() @ k.double().transpose(2, 3) * scaling).masked_fill(~seen, -1e30)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., :n] @ v.double()).to(q.dtype).transpose(1, 2), None


class Model:
    """Attention layers in the way of modeling_llama.py, with random weights."""

    is_causal = True
    sinks = config = None
    sees = staticmethod(causal)
    kinds = ()  # what the tokens of each layer see, where they differ
    share = False  # the layers behind the first attend with its keys

    def __init__(self, device="cpu", dtype=None):
        def matrix(*shape):
            return (torch.randn(*shape) / shape[0] ** 0.5).to(device)

        self.dtype = dtype or torch.float32  # of attention
        self.words = torch.randn(WORDS, WIDTH).to(device)
        self.weights = [[matrix(WIDTH, h * D) for h in (Q, KV, KV)] + [matrix(Q * D, WIDTH)] for _ in range(LAYERS)]

    def rotated(self, x, positions):
        angles = positions[:, None, :, None] * 10000.0 ** (-torch.arange(D // 2, device=x.device) * 2.0 / D)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)

    def __call__(self, ids, cache, attention, mask=None, mask_function=None):
        past = cache.get_seq_length()
        real = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.long, device=ids.device) if mask is None else mask
        positions = (real.cumsum(-1) - 1).clamp(min=0)[:, past:]
        given = mask
        x = self.words[ids]
        for layer, (wq, wk, wv, wo) in enumerate(self.weights):
            self.sees, self.layer_idx = self.kinds[layer] if self.kinds else self.sees, layer
            if mask_function is not None:
                given = mask_function(
                    batch_size=ids.shape[0], q_length=ids.shape[1], kv_length=real.shape[1], q_offset=past,
                    kv_offset=0, mask_function=self.sees, attention_mask=mask, config=self.config, use_vmap=False,
                    device=ids.device)
            h = x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5
            q, k, v = ((h @ w).view(*h.shape[:2], -1, D).transpose(1, 2) for w in (wq, wk, wv))
            q, k, v = (x.to(self.dtype) for x in (self.rotated(q, positions), self.rotated(k, positions), v))
            if layer == 0 or not self.share:
                keys, values = cache.update(k, v, layer, {"cache_position": None})
            out, _ = attention(self, q, keys, values, given, scaling=0.3, dropout=0.0, s_aux=self.sinks)
            x = x + out.reshape(*ids.shape, -1).to(x.dtype).contiguous() @ wo
        return x @ self.words.T


@unittest.skipIf(torch is None, "torch is not there")
class StandIn(unittest.TestCase):
    device, dtype, most = "cpu", None, 1e-3  # most: difference of logits
    on_gpu = False

    def setUp(self):
        package, caches = stand_in()
        kept = {name: sys.modules.get(name) for name in ("transformers", "transformers.cache_utils", "kvq.transformers")}
        sys.modules.update({"transformers": package, "transformers.cache_utils": caches})
        sys.modules.pop("kvq.transformers", None)
        for name in ("kvq._models", "kvq._masks", "kvq._host_rows"):
            kept[name] = sys.modules.pop(name, None)
        self.module, self.caches = importlib.import_module("kvq.transformers"), caches

        def back():
            for name, module in kept.items():
                if module is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = module
            if kept["kvq.transformers"] is not None:
                kvq.transformers = kept["kvq.transformers"]

        self.addCleanup(back)
        self.attention = package.AttentionInterface.functions["kvq"]
        self.mask = package.AttentionMaskInterface.functions["kvq"]
        torch.manual_seed(3)
        self.model = Model(self.device, self.dtype)
        self.ids = torch.randint(0, WORDS, (3, 120)).to(self.device)

    def both(self, ids, ours, theirs, mask=None):
        """Logits of real tokens, equal in both."""
        out = self.model(ids, ours, self.attention, mask, self.mask)
        expected = self.model(ids, theirs, eager, mask)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
        self.assertLess((out - expected)[real].abs().max().item(), self.most)
        return out

    def exact(self, **others):
        return self.module.Cache("fp32", window="fp32", page_tokens=32, **others)

    def test_prefill_and_decode(self):
        for threads in (None, kvq.Threads(2)):
            ours, theirs = self.exact(threads=threads), Everything()
            for ids in (self.ids, self.ids[:, :1], self.ids[:, 1:2], self.ids[:, 5:20]):
                self.both(ids, ours, theirs)
            self.assertEqual(ours.get_seq_length(), 137)
            self.assertEqual(ours.get_mask_sizes(1, 0), (138, 0))
            self.assertEqual(ours.get_mask_sizes(torch.arange(4), 1), (141, 0))
            self.assertGreater(ours.bytes(), 0)

    def test_quantized(self):
        """Near what 16 bit gives, in fewer bytes."""
        used, errors = [], []
        expected = Everything()
        self.model(self.ids, expected, eager)
        last = self.model(self.ids[:, :1], expected, eager)
        for keys in ("fp16", "std4"):
            cache = self.module.Cache(keys, sinks=2, recent=8, page_tokens=32, rollback=0)
            self.model(self.ids, cache, self.attention)
            errors.append((self.model(self.ids[:, :1], cache, self.attention) - last).abs().max().item())
            used.append(cache.bytes())
        self.assertLess(errors[0], 0.1)
        self.assertLess(errors[0], errors[1])
        self.assertLess(errors[1], 0.2 * last.abs().max().item())
        self.assertLess(used[1], 0.7 * used[0])

    def test_padding(self):
        """Left and right padding, and a row that is all padding."""
        mask = torch.ones(3, 120, dtype=torch.long, device=self.device)
        mask[0, :50] = 0
        mask[1, 90:] = 0
        ours, theirs = self.exact(), Everything()
        self.both(self.ids, ours, theirs, mask)
        for _ in range(3):
            mask = torch.cat([mask, torch.tensor([[1], [1], [1]], device=self.device)], dim=1)
            self.both(self.ids[:, :1], ours, theirs, mask)
        mask = torch.cat([mask, torch.tensor([[1], [0], [1]], device=self.device)], dim=1)
        self.both(self.ids[:, :1], ours, theirs, mask)
        self.assertEqual([len(s) for s in ours.layers[1].sequences], [74, 93, 124])
        ours.crop(110)
        theirs.layers = {i: (k[:, :, :110], v[:, :, :110]) for i, (k, v) in theirs.layers.items()}
        self.assertEqual([len(s) for s in ours.layers[0].sequences], [60, 90, 110])
        mask = torch.cat([mask[:, :110], torch.tensor([[1], [1], [1]], device=self.device)], dim=1)
        self.both(self.ids[:, :1], ours, theirs, mask)
        other = mask.clone()
        other[2, 0] = 0
        with self.assertRaisesRegex(kvq.ArgumentError, "cached tokens cannot be hidden"):
            self.model(self.ids[:, :1], ours, self.attention, torch.cat([other, other[:, :1] + 1], dim=1))

    def test_masks_are_read_once(self):
        """In a forward pass, for all layers, also behind crops and forks; and again in the next one, whose mask may be the same tensor."""
        reads = []
        plain = self.module._Padding._read
        self.module._Padding._read = staticmethod(lambda *of: reads.append(0) or plain(*of))
        self.addCleanup(setattr, self.module._Padding, "_read", staticmethod(plain))
        with torch.inference_mode():
            ours, mask = self.exact(), torch.ones(3, 121, dtype=torch.long, device=self.device)
            mask[0, :50] = 0

            def step(ids):
                del reads[:]
                self.model(ids, ours, self.attention, mask[:, :120] if ids.shape[1] > 1 else mask, self.mask)
                self.assertEqual(len(reads), 1)

            step(self.ids)
            step(self.ids[:, :1])
            for shorter in (lambda: ours.crop(-1), lambda: (ours.crop(-1), ours.reorder_cache(torch.tensor([0, 2, 1])))):
                shorter()
                mask[1, 120] = 0  # in place: row 1 gets no token now
                step(self.ids[:, :1])
                self.assertEqual([len(s) for s in ours.layers[1].sequences], [71, 120, 121])

    def test_learned_sinks(self):
        self.model.sinks = torch.tensor([1.0, -2.0, 3.0, 0.5]).to(self.device)
        ours, theirs = self.exact(), Everything()
        mask = torch.ones(3, 121, dtype=torch.long, device=self.device)
        mask[0, :50] = 0
        self.both(self.ids, ours, theirs, mask[:, :120])
        self.both(self.ids[:, :1], ours, theirs, mask)
        self.model.sinks = None
        self.both(self.ids[:, :1], ours, theirs, torch.cat([mask, mask[:, -1:]], dim=1))

    def test_sliding_window(self):
        self.model.sees = window(40)
        ours, theirs = self.exact(), Everything()
        self.both(self.ids, ours, theirs)
        self.both(self.ids[:, :1], ours, theirs)

    def steps(self, mask=None):
        """A prompt, a chunk and decode steps."""
        ours, theirs = self.exact(), Everything()
        for n in (50, 70, 1, 1):
            past = ours.get_seq_length()
            self.both(self.ids[:, :n], ours, theirs, None if mask is None else mask[:, : past + n])

    def test_chunks(self):
        """Chunked attention, also where rows have padding on the left."""
        mask = torch.ones(3, 122, dtype=torch.long, device=self.device)
        mask[0, :33] = 0
        mask[2, :48] = 0
        for left, given in ((torch.zeros(3, dtype=torch.long), None), (122 - mask.sum(1), mask)):
            self.model.sees = chunks(32, left.to(self.device))
            self.steps(given)

    def test_other_masks(self):
        """Prefix-LM, packed sequences, a window behind them, and a mask that hides tokens at random."""
        generator = torch.Generator().manual_seed(5)
        random = (torch.rand(3, 122, 122, generator=generator) < 0.5).to(self.device)
        documents = torch.tensor([0] * 17 + [1] * 60 + [2] * 45, device=self.device)
        padding = torch.ones(3, 122, dtype=torch.long, device=self.device)
        padding[1, :20] = 0
        masks = {
            "prefix": lambda b, h, q, k: (k <= q) | (k < 30),
            "packed": lambda b, h, q, k: (k <= q) & (documents[k] == documents[q]),
            "packed within a window": and_masks(window(9), lambda b, h, q, k: documents[k] == documents[q]),
            "random": lambda b, h, q, k: ((k <= q) & random[b, q, k]) | (k == q),
        }
        for name, sees in masks.items():
            for mask in (None, padding):
                with self.subTest(name=name, padded=mask is not None):
                    self.model.sees = sees
                    if not self.on_gpu:
                        self.steps(mask)
                    else:
                        with self.assertRaisesRegex(kvq.UnsupportedError, "the mask of .* is neither causal nor a sliding window"):
                            self.model(self.ids, self.exact(), self.attention, None, self.mask)
        self.model.sees = lambda b, h, q, k: ~(k > q)  # causal, under a name that is not known
        self.steps()

    def test_own_masks(self):
        """Masks [batch][1][queries][tokens] that a user gives."""
        shown = torch.rand(3, 1, 120, 120, generator=torch.Generator().manual_seed(6)) < 0.5
        shown = shown.to(self.device) | torch.eye(120, dtype=torch.bool, device=self.device)
        self.model.sees = lambda b, h, q, k: shown[b, 0, q, k]
        expected = self.model(self.ids, Everything(), eager)
        for given in (shown, torch.where(shown, 0.0, torch.finfo(torch.float32).min)):
            if not self.on_gpu:
                out = self.model(self.ids, self.exact(), self.attention, None, lambda given=given, **_: given)
                self.assertLess((out - expected).abs().max().item(), self.most)
        for bad, text in ((shown.float() * 0.5, "adds to scores"), (shown.repeat(1, 2, 1, 1), "neither .batch..tokens. nor")):
            with self.assertRaisesRegex(kvq.UnsupportedError, text):
                self.model(self.ids, self.exact(), self.attention, None, lambda bad=bad, **_: bad)

    def test_shared_keys(self):
        """Layers that attend with the keys of another one: of for_model, which knows of them."""
        self.model.share = True
        cache = self.exact()
        with self.assertRaisesRegex(kvq.UnsupportedError, "attend with the keys of another layer"):
            self.model(self.ids, cache, self.attention, None, self.mask)
        for kind, sees in (("full_attention", causal), ("sliding_attention", window(20))):
            self.model.kinds = (sees,) * 2
            ours, theirs = self.of_model([kind] * 2, num_kv_shared_layers=1), Everything()
            mask = torch.ones(3, 122, dtype=torch.long, device=self.device)
            mask[0, :50] = 0
            for ids in (self.ids[:, :90], self.ids[:, 90:], self.ids[:, :1], self.ids[:, 1:2]):
                self.both(ids, ours, theirs, mask[:, : ours.get_seq_length() + ids.shape[1]])
            kinds = [layer._device.layer.kind for layer in ours.layers] if self.on_gpu else [layer.kind for layer in ours.pages.layers]
            self.assertEqual(kinds, [kind.split("_")[0], "shared"][: len(kinds)])
            ours.crop(-2)
            ours.reorder_cache(torch.tensor([0, 2, 2]))
            ours = copy.deepcopy(ours)
            theirs.layers = {i: (k[[0, 2, 2], :, :120], v[[0, 2, 2], :, :120]) for i, (k, v) in theirs.layers.items()}
            self.both(self.ids[:, :2], ours, theirs, mask)
            k, v = (torch.zeros(3, heads, 1, D, device=self.device) for heads in (KV, Q))
            keys, _ = ours.update(k, k, 0)
            self.model.layer_idx = 1
            with self.assertRaisesRegex(kvq.UnsupportedError, "attend with the keys of another layer"):  # of the pass before
                self.attention(self.model, v, self.module.Handed.make(k, ours.layers[0], ""), k, None)
        # A prompt in one part is seen in 16 bit, also by the layer that shares its pages.
        self.model.kinds = (causal,) * 2
        ids, errors = self.ids.repeat(1, 3), []
        ours, theirs = self.of_model(["full_attention"] * 2, num_kv_shared_layers=1, keys="kivi-4-g64"), Everything()
        for part in (ids[:, :359], ids[:, 359:]):
            errors.append((self.model(part, ours, self.attention) - self.model(part, theirs, eager)).abs().max().item())
        self.assertLess(errors[0], self.most)
        self.assertGreater(errors[1], self.most)  # and a step as pages hold it

    def test_encoder_and_decoder(self):
        """Keys of an encoder are appended once, and attended to by any number of queries, also of chosen rows and copies."""
        encoder = types.SimpleNamespace(is_causal=False, sees=lambda b, h, q, k: shown[b, 0, 0, k])
        decoder = types.SimpleNamespace(is_causal=False, is_decoder=True, sees=encoder.sees)
        shown = torch.ones(3, 1, 1, 50, dtype=torch.bool, device=self.device)
        k, v = torch.randn(2, 3, KV, 50, D).to(self.device)
        q = torch.randn(3, Q, 50, D).to(self.device)
        if hasattr(torch.nn.functional, "scaled_dot_product_attention"):
            out = self.attention(encoder, q, k, v, None, scaling=0.3)[0]
            self.assertLess((out - eager(encoder, q, k, v, None, 0.3)[0]).abs().max().item(), max(1e-5, self.most / 10))
        of_causal = self.mask(batch_size=3, q_length=50, kv_length=50, mask_function=causal)
        with self.assertRaisesRegex(kvq.UnsupportedError, "has no cache and is not causal, but its mask is"):
            self.attention(encoder, q, k, v, of_causal)
        with self.assertRaisesRegex(kvq.UnsupportedError, "not causal; a decoder that attends to an encoder needs .*for_model"):
            self.attention(decoder, q, k, v, None)
        k, v = k.to(self.dtype), v.to(self.dtype)
        for padded in (False, True):
            shown[1, ..., :7] = shown[2, ..., 20:] = not padded
            cache = self.of_model(["full_attention"], is_encoder_decoder=True)
            self.assertEqual(cache.cross_attention_cache.get_seq_length(), 0)

            def check(cache, n, rows=(0, 1, 2), given=None):
                q, rows = torch.randn(3, Q, n, D).to(self.device, self.dtype), list(rows)
                of = cache.cross_attention_cache.layers[0]
                keys, values = given or (of.keys, of.values)
                out = self.attention(decoder, q, keys, values, shown[rows].expand(-1, -1, n, -1) if padded else None, scaling=0.3)[0]
                b = torch.tensor(rows, device=self.device)[:, None, None, None]
                decoder.sees = lambda _, h, q, k: shown[b, 0, 0, k]
                self.assertLess((out - eager(decoder, q, k[rows], v[rows], None, 0.3)[0]).abs().max().item(), self.most / 10)

            check(cache, 60, given=cache.cross_attention_cache.update(k, v, 0))  # more than the encoder has
            check(cache, 1)
            check(cache, 70)
            with self.assertRaisesRegex(kvq.ArgumentError, "appends the output of its encoder again"):
                cache.cross_attention_cache.update(k, v, 0)
            other = copy.deepcopy(cache)
            cache.reorder_cache(torch.tensor([2, 2, 0]))
            check(cache, 3, (2, 2, 0))
            check(other, 2)
            self.assertEqual(cache.cross_attention_cache.get_seq_length(), 50)
            self.assertGreater(cache.bytes(), 0)
            cache.reset()
            check(cache, 1, given=cache.cross_attention_cache.update(k, v, 0))

    def test_kinds_of_layers(self):
        self.model.config = types.SimpleNamespace(layer_types=["full_attention", "linear_attention", "sliding_attention"])
        self.model(self.ids, self.exact(), self.attention, None, self.mask)
        for kind in ("indexed_attention", "of_no_name"):
            self.model.config.layer_types[1] = kind
            with self.assertRaisesRegex(kvq.UnsupportedError, f"layers of the type {kind}"):
                self.model(self.ids, self.exact(), self.attention, None, self.mask)
        del self.caches.LinearAttentionLayer  # older versions
        self.model.config.layer_types[1] = "linear_attention"
        with self.assertRaisesRegex(kvq.UnsupportedError, "layers of the type linear_attention"):
            self.model(self.ids, self.exact(), self.attention, None, self.mask)

    def latent_module(self, latent=12, rotary=4):
        """Of latent attention: it gives its cache latents and rotary channels, and expands what comes back."""
        plain = D - 4  # channels of keys that do not turn

        class Latent:
            is_causal, sees, bias, normed, channels = True, staticmethod(causal), 0.0, False, (latent, rotary)
            values = D if self.on_gpu else 20  # there as many channels as those of keys
            map = torch.randn(Q * (plain + values), latent, device=self.device, dtype=self.dtype) / latent**0.5

            def expand_kv(self, latents, turned):
                if self.normed:
                    latents = latents * torch.rsqrt(latents.pow(2).mean(-1, keepdim=True) + 1e-6)
                both = torch.nn.functional.linear(latents, self.map).view(latents.shape[0], latents.shape[2], Q, -1).transpose(1, 2)
                both = both + self.bias
                return torch.cat([both[..., :plain], turned.expand(-1, Q, -1, -1)], dim=-1), both[..., plain:]

            def latents(_, batch, n):
                return torch.randn(batch, 1, n, latent + rotary, device=self.device, dtype=self.dtype)

            def queries(_, batch, n):
                return torch.randn(batch, Q, n, plain + rotary, device=self.device, dtype=self.dtype)

        return Latent()

    def latent_step(self, module, cache, new, layer=0):
        """Queries, and attention to the latents of a cache, which is given new ones."""
        q = module.queries(new.shape[0], new.shape[2])
        keys = module.expand_kv(*cache.update(*new.split(module.channels, dim=-1), layer))
        return q, lambda mask=None: self.attention(module, q, *keys, mask, scaling=0.3)[0]

    def latent_steps(self, module, cache, before=None, rows=(0, 1)):
        """A prompt, a chunk and a step, the first row of `before` with padding."""
        all_of = module.latents(2, 0) if before is None else before
        mask = torch.ones(2, all_of.shape[2] + 36, dtype=torch.long, device=self.device)
        mask[rows.index(0), :7] = 0
        for n in (30, 5, 1):
            new = module.latents(2, n)
            all_of = torch.cat([all_of, new], dim=2)
            given = mask[:, : all_of.shape[2]]
            q, attend = self.latent_step(module, cache, new)
            out = attend(given)
            expected = eager(module, q, *module.expand_kv(*all_of.split(module.channels, dim=-1)), given, 0.3)[0]
            self.assertEqual(out.shape, expected.shape)
            self.assertLess((out - expected)[given[:, -n:].bool()].abs().max().item(), self.most)
        return all_of

    def test_latent_attention(self):
        """A module that makes keys and values of what the cache gives back: Cache() holds these."""
        module, cache = self.latent_module(), self.exact()
        self.latent_steps(module, cache)
        self.assertEqual(cache.get_seq_length(), 36)
        self.latent_step(module, cache, module.latents(2, 1))
        module = self.latent_module()
        keys = module.expand_kv(*module.latents(2, 1).split(module.channels, dim=-1))
        with self.assertRaisesRegex(kvq.ArgumentError, "were not given to a cache of kvq"):  # another module's
            self.attention(module, keys[0], *keys, None)

    def check_latents(self, module, made):
        """Caches of made() for two layers of a module, which for_model makes: they hold the latents, and attend to them."""
        cache = made()
        before = self.latent_steps(module, cache)
        self.assertEqual(cache.layers[0].pages.layers[0], kvq.latent_attention(*module.channels))
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([1, 0]))
        before, other = before[[1, 0], :, :30], copy.deepcopy(cache)
        self.latent_steps(module, cache, before, (1, 0))
        self.latent_steps(module, other, before, (1, 0))
        another = made()
        self.latent_steps(module, another)
        self.assertIs(another.layers[0].weights, cache.layers[0].weights)  # held once
        another.reset()
        module.map = module.map.flip(0)  # other weights
        self.latent_steps(module, another)
        self.assertIsNot(another.layers[0].weights, cache.layers[0].weights)
        cache = made()
        self.latent_step(module, cache, module.latents(2, 3))  # a pass that fails before attention
        self.latent_steps(module, cache)
        with self.assertRaisesRegex(kvq.UnsupportedError, "gives its cache 4 heads with .* channels, its config says latents of "):
            cache.update(*module.latents(1, 1).expand(-1, 4, -1, -1).split(module.channels, dim=-1), 0)
        for module.bias, module.normed in ((1.0, False), (0.0, True)):
            cache = made()
            with self.assertRaisesRegex(kvq.UnsupportedError, "Latent of .* not linear in its .* latent channels"):
                self.latent_steps(module, cache)
            self.assertEqual(cache.get_seq_length(), 0)

    def of_latents(self, module):
        return types.SimpleNamespace(num_hidden_layers=2, num_attention_heads=Q, kv_lora_rank=module.channels[0],
                                     qk_rope_head_dim=module.channels[1])

    def test_latents(self):
        def made(keys="fp32", window="fp32"):
            return self.module.Cache.for_model(self.of_latents(module), keys, window=window, page_tokens=8, sinks=0, recent=8, rollback=8)

        module = self.latent_module()
        for keys, window, of_token in (("fp32", "fp32", 64), ("fp16", "fp16", 32), ("int8", "fp16", 32)):
            cache = made(keys, window)
            for layer in range(2):
                self.latent_step(module, cache, module.latents(1, 80), layer)[1]()
            used = cache.sequences[0].usage()  # once in each layer
            if keys == "int8":
                self.assertGreater(used.quantized, 0)
                self.assertLess(used.quantized + used.window - used.slack, 2 * 80 * of_token)
            else:
                self.assertEqual((used.quantized, used.window - used.slack), (0, 2 * 80 * of_token))
        self.check_latents(module, made)

    def test_layers_of_states(self):
        """Are the package's own; keys and lengths are found behind them."""
        cache, one = self.exact(), torch.ones(3, 2, 1)
        key = torch.zeros(3, KV, 5, D, device=self.device, dtype=self.dtype)
        for past in (0, 5):
            self.assertEqual(cache.has_previous_state(1), past > 0)
            self.assertEqual(cache.has_previous_state(), past > 0)
            self.assertEqual((cache.get_seq_length(), cache.get_mask_sizes(5, 0)), (past, (past + 5, 0)))
            cache.update_conv_state(one, 1)
            q = torch.zeros(3, Q, 5, D, device=self.device, dtype=self.dtype)
            self.attention(self.model, q, *cache.update(key, key, 3), None)
        self.assertIsInstance(cache.layers[1], self.caches.LinearAttentionLayer)
        self.assertFalse(cache.has_previous_state(3))
        other = copy.deepcopy(cache)
        other.layers[1].conv_states[0] += 1
        self.assertEqual(cache.layers[1].conv_states[0].max().item(), 1)
        for of in (cache, other, self.module.Cache("fp32")):
            with self.assertRaisesRegex(kvq.UnsupportedError, "looks for layer 7 of the cache before it has given it anything"):
                of.layers[7].conv_states
        with self.assertRaisesRegex(kvq.UnsupportedError, "keys of an indexer"):
            cache.update_indexer(one, 0)
        for f in (lambda: cache.update(key, key, 1), lambda: cache.update_conv_state(one, 3)):
            with self.assertRaisesRegex(kvq.UnsupportedError, "keys and recurrent states at once|recurrent states and keys at once"):
                f()
        cache.reset()
        self.assertFalse(cache.has_previous_state())
        self.assertEqual(cache.get_seq_length(), 0)

    def of_model(self, types_, keys=None, **others):
        """A cache for layers of these types, with pages that windows free soon."""
        config = types.SimpleNamespace(model_type="toy", layer_types=types_, num_hidden_layers=len(types_), num_attention_heads=Q,
                                       num_key_value_heads=KV, head_dim=D, hidden_size=WIDTH, sliding_window=20,
                                       attention_chunk_size=16, conv_L_cache=KERNEL, **others)
        if self.on_gpu:
            return self.module.Cache.for_model(config, keys or "fp16", max_tokens=600, max_batch=6, sinks=0, recent=8, rollback=8)
        return self.module.Cache.for_model(config, keys or "fp32", window="fp32", page_tokens=64 if keys else 8, sinks=0, recent=8,
                                           rollback=8)

    def test_for_model(self):
        """Layers with a window or chunks beside full ones, in one cache: padded on the left, chosen rows, crops, copies, reset."""
        mask = torch.ones(3, 90, dtype=torch.long, device=self.device)
        mask[0, :50] = 0
        for kind in ("sliding_attention", "chunked_attention"):
            left = torch.tensor([50, 0, 0], device=self.device)
            sees = window(20) if kind == "sliding_attention" else chunks(16, left)
            self.model.kinds = (sees, causal)
            ours, theirs = self.of_model([kind, "full_attention"]), Everything()

            def cut(n):
                theirs.layers = {i: (k[:, :, :n], v[:, :, :n]) for i, (k, v) in theirs.layers.items()}

            def step(ids):
                self.both(ids, ours, theirs, torch.cat([mask, torch.ones(3, ours.get_seq_length() + ids.shape[1] - 90,
                                                                         dtype=torch.long, device=self.device)], dim=1))

            self.both(self.ids[:, :60], ours, theirs, mask[:, :60])
            self.both(self.ids[:, 60:90], ours, theirs, mask)
            for _ in range(2):
                step(self.ids[:, :1])
            ours.crop(-3)
            cut(89)
            self.both(self.ids[:, :1], ours, theirs, mask)
            other, kept = copy.deepcopy(ours), dict(theirs.layers)
            step(self.ids[:, 7:12])
            ours, theirs.layers = other, kept
            chosen = torch.tensor([0, 2, 2], device=self.device)
            ours.reorder_cache(chosen)
            theirs.layers = {i: (k[chosen], v[chosen]) for i, (k, v) in theirs.layers.items()}
            step(self.ids[:, :4])
            if self.on_gpu:
                continue  # contexts are shorter than pages
            s = ours.sequences[1]
            self.assertIs(ours.layers[0].pages, ours.pages)
            self.assertEqual([layer.kind for layer in ours.pages.layers], [kind.split("_")[0], "full"])
            self.assertGreater(s.trim_limit(), 50)  # pages were freed
            with self.assertRaisesRegex(kvq.ArgumentError, "layer 0"):
                ours.crop(-60)
            step(self.ids[:, :2])  # and nothing has changed
            ours.reset()
            left.zero_()
            self.both(self.ids[:2], ours, Everything())

    def test_for_model_disagrees(self):
        """What the model does is not what its config says."""
        if self.on_gpu:
            self.skipTest("of chunks and sizes: every layer is as its keys and masks are")
        ids = self.ids[:, :30]
        for types_, kinds, text in ((["sliding_attention"] * 2, (window(19), causal), "a window of 20 .* its mask says a window of 19"),
                                    (["sliding_attention"] * 2, (causal, causal), "a window of 20 .* its mask says neither"),
                                    (["chunked_attention"] * 2, (causal, causal), "chunks of 16 .* its mask says neither")):
            self.model.kinds = kinds
            with self.assertRaisesRegex(kvq.UnsupportedError, text):
                self.model(ids, self.of_model(types_), self.attention, None, self.mask)
        self.model.kinds = (chunks(16, torch.zeros(3, dtype=torch.long)),) * 2
        mask = torch.ones_like(ids)
        mask[1, 20:25] = 0
        with self.assertRaisesRegex(kvq.UnsupportedError, "padding must be on the left"):
            self.model(ids, self.of_model(["chunked_attention"] * 2), self.attention, mask, self.mask)
        shown = torch.ones(30, 30, dtype=torch.bool).tril()
        self.model.kinds = (lambda b, h, q, k: shown[q, k] & (k != 3),) * 2
        with self.assertRaisesRegex(kvq.UnsupportedError, "shows tokens that a layer with a window of 20 has freed"):
            self.model(ids, self.of_model(["sliding_attention"] * 2), self.attention, None, self.mask)
        self.model.kinds = ()
        with self.assertRaisesRegex(kvq.UnsupportedError, "layer 0 of .* has 2 heads with 64 and 64 channels, its config says 2 with 32"):
            cache = self.module.Cache.for_model(types.SimpleNamespace(num_hidden_layers=2, num_attention_heads=2, head_dim=32))
            self.model(ids, cache, self.attention, None, self.mask)
        with self.assertRaisesRegex(kvq.ArgumentError, "layer 1 of .*: the cache was made for 1 layers"):
            self.model(ids, self.of_model(["full_attention"]), self.attention, None, self.mask)

    def test_for_model_with_states(self):
        """States are in the sequences: chosen rows, copies, crops to snapshots and of convolutions alone."""
        if self.on_gpu:
            self.skipTest("states are the package's own")
        for recurrent, asks in ((True, None), (True, 0), (False, 0)):
            state = dict(linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=3, linear_value_head_dim=5,
                         linear_conv_kernel_dim=KERNEL) if recurrent else {}
            channels = 16 if recurrent else WIDTH
            types_ = ["linear_attention" if recurrent else "conv", "full_attention"] + ["moe"] * (asks == 0)
            cache = self.of_model(types_, **state)
            taken = torch.randn(3, channels, 60, generator=torch.Generator().manual_seed(4))

            def run(first, last):
                self.assertEqual(cache.has_previous_state(asks), first > 0)
                cache.update_conv_state(taken[..., first:last], 0)
                if recurrent:
                    cache.update_recurrent_state(taken[:, :6, :last].sum(-1).view(3, 2, 3, 1).expand(-1, -1, -1, 5).clone(), 0)
                k, q = torch.zeros(3, KV, last - first, D), torch.zeros(3, Q, last - first, D)
                self.attention(self.model, q, *cache.update(k, k, 1), None)

            def holds(n, rows=(0, 1, 2)):
                for i, (row, s) in enumerate(zip(rows, cache.sequences)):
                    self.assertEqual((len(s), s.tokens(0)), (n, n))
                    self.assertTrue((s.state(0, "conv")[0] == taken[row, :, n - KERNEL : n].numpy()).all())
                    if recurrent:
                        sums = taken[row, :6, :n].sum(-1).view(2, 3)
                        self.assertTrue((s.state(0, "recurrent") == sums[..., None].numpy()).all())
                        self.assertTrue(torch.equal(cache.layers[0].recurrent_states[0][i][..., 0], sums))
                    s.advance(0)
                    self.assertTrue(torch.equal(cache.layers[0].conv_states[0][i], taken[row, :, n - KERNEL : n]))

            run(0, 20)
            other = copy.deepcopy(cache)
            for i in range(20, 24):
                run(i, i + 1)
            holds(24)
            cache.crop(-4)  # to the end of the prompt
            holds(20)
            run(20, 21)
            run(21, 22)
            with self.assertRaisesRegex(kvq.UnsupportedError, "none at token 21, only at 20"):
                cache.crop(-1)
            holds(22)
            cache.reorder_cache(torch.tensor([2, 2, 0]))
            holds(22, (2, 2, 0))
            self.assertEqual(cache.pages.layers[0].kind, "state")
            self.assertEqual([x.tokens for x in cache.sequences[0].snapshots], [20])
            cache = other
            holds(20)
            cache.activate_past_recording()
            run(20, 27)
            if recurrent:
                continue
            cache.crop(-4)
            holds(23)
            run(23, 26)
            cache.crop(0)
            holds(26)
            cache.reset()
            self.assertFalse(cache.has_previous_state())
            run(0, 9)
            holds(9)
        # Every 4 tokens: of steps that reach or pass one.
        config = types.SimpleNamespace(layer_types=["conv", "full_attention"], num_attention_heads=Q, num_key_value_heads=KV, head_dim=D,
                                       hidden_size=WIDTH, conv_L_cache=KERNEL)
        cache, asks, recurrent = self.module.Cache.for_model(config, "fp32", window="fp32", snapshot_every=4, sinks=0), 0, False
        for first, last in ((0, 7), *((i, i + 1) for i in range(7, 14))):
            run(first, last)
        self.assertEqual([x.tokens for x in cache.sequences[0].snapshots], [7, 8, 12])
        cache.crop(-2)
        holds(12)
        cache = self.of_model(["linear_attention", "full_attention"], **dict(state, mamba_d_state=4, mamba_d_conv=2, mamba_expand=3))
        run(0, 5)
        with self.assertRaisesRegex(kvq.UnsupportedError, "the conv state of layer 0 of .* is .32, 3., its config says .96, 2."):
            cache.reorder_cache(torch.tensor([0, 1, 2]))

    def test_copies(self):
        """copy.deepcopy() forks: both go on, as prompts are used again."""
        ours, theirs = self.exact(), Everything()
        self.both(self.ids, ours, theirs)
        other, others = copy.deepcopy(ours), copy.deepcopy(theirs)
        self.assertIs(other.layers[0].pages, ours.layers[0].pages)
        self.both(self.ids[:, 3:9], ours, theirs)
        for _ in range(2):
            self.both(self.ids[:, :1], other, others)
        self.assertEqual((ours.get_seq_length(), other.get_seq_length()), (126, 122))
        other.crop(-50)
        del ours
        others.layers = {i: (k[:, :, :72], v[:, :, :72]) for i, (k, v) in others.layers.items()}
        self.both(self.ids[:, :2], other, others)
        empty = copy.deepcopy(self.exact())
        self.both(self.ids, empty, Everything())

    def test_reset(self):
        """Another batch may follow."""
        ours = self.exact()
        self.both(self.ids, ours, Everything())
        pages = ours.layers[0].pages
        ours.reset()
        self.both(self.ids, ours, Everything())
        self.assertIs(ours.layers[0].pages, pages)
        for rows in (2, 5):
            ours.reset()
            theirs = Everything()
            ids = torch.randint(0, WORDS, (rows, 40)).to(self.device)
            self.both(ids, ours, theirs)
            self.both(ids[:, :1], ours, theirs)
        ours.reset()
        layer, (q, k, bad) = ours.layers[0], (torch.zeros(5, h, 1, d, device=self.device, dtype=self.dtype)
                                              for h, d in ((Q, D), (KV, D), (KV, 1 << 20)))
        for _ in range(2):  # what cannot be held changes nothing
            with self.assertRaises(kvq.Error):
                self.attention(self.model, q, *layer.update(bad, bad), None)
        self.attention(self.model, q, *layer.update(k, k), None)

    def test_crop_of_older_versions(self):
        """crop(0) removes all where a positive number is what is kept."""
        for keeps in (False, True):
            self.caches.DynamicLayer.keeps_all = keeps
            self.module._zero_keeps_all.cache_clear()
            ours = self.exact()
            self.both(self.ids, ours, Everything())
            ours.crop(0)
            self.assertEqual(ours.get_seq_length(), 120 if keeps else 0)
            self.assertEqual(len(ours.layers[0].sequences[1]), 120 if keeps else 0)

    def test_beams_and_crops(self):
        ours, theirs = self.exact(), Everything()
        self.both(self.ids, ours, theirs)
        chosen = torch.tensor([2, 2, 0], device=self.device)
        ours.reorder_cache(chosen)
        theirs.layers = {i: (k[chosen], v[chosen]) for i, (k, v) in theirs.layers.items()}
        self.both(self.ids[:, :2], ours, theirs)
        ours.crop(100)
        theirs.layers = {i: (k[:, :, :100], v[:, :, :100]) for i, (k, v) in theirs.layers.items()}
        self.both(self.ids[:, :2], ours, theirs)
        ours.crop(0)
        self.assertEqual(ours.get_seq_length(), 102)
        ours.crop(-2)
        self.assertEqual(ours.get_seq_length(), 100)
        ours.batch_repeat_interleave(2)
        ours.batch_select_indices(torch.tensor([0, 2, 4]))
        self.assertEqual(len(ours.layers[0].sequences), 3)
        theirs.layers = {i: (k[:, :, :100], v[:, :, :100]) for i, (k, v) in theirs.layers.items()}
        self.both(self.ids[:, :1], ours, theirs)
        ours.reset()
        self.both(self.ids, ours, Everything())

    def test_misuse(self):
        cache = self.exact()
        with self.assertRaisesRegex(kvq.UnsupportedError, "does not hand the keys of its cache to the attention function"):
            self.model(self.ids, cache, eager)  # the first chunk would need no cache
        with self.assertRaisesRegex(kvq.ArgumentError, 'load it with attn_implementation="kvq"'):
            self.model(self.ids, cache, lambda module, q, *_, **__: (q.transpose(1, 2), None))
            self.model(self.ids, cache, self.attention)
        with self.assertRaisesRegex(kvq.ArgumentError, "needs past_key_values"):
            self.model(self.ids, Everything(), self.attention)
        cache = self.exact()
        self.model(self.ids, cache, self.attention)
        with self.assertRaisesRegex(kvq.ArgumentError, "a batch of 2 for a cache of 3"):
            self.model(self.ids[:2], cache, self.attention)
        q = torch.zeros(1, Q, 1, D, device=self.device, dtype=self.dtype)
        key = torch.zeros(1, KV, 1, D, device=self.device, dtype=self.dtype)
        for options, text in (({"dropout": 0.1}, "dropout"), ({"is_causal": False}, "not causal"), ({"head_mask": q}, "head_mask"),
                              ({"output_attentions": True}, "gives no weights"), ({"indices": q}, "takes no indices"),
                              ({"cu_seq_lens_q": q}, "takes no cu_seq_lens_q")):
            k, v = self.exact().update(key, key, 0)
            with self.assertRaisesRegex(kvq.UnsupportedError, text):
                self.attention(self.model, q, k, v, None, **options)


@unittest.skipIf(real_package is None, "transformers is not there")
class Real(unittest.TestCase):
    def test_generate(self):
        """Ids equal to those of the package's own cache: greedy, padded, beams."""
        import kvq.transformers

        torch.manual_seed(3)
        config = real_package.LlamaConfig(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0)
        model = real_package.LlamaForCausalLM(config).eval()
        ids = torch.randint(2, 200, (3, 40))
        mask = torch.ones_like(ids)
        mask[1, :15] = 0
        for options in ({}, {"num_beams": 3}):
            with self.subTest(options=options):
                options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False, **options)
                model.set_attn_implementation("eager")
                expected = model.generate(ids, **options)
                model.set_attn_implementation("kvq")
                cache = kvq.transformers.Cache("fp32", window="fp32")
                self.assertTrue(torch.equal(model.generate(ids, past_key_values=cache, **options), expected))
        # Drafts from the text itself, which are cut off where they are wrong.
        options = dict(attention_mask=mask[:1], max_new_tokens=40, do_sample=False)
        model.set_attn_implementation("eager")
        expected = model.generate(ids[:1], **options)
        model.set_attn_implementation("kvq")
        cache = kvq.transformers.Cache("fp32", window="fp32")
        drafted = model.generate(ids[:1], past_key_values=cache, prompt_lookup_num_tokens=3, **options)
        self.assertTrue(torch.equal(drafted, expected))
        # Quantized: it generates as many tokens, in fewer bytes.
        used = []
        for keys in ("fp16", "std4"):
            cache = kvq.transformers.Cache(keys, sinks=2, recent=8, page_tokens=32, rollback=0)
            out = model.generate(ids, past_key_values=cache, attention_mask=mask, max_new_tokens=60, do_sample=False)
            self.assertEqual(out.shape, (3, 100))
            used.append(cache.bytes())
        self.assertLess(used[1], 0.8 * used[0])

    def test_latents(self):
        """Ids of DeepSeek V3 with latents in 32 and 16 bit are those of the package's own cache; a token has the bytes of its latents."""
        import kvq.transformers

        if not hasattr(real_package, "DeepseekV3ForCausalLM"):
            self.skipTest("this version of transformers has no DeepseekV3ForCausalLM")
        torch.manual_seed(3)
        config = real_package.DeepseekV3Config(
            vocab_size=200, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=24,
            n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
            max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
        model = real_package.DeepseekV3ForCausalLM(config).eval()
        ids = torch.randint(2, 200, (3, 60))
        mask = torch.ones_like(ids)
        mask[1, :15] = 0
        for options in ({}, {"num_beams": 3}):
            options = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, **options)
            model.set_attn_implementation("eager")
            expected = model.generate(ids, **options)
            model.set_attn_implementation("kvq")
            for keys, of_number in (("fp32", 4), ("fp16", 2), ("std4", 2)):
                with self.subTest(keys=keys, options=options):
                    cache = kvq.transformers.Cache.for_model(model, keys, window="fp32" if keys == "fp32" else "fp16",
                                                               page_tokens=32, recent=8, rollback=0)
                    found, used = model.generate(ids, past_key_values=cache, **options), cache.sequences[0].usage()
                    bytes_ = used.quantized + used.window - used.slack
                    of_plain = 3 * len(cache.sequences[0]) * (64 + 16) * of_number
                    if keys == "std4":
                        self.assertGreater(used.quantized, 0)
                        self.assertEqual(found.shape, expected.shape)
                        self.assertLess(bytes_, 0.8 * of_plain)
                    else:
                        self.assertTrue(torch.equal(found, expected))
                        self.assertEqual(bytes_, of_plain)


if __name__ == "__main__":
    unittest.main()
