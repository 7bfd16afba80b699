# SPDX-License-Identifier: MIT
"""The Python examples of docs/ that need torch and a GPU or a model. check.py reads this file and compares its names with the package."""
import torch
from transformers import AutoModelForCausalLM

import kvq
import kvq.cuda
import kvq.press


def in_the_package(layer, k, v, q):
    cache = kvq.Cache(layers=32, kv_heads=8, head_dim=128, keys="std4")
    sequence = cache.new_sequence()
    out = sequence.prefill(layer, k, v, q)      # [tokens][heads][dim]
    return out


def tokens_dropped_head_by_head(sequence, layers, k, v, q):
    sequence.hold()                                         # the prompt stays in 16 bit
    for layer in range(layers):
        out = sequence.prefill(layer, k, v, q)
    for layer in range(layers):
        scores = kvq.press.snapkv(sequence, layer, q[-64:])
        kvq.press.retain(sequence, layer, scores, keep=0.5, recent=64)
    return out


def models_whose_layers_differ(n):
    window, full = kvq.sliding_attention(1024, kv_heads=16, head_dim=256), kvq.full_attention(kv_heads=4, head_dim=512)
    cache = kvq.Cache([full if i % 6 == 5 else window for i in range(60)], keys="std4")

    delta = kvq.state_layer([kvq.StatePart("recurrent", "float32", heads=32, rows=128, columns=128, snapshot="int8-columns"),
                             kvq.StatePart("conv", "bfloat16", rows=3, columns=8192)])
    hybrid = kvq.Cache([kvq.full_attention(2, 256) if i % 4 == 3 else delta for i in range(48)], keys="std4", snapshot_every=1024)
    sequence = hybrid.new_sequence()
    s = sequence.state(0, "recurrent")                      # float32 [32][128][128], written in place
    sequence.advance(n, prompt_ends=True)                   # all layers have taken n tokens; takes a snapshot if one is due
    again = sequence.trim(900)                              # goes back to a snapshot: the last `again` of 900 tokens must run again
    return cache, s, again


def on_a_gpu(n, k, v, q):
    cache = kvq.cuda.Cache(layers=32, kv_heads=8, head_dim=128, formats="std4", dtype=torch.bfloat16, max_batch=16)
    rows = [cache.new_sequence() for _ in range(16)]
    cache.begin_prompt(rows[0], n)                          # any number of tokens of one sequence,
    for layer in range(32):
        out = cache.prefill(layer, k, v, q)                 # [n][heads][128]
    cache.begin_step(rows)                                  # or one of every row, None for a row that is not there:
    for layer in range(32):
        out = cache.prefill(layer, k, v, q)                 # [16][heads][128]
    return out


def with_transformers(name, inputs):
    import kvq.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq")
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4", threads=kvq.Threads(8)))           # on the CPU
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4", recent=128, max_tokens=16384))     # on a GPU
    model.generate(**inputs, past_key_values=kvq.transformers.Cache.for_model(model, "std4"))                  # layers as its config says


def decode_graph(model, prompt, n):
    cache = kvq.transformers.Cache("std4", recent=128, max_tokens=16384, pool_tokens=16 * 16384, pool_sequences=16)
    logits = model(prompt, past_key_values=cache).logits[:, -1:]
    step = kvq.transformers.DecodeGraph(model, cache)
    for _ in range(n):
        logits = step(logits.argmax(-1))                    # [batch][1][vocabulary], overwritten by the next call
    return logits


def in_graphs(model, inputs):
    kvq.transformers.decode_in_graphs(model)                # del model.forward takes it back
    model.generate(**inputs, past_key_values=kvq.transformers.Cache("std4", recent=128, max_tokens=16384))
