"""Tiny random models of many architectures of transformers, generated from with the package's cache and with kvq's: prints a table.

    python3 architectures.py [--least N] [--jobs N] [NAME]...

Ids are equal in float32 on the CPU: greedy, with padding on the left, beams, beams with padding, drafts from the prompt, prompts in chunks, two
sequences for each prompt, a prompt that is used again (copy.deepcopy, crop), and after reset() with another batch. "-": the package's own cache
does not do it either. Models that kvq does not hold are refused with their class, before a forward pass has ended. On a GPU in bfloat16 the error
of logits against float32 is at most 1.2 times that of the package's own attention.

Ends with 0 if all of it is so, and at least N architectures have been generated from (default: 25). Names: only these. scripts/gpu-test --python
runs it.
"""
import argparse
import copy
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings

import torch
import transformers

import kvq.transformers

WORDS, PAD = 120, 0
COMMON = dict(
    vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=PAD, tie_word_embeddings=False,
    attention_dropout=0.0, initializer_range=0.3)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
WINDOW = dict(sliding_window=12)
SLIDING = dict(WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4)
LATENT = dict(q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, head_dim=8, num_key_value_heads=4,
              n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
GPT = dict(n_embd=64, n_head=4, n_layer=3, n_positions=256, n_inner=96, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)

# Name before "ForCausalLM" and "Config" (or both, where they differ), and options.
HELD = {
    "Llama": {}, "Mistral": WINDOW, "Mixtral": dict(WINDOW, **EXPERTS), "Qwen2": {}, "Qwen2Moe": dict(EXPERTS, shared_expert_intermediate_size=32),
    "Qwen3": SLIDING, "Qwen3Moe": EXPERTS, "Gemma": {}, "Gemma2": dict(SLIDING, attn_logit_softcapping=5.0), "Gemma3/Gemma3Text": SLIDING,
    "Phi": {}, "Phi3": WINDOW, "StableLm": {}, "Starcoder2": WINDOW, "Olmo": {}, "Olmo2": {}, "Olmo3": SLIDING, "Olmoe": EXPERTS, "Granite": {},
    "GraniteMoe": EXPERTS, "Cohere": {}, "Cohere2": SLIDING, "GPTNeoX": {}, "GPT2/GPT2LMHead": GPT, "OPT": dict(ffn_dim=96, word_embed_proj_dim=64),
    "Glm": {}, "Glm4": {}, "Helium": {}, "Nemotron": {}, "Persimmon": {}, "SmolLM3": {}, "Exaone4": dict(SLIDING, sliding_window_pattern=2),
    "Ernie4_5": {}, "GptOss": dict(SLIDING, **EXPERTS), "Arcee": {}, "HunYuanDenseV1": {}, "SeedOss": {}, "Apertus": {}, "GPTBigCode": GPT,
    "Llama4/Llama4Text": dict(EXPERTS, attention_chunk_size=8, intermediate_size_mlp=96, no_rope_layers=[1, 1, 0],
                              layer_types=["chunked_attention", "chunked_attention", "full_attention"], moe_layers=[1], num_hidden_layers=3),
    "DeepseekV2": dict(EXPERTS, **LATENT), "DeepseekV3": dict(EXPERTS, **LATENT),
    "Qwen3Next": dict(EXPERTS, **LINEAR, shared_expert_intermediate_size=32, layer_types=["linear_attention", "linear_attention", "full_attention"]),
    "Lfm2": dict(conv_L_cache=3, layer_types=["conv", "full_attention", "conv"], full_attn_idxs=[1]),
    "Qwen3_5/Qwen3_5Text": dict(LINEAR, layer_types=["linear_attention", "linear_attention", "full_attention"]),
}
# And what the refusal says.
REFUSED = {
    "Gemma3n/Gemma3nText": (dict(SLIDING, num_kv_shared_layers=1, num_hidden_layers=3, laurel_rank=8, hidden_size_per_layer_input=8,
                                 vocab_size_per_layer_input=WORDS, activation_sparsity_pattern=[0.0] * 3, altup_num_inputs=2),
                            "num_kv_shared_layers"),
    "Gemma4/Gemma4Text": (dict(SLIDING, num_kv_shared_layers=1, hidden_size_per_layer_input=8, vocab_size_per_layer_input=WORDS,
                               global_head_dim=16), "num_kv_shared_layers"),
    "Bloom": (dict(n_layer=3, n_head=4), "does not hand"),
    "Falcon": (dict(new_decoder_architecture=False, multi_query=True, alibi=False), "does not hand"),
    "Mpt": (dict(d_model=64, n_heads=4, n_layers=3, max_seq_len=256), "does not hand"),
    "GPTJ": (dict(GPT, rotary_dim=8), "does not hand"),
    "CodeGen": (dict(GPT, rotary_dim=8), "does not hand"),
    "FalconH1": (dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1), "hybrid|at once"),
}
MODES = ("greedy", "padded", "beams", "beams padded", "drafts", "chunks", "two each", "again", "reset")


