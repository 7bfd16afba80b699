"""The layers of a model of transformers, from configs as plain objects."""
import types
import unittest

import kvq
from kvq._configs import layers_of

SIZES = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32, hidden_size=256)


def config(**options):
    return types.SimpleNamespace(**dict(SIZES, model_type="toy", **options))


class Configs(unittest.TestCase):
    def kinds(self, **options):
        return [None if layer is None else layer.kind for layer in layers_of(config(**options))]

    def test_kinds(self):
        self.assertEqual(self.kinds(), ["full"] * 4)
        self.assertEqual(self.kinds(sliding_window=None, attention_chunk_size=None), ["full"] * 4)
        self.assertEqual(self.kinds(sliding_window=16), ["sliding"] * 4)
        self.assertEqual(self.kinds(attention_chunk_size=16), ["chunked"] * 4)
        types_ = ["sliding_attention", "chunked_attention", "full_attention", "mlp"]
        self.assertEqual(self.kinds(layer_types=types_, sliding_window=16, attention_chunk_size=8),
                         ["sliding", "chunked", "full", None])
        of_text = types.SimpleNamespace(get_text_config=lambda decoder: config(sliding_window=16))
        self.assertEqual(layers_of(of_text), [kvq.sliding_attention(16, 2, 32, 32)] * 4)

    def test_shared(self):
        types_ = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
        layers = layers_of(config(layer_types=types_, sliding_window=16, num_kv_shared_layers=2))
        self.assertEqual([layer.kind for layer in layers], ["sliding", "full", "sliding", "shared", "shared"])
        self.assertEqual([layer.owner for layer in layers[3:]], [1, 2])

    def test_sizes(self):
        one = dict(num_hidden_layers=1)
        self.assertEqual(layers_of(types.SimpleNamespace(**dict(one, num_attention_heads=8, hidden_size=256))),
                         [kvq.full_attention(8, 32, 32)])
        latent = dict(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
        self.assertEqual(layers_of(config(**latent))[0], kvq.latent_attention(64, 8))
        wide = dict(SIZES, num_key_value_heads=1, head_dim=64)
        of_layers = [types.SimpleNamespace(**sizes) for sizes in (SIZES, SIZES, SIZES, wide)]
        self.assertEqual([(l.kv_heads, l.head_dim) for l in layers_of(config(is_heterogeneous=True, per_layer_config=of_layers))],
                         [(2, 32)] * 3 + [(1, 64)])

    def test_states(self):
        types_ = ["linear_attention", "full_attention"]
        delta = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=8,
                     linear_conv_kernel_dim=4)
        mamba = dict(mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
        for options, expected in (
                (delta, [("conv", 1, 96, 4), ("recurrent", 4, 16, 8)]),
                (mamba, [("conv", 1, 512, 4), ("recurrent", 1, 512, 16)]),
                (dict(mamba, mamba_n_heads=8, mamba_n_groups=2), [("conv", 1, 576, 4), ("recurrent", 8, 64, 16)]),
                (dict(mamba_num_heads=8, mamba_head_dim=10, n_groups=2, ssm_state_size=16, conv_kernel=4),
                 [("conv", 1, 144, 4), ("recurrent", 8, 10, 16)])):
            parts = layers_of(config(layer_types=types_, **options))[0].parts
            self.assertEqual([(p.name, p.heads, p.rows, p.columns) for p in parts], expected)
        parts = layers_of(config(layer_types=["conv", "full_attention"], conv_L_cache=3))[0].parts
        self.assertEqual([(p.name, p.heads, p.rows, p.columns) for p in parts], [("conv", 1, 256, 3)])

    def test_refusals(self):
        linear = ["linear_attention", "full_attention"]
        for options, text in ((dict(relative_attention_num_buckets=32), "learned biases .*relative_attention_num_buckets"),
                              (dict(cross_attention_layers=[1]), "cross_attention_layers"),
                              (dict(num_kv_shared_layers=1, layer_types=["full_attention", "sliding_attention"], sliding_window=9),
                               "a layer of the type sliding_attention with the keys of an earlier one"),
                              (dict(number_of_conv_states=3), "3 convolution states"),
                              (dict(layer_types=["hybrid"]), "layers of the type hybrid"),
                              (dict(layer_types=["sliding_attention"]), "layers of the type sliding_attention"),
                              (dict(layer_types=linear), "linear_attention, the sizes of whose state kvq does not know"),
                              (dict(layer_types=["conv", "mlp"], conv_L_cache=3), "no layers with keys and values"),
                              (dict(num_attention_heads=(4, 8)), "num_attention_heads .4, 8. in its config, not a number")):
            with self.assertRaisesRegex(kvq.UnsupportedError, f"^kvq: a model of the type toy has .*{text}"):
                layers_of(types.SimpleNamespace(**{**SIZES, "model_type": "toy", **options}))


if __name__ == "__main__":
    unittest.main()
