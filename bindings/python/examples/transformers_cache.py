"""A Llama generates with kvq as its cache, on the CPU; then a step of it beside transformers' own cache. Its weights are random."""
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import kvq.transformers

torch.manual_seed(1)
config = LlamaConfig(vocab_size=1000, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                     num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=None)
model = AutoModelForCausalLM.from_config(config).eval()  # in place of from_pretrained(name)
prompt = torch.randint(2, 1000, (1, 1000))


@torch.no_grad()
def after_prompt(attention, cache):
    """Logits of the last token, behind all others in the cache."""
    model.set_attn_implementation(attention)
    model(prompt[:, :-1], past_key_values=cache)
    return model(prompt[:, -1:], past_key_values=cache).logits[0, -1]


model.set_attn_implementation("kvq")
cache = kvq.transformers.Cache.for_model(model, "std4")
ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=24, do_sample=False,
                     pad_token_id=0)
n = cache.get_seq_length()
print(f"{ids.shape[1]} tokens, {n} in the cache: {cache.pages.info().bytes_in_use} bytes, in 16 bit {n * 4 * 2 * 2 * 64 * 2}")

expected = after_prompt("sdpa", DynamicCache(config=config))
logits = after_prompt("kvq", kvq.transformers.Cache.for_model(model, "std4"))
print(f"logits of one step differ by {float((logits - expected).norm() / expected.norm()):.1%}")