def made(name, options):
    """A model of the architecture; None: this version of the package has none."""
    model, config = (name.split("/") + [name])[:2] if "/" in name else (name, name)
    if config.endswith("LMHead"):
        model_class, config_class = f"{config}Model", f"{model}Config"
    else:
        model_class, config_class = f"{model}ForCausalLM", f"{config}Config"
    if not hasattr(transformers, model_class) or not hasattr(transformers, config_class):
        return None
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**COMMON, **options})
    model = getattr(transformers, model_class)(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def cache():
    return kvq.transformers.Cache("fp32", window="fp32")


def runs(model, mode, make):
    """Ids of a mode. make: of a cache, or None for the package's own"""
    torch.manual_seed(11)
    ids = torch.randint(2, WORDS, (3, 21))
    mask = torch.ones_like(ids)
    if "padded" in mode:
        mask[0, :7] = 0
        mask[2, :2] = 0
        ids = ids.masked_fill(mask == 0, PAD)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    if "beams" in mode:
        options.update(num_beams=3)
    elif mode == "drafts":
        ids, options["attention_mask"] = ids[:1].repeat(1, 2), mask[:1].repeat(1, 2)
        options.update(prompt_lookup_num_tokens=3)
    elif mode == "chunks":
        options.update(prefill_chunk_size=8)
    elif mode == "two each":
        options.update(num_beams=3, num_return_sequences=2)
    given = make()
    if mode == "again":
        with torch.no_grad():
            given = model(ids[:, :15], past_key_values=given, use_cache=True).past_key_values
        first = model.generate(ids, past_key_values=copy.deepcopy(given), **options)
        given.crop(-3)
        second = model.generate(torch.cat([ids[:, :12], ids[:, 3:9]], 1), past_key_values=given, **{**options, "attention_mask": mask[:, :18]})
        return torch.cat([first, second], 1)
    if mode == "reset":
        model.generate(ids, past_key_values=given, **options)
        given.reset()
        return model.generate(ids[:2, :9], past_key_values=given, **{**options, "attention_mask": mask[:2, :9]})
    return model.generate(ids, past_key_values=given, **options)


def theirs(model):
    return transformers.DynamicCache(config=model.config.get_text_config())


def line(e):
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def compare(name):
    """Results of all modes for an architecture, and what failed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, results, log = time.perf_counter(), {}, []
    try:
        model = made(name, HELD[name])
    except Exception as e:
        return name, {m: "?" for m in MODES}, [f"is not made: {line(e)}\n{traceback.format_exc()}"], 0.0
    if model is None:
        return name, {}, [], 0.0
    for mode in MODES:
        try:
            model.set_attn_implementation("eager")
            own = (lambda: theirs(model))
            if mode == "reset":  # the package's own caches do not take another batch: a new one
                expected = runs_fresh(model)
            else:
                expected = runs(model, mode, own)
        except Exception as e:
            results[mode] = "-"
            log.append(f"{mode}, own cache: {line(e)}")
            continue
        try:
            model.set_attn_implementation("kvq")
            found = runs(model, mode, cache)
            results[mode] = "equal" if torch.equal(found, expected) else "OTHER"
            if results[mode] == "OTHER":
                log.append(f"{mode}: ids differ in {(found != expected).sum().item()} of {expected.numel()} places")
        except Exception as e:
            results[mode] = "FAILED"
            log.append(f"{mode}: {line(e)}\n{traceback.format_exc()}")
    return name, results, log, time.perf_counter() - start


def runs_fresh(model):
    torch.manual_seed(11)
    ids = torch.randint(2, WORDS, (3, 21))[:2, :9]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, past_key_values=theirs(model))


def refuse(name):
    """Whether an architecture is refused by the name of its class, in the first forward pass."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options, text = REFUSED[name]
    try:
        model = made(name, options)
        if model is None:
            return name, "absent", ""
        model.set_attn_implementation("kvq")
        passes = []
        model.register_forward_hook(lambda *_: passes.append(0))
        ids = torch.randint(2, WORDS, (2, 9))
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, past_key_values=cache())
        return name, "FAILED", "it was generated from"
    except kvq.UnsupportedError as e:
        right = type(model).__name__ in str(e) and re.search(text, str(e)) and not passes
        return name, "refused" if right else "FAILED", f"{e}" + (f" (after {len(passes)} passes)" if passes else "")
    except Exception as e:
        return name, "FAILED", f"{line(e)}\n{traceback.format_exc()}"


def on_gpu():
    """Errors of logits in bfloat16 against float32, the package's attention and kvq's. Returns rows and whether all is well."""
    import kvq.cuda

    if not torch.cuda.is_available() or not kvq.cuda.available():
        print("on a GPU: not tested, there is none or the library was built without KVQ_LIBRARY_CUDA")
        return True
    well = True
    print(f"\n{'bfloat16 on a GPU':24}{'own error':>12}{'kvq':>12}{'ratio':>8}")
    for name in ("Llama", "Mistral", "Qwen3", "Gemma2", "Phi3", "GptOss", "Qwen3Next"):
        options = dict(HELD[name], hidden_size=256, head_dim=64, intermediate_size=384, initializer_range=0.05, max_position_embeddings=1024)
        if "sliding_window" in options:
            options["sliding_window"] = 100
        try:
            model = made(name, options)
            if model is None:
                continue
            model = model.cuda()
            torch.manual_seed(3)
            ids = torch.randint(2, WORDS, (2, 340), device="cuda")

            def logits(given):
                with torch.no_grad():
                    out = [model(ids[:, :300], past_key_values=given, use_cache=True).logits]
                    out += [model(ids[:, i : i + 1], past_key_values=given, use_cache=True).logits for i in range(300, 340)]
                return torch.cat(out, 1).double()

            model.set_attn_implementation("eager")
            right = logits(theirs(model))
            model = model.to(torch.bfloat16)
            own = (logits(theirs(model)) - right).square().mean().sqrt().item()
            model.set_attn_implementation("kvq")
            ours = (logits(kvq.transformers.Cache("bf16", max_tokens=512)) - right).square().mean().sqrt().item()
            ok = ours <= 1.2 * own
            print(f"{name:24}{own:12.3e}{ours:12.3e}{ours / own:8.2f}{'' if ok else '  FAILED'}")
        except Exception as e:
            ok = False
            print(f"{name:24}FAILED: {line(e)}\n{traceback.format_exc()}")
        well = well and ok
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("names", nargs="*")
    a = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {kvq.__version__ if hasattr(kvq, '__version__') else 'kvq'}")
    held = [n for n in HELD if not a.names or n.split("/")[0] in a.names]
    refused = [n for n in REFUSED if not a.names or n.split("/")[0] in a.names]
    failed, logs, generated, equal = 0, [], 0, 0
    with multiprocessing.get_context("fork").Pool(a.jobs) as pool:
        later = pool.map_async(refuse, refused, chunksize=1)
        print(f"{'':18}" + "".join(f"{m:>14}" for m in MODES) + f"{'s':>8}")
        for name, results, log, seconds in pool.imap(compare, held):
            if not results:
                print(f"{name:18}not in this version of transformers")
                continue
            print(f"{name:18}" + "".join(f"{results[m]:>14}" for m in MODES) + f"{seconds:8.1f}", flush=True)
            equal += sum(r == "equal" for r in results.values())
            bad = [m for m in MODES if results[m] not in ("equal", "-")]
            failed += len(bad)
            generated += not bad and results["greedy"] == "equal"
            logs.extend(f"{name}: {entry}" for entry in log)
        for name, result, said in later.get():
            print(f"{name:18}{result}: {said.splitlines()[0] if said else ''}")
            failed += result == "FAILED"
            if result == "FAILED":
                logs.append(f"{name}: {said}")
    print(f"\n{generated} architectures, {equal} generations equal, {failed} failures")
    well = on_gpu() if not a.names else True
    if logs:
        print("\n" + "\n".join(logs), file=sys.stderr)
    least = a.least if not a.names else 1
    if generated < least:
        print(f"only {generated} architectures were generated from, not {least}", file=sys.stderr)
    sys.exit(0 if well and failed == 0 and generated >= least else 1)


if __name__ == "__main__":
    main()
