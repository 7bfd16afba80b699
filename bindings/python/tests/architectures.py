"""Generates from tiny random models of many architectures of transformers, with the package's cache and with
kvq's, and prints a table.

    python3 architectures.py [--least N] [--jobs N] [NAME]...

Ids are equal in float32 on the CPU: greedy, with padding on the left, beams, beams with padding, drafts
from the prompt, prompts in chunks, two sequences for each prompt, a prompt that is used again
(copy.deepcopy, crop), and after reset() with another batch. "*" behind a name: with Cache.for_model, in pages that
windows free soon. "-": the package's own layers do not do it either. Logits under other masks are near those of the package. Models that kvq does not hold are refused
with their class, before a forward pass has ended. On a GPU in bfloat16 the error of logits against float32
is at most 1.2 times that of the package's own attention.

Ends with 0 if all of it is so, and at least N architectures have been generated from (default: 25). Names:
only these. scripts/gpu-test --python runs it.
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
    vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=None,
    pad_token_id=PAD, tie_word_embeddings=False, attention_dropout=0.0, initializer_range=0.3)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=32)
SHARED_EXPERT = dict(EXPERTS, shared_expert_intermediate_size=32)
WINDOW = dict(sliding_window=12)
SLIDING = dict(WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
GEMMA4 = dict(SLIDING, hidden_size_per_layer_input=8, vocab_size_per_layer_input=WORDS, global_head_dim=24)
CHUNKED = dict(attention_chunk_size=8, no_rope_layers=[1, 1, 0],
               layer_types=["chunked_attention", "chunked_attention", "full_attention"])
LATENT = dict(q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
              head_dim=8, num_key_value_heads=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
LINEAR = dict(layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
              linear_conv_kernel_dim=4)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2,
             mamba_chunk_size=16)
# An encoder with a decoder of fewer heads: sizes of COMMON would be those of both.
TWO = dict(d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=96,
           decoder_ffn_dim=96, decoder_start_token_id=1, num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None,
           hidden_size=None, head_dim=None, intermediate_size=None)
FRAMES = 40  # that Whisper hears
GPT = dict(n_embd=64, n_head=4, n_layer=3, n_positions=256, n_inner=96, attn_pdrop=0.0, resid_pdrop=0.0,
           embd_pdrop=0.0)

# The model is NAMEForCausalLM with NAMEConfig, unless this says otherwise.
CLASSES = {
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
    "Gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig"),
    "Gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig"),
    "Gemma4, nothing shared": ("Gemma4ForCausalLM", "Gemma4TextConfig"),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config"),
    "Llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
    "Qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "Bart": ("BartForConditionalGeneration", "BartConfig"),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig"),
    "T5": ("T5ForConditionalGeneration", "T5Config"),
}
# Options beside COMMON.
HELD = {
    "Llama": {}, "Mistral": WINDOW, "Mixtral": dict(WINDOW, **EXPERTS), "Qwen2": {},
    "Qwen2Moe": SHARED_EXPERT, "Qwen3": dict(SLIDING, use_sliding_window=True), "Qwen3Moe": EXPERTS, "Gemma": {},
    "Gemma2": dict(SLIDING, attn_logit_softcapping=5.0), "Gemma3": SLIDING,
    "Gemma4, nothing shared": dict(GEMMA4, num_kv_shared_layers=0), "Phi": {}, "Phi3": WINDOW, "StableLm": {},
    "Starcoder2": WINDOW, "Olmo": {}, "Olmo2": {}, "Olmo3": SLIDING, "Olmoe": EXPERTS, "Granite": {},
    "GraniteMoe": EXPERTS, "Cohere": {}, "Cohere2": SLIDING, "GPTNeoX": {}, "GPT2": GPT, "GPTBigCode": GPT,
    "OPT": dict(ffn_dim=96, word_embed_proj_dim=64), "Glm": {}, "Glm4": {}, "Helium": {}, "Nemotron": {},
    "Persimmon": {}, "SmolLM3": {}, "Exaone4": dict(SLIDING, sliding_window_pattern=2), "Ernie4_5": {},
    "GptOss": dict(SLIDING, **EXPERTS), "Arcee": {}, "HunYuanDenseV1": {}, "SeedOss": {}, "Apertus": {},
    # Attention in chunks.
    "Llama4": dict(CHUNKED, **EXPERTS, intermediate_size_mlp=96, moe_layers=[1]),
    # Latent attention.
    "DeepseekV2": dict(LATENT, **EXPERTS), "DeepseekV3": dict(LATENT, **EXPERTS), "MiniCPM3": LATENT,
    "Glm4MoeLite": dict(LATENT, **EXPERTS), "Youtu": LATENT,
    # Recurrent states in some layers.
    "Qwen3Next": dict(LINEAR, **SHARED_EXPERT), "Qwen3_5": LINEAR,
    "NemotronH": dict(layer_types=["linear_attention", "full_attention", "mlp"], mamba_num_heads=8, mamba_head_dim=16, n_groups=1,
                      ssm_state_size=8, conv_kernel=4, expand=2, chunk_size=16, use_mamba_kernels=False),
    "Lfm2": dict(conv_L_cache=3, layer_types=["conv", "full_attention", "conv"], full_attn_idxs=[1]),
    "Jamba": dict(attn_layer_period=3, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1,
                  mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False),
    "Bamba": dict(MAMBA, attn_layer_indices=[1]),
    "GraniteMoeHybrid": dict(MAMBA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32,
                             layer_types=["linear_attention", "full_attention", "linear_attention"]),
}
# With Cache.for_model; those of REFUSED with it alone.
FOR_MODEL = ("Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3", "Gemma4, nothing shared", "Phi3", "Olmo3", "Cohere2", "Exaone4", "GptOss",
             "Llama4", "DeepseekV2", "DeepseekV3", "MiniCPM3", "Glm4MoeLite", "Youtu", "Qwen3Next", "Qwen3_5", "OlmoHybrid", "NemotronH",
             "Lfm2", "Jamba", "Bamba", "GraniteMoeHybrid", "Gemma3n", "Gemma4", "Whisper", "Bart")
# And what the refusal says.
OWN_ATTENTION = "does not hand"
REFUSED = {
    "Gemma3n": (dict(SLIDING, num_kv_shared_layers=1, laurel_rank=8, hidden_size_per_layer_input=8,
                     vocab_size_per_layer_input=WORDS, activation_sparsity_pattern=[0.0] * 3,
                     altup_num_inputs=2),
                "keys of another layer"),
    "Gemma4": (dict(GEMMA4, num_kv_shared_layers=1), "keys of another layer"),
    "OlmoHybrid": (LINEAR, r"looks for layer \d of the cache"),
    "Bloom": (dict(n_layer=3, n_head=4), OWN_ATTENTION),
    "Falcon": (dict(new_decoder_architecture=False, multi_query=True, alibi=False, head_dim=None),
               OWN_ATTENTION),
    "Mpt": (dict(d_model=64, n_heads=4, n_layers=3, max_seq_len=256), OWN_ATTENTION),
    "GPTJ": (dict(GPT, rotary_dim=8), OWN_ATTENTION),
    "CodeGen": (dict(GPT, rotary_dim=8), OWN_ATTENTION),
    "FalconH1": (dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1),
                 "hybrid"),
    "DeepseekV32": (dict(LATENT, **EXPERTS, index_topk=8, index_head_dim=16, index_n_heads=2),
                    "deepseek_sparse_attention"),
    "Bart": (dict(TWO, forced_eos_token_id=None), "not causal"),
    "Whisper": (dict(TWO, num_mel_bins=8, max_source_positions=FRAMES // 2, max_target_positions=64), "not causal"),
    "T5": (dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=1, num_hidden_layers=None,
                num_attention_heads=None, hidden_size=None, head_dim=None), "learned biases"),  # by for_model, too
}
OPTIONS = {**HELD, **{name: options for name, (options, _) in REFUSED.items()}}
MODES = ("greedy", "padded", "beams", "beams padded", "drafts", "chunks", "two each", "copy", "crop", "reset")


def made(name, options):
    """A model of the architecture; None: this version of the package has none."""
    model_class, config_class = CLASSES.get(name, (f"{name}ForCausalLM", f"{name}Config"))
    if not hasattr(transformers, model_class) or not hasattr(transformers, config_class):
        return None
    torch.manual_seed(7)
    options = {k: v for k, v in {**COMMON, **options}.items() if v is not None or k == "eos_token_id"}
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def cache(model=None):
    if model is None:
        return kvq.transformers.Cache("fp32", window="fp32")
    return kvq.transformers.Cache.for_model(model, "fp32", window="fp32", page_tokens=8, sinks=0, recent=8, rollback=8)


def theirs(model):
    made = [transformers.DynamicCache(config=model.config.get_text_config(decoder=True)) for _ in range(2)]
    return transformers.EncoderDecoderCache(*made) if model.config.is_encoder_decoder else made[0]


def runs(model, mode, make):
    """Ids of a mode with caches of make()."""
    own = make is theirs
    torch.manual_seed(11)
    ids = torch.randint(2, WORDS, (3, 21))
    mask = torch.ones_like(ids)
    if "padded" in mode:
        mask[0, :7] = 0
        mask[2, :2] = 0
        ids = ids.masked_fill(mask == 0, PAD)
    if mode == "drafts":  # what it says is in it twice
        ids, mask = ids[:1].repeat(1, 2), mask[:1].repeat(1, 2)
    of_modes = {"beams": dict(num_beams=3), "beams padded": dict(num_beams=3),
                "drafts": dict(prompt_lookup_num_tokens=3), "chunks": dict(prefill_chunk_size=8),
                "two each": dict(num_beams=3, num_return_sequences=2)}
    options = dict(max_new_tokens=12, do_sample=False, **of_modes.get(mode, {}))
    hears = model.main_input_name == "input_features"
    if (model.config.is_encoder_decoder and mode in ("chunks", "copy", "crop")) or (hears and "padded" in mode):
        raise ValueError("an encoder takes all of its input at once")

    def generated(ids, given=None, mask=None):
        mask = torch.ones_like(ids) if mask is None else mask
        inputs = dict(inputs=ids, attention_mask=mask)
        if hears:
            inputs = dict(inputs=torch.sin(ids.repeat(1, 5)[:, None, :FRAMES] * torch.arange(1.0, 9.0)[:, None]))
        given = make(model) if given is None else given
        return transformers.GenerationMixin.generate(model, **inputs, past_key_values=given, **options)

    other = torch.cat([ids[:, :12], ids[:, 3:9]], 1)
    if mode in ("copy", "crop"):
        prompt = make(model)
        logits(model, ids[:, :12], prompt)
        again = copy.deepcopy(prompt)
        if mode == "crop":
            logits(model, ids[:, 12:15], prompt)
        first = generated(ids, copy.deepcopy(prompt))
        if mode == "crop" and not own:  # the package's layers of windows and states forget what is needed
            prompt.crop(-3)
            again = prompt
        return torch.cat([first, generated(other, again)], 1)
    if mode == "reset":
        given = make(model)
        if not own:
            generated(ids, given)
            given.reset()
        return generated(ids[:2, :9], given)
    return generated(ids, mask=mask)


def line(e):
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def compare(row):
    """Results of all modes for an architecture, and what failed. A name with "*": with Cache.for_model."""
    name = row.rstrip("*")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, results, log = time.perf_counter(), {}, []
    try:
        model = made(name, OPTIONS[name])
    except Exception as e:
        return row, {m: "?" for m in MODES}, [f"is not made: {line(e)}\n{traceback.format_exc()}"], 0.0
    if model is None:
        return row, {}, [], 0.0
    for mode in MODES:
        try:
            model.set_attn_implementation("eager")
            expected = runs(model, mode, theirs)
        except Exception as e:
            results[mode] = "-"
            log.append(f"{mode}, own cache: {line(e)}")
            continue
        try:
            model.set_attn_implementation("kvq")
            found = runs(model, mode, cache if row != name else lambda _: cache())
            results[mode] = "equal" if torch.equal(found, expected) else "OTHER"
            if results[mode] == "OTHER":
                log.append(f"{mode}: {(found != expected).sum().item()} of {expected.numel()} ids differ")
        except Exception as e:
            # Layers of recurrent states are the package's own, which cannot go back.
            results[mode] = "-" if mode == "crop" and "track past states" in str(e) else "FAILED"
            log.append(f"{mode}: {line(e)}\n{traceback.format_exc() if results[mode] == 'FAILED' else ''}")
    return row, results, log, time.perf_counter() - start


def logits(model, ids, given, **options):
    with torch.no_grad():
        return model(ids, past_key_values=given, use_cache=True, **options).logits


def masks():
    """Logits of prompts and decode steps under masks that are not causal, made by the package."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    model, worst = made("Gemma2", dict(HELD["Gemma2"], sliding_window=64)), {}
    ids = torch.randint(2, WORDS, (2, 31))
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    blocks = torch.full_like(ids, -1)
    blocks[:, 8:15], blocks[:, 17:20] = 0, 1
    kinds = {"prefix": dict(or_mask_function=lambda b, h, q, k: k < 9),
             "blocks": dict(block_sequence_ids=blocks),
             "packed": dict(and_mask_function=lambda b, h, q, k: (q < 13) == (k < 13))}
    for kind, options in kinds.items():
        for mask in (None, padded):
            outs = []
            for implementation, given in (("eager", theirs(model)), ("kvq", cache())):
                model.set_attn_implementation(implementation)
                out = []
                for first, last in ((0, 30), (30, 31)):
                    common = dict(config=model.config, inputs_embeds=torch.zeros(2, last - first, 1),
                                  past_key_values=given, **options,
                                  attention_mask=None if mask is None else mask[:, :last])
                    of_layers = {"full_attention": create_causal_mask(**common),
                                 "sliding_attention": create_sliding_window_causal_mask(**common)}
                    out.append(logits(model, ids[:, first:last], given, attention_mask=of_layers))
                outs.append(torch.cat(out, 1))
            seen = slice(None) if mask is None else mask.bool()
            error = ((outs[1] - outs[0])[seen].abs().max() / outs[0].abs().max()).item()
            worst[kind] = max(worst.get(kind, 0.0), error)
    print("masks, largest error: " + ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
    return max(worst.values()) < 1e-4


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
        if model.main_input_name == "input_features":
            ids = torch.zeros(2, 8, FRAMES)
        transformers.GenerationMixin.generate(model, ids, max_new_tokens=4, do_sample=False,
                                              past_key_values=cache(model if text == "learned biases" else None))
        return name, "FAILED", "it was generated from"
    except kvq.UnsupportedError as e:
        named = type(model).__name__ in str(e) or f"type {model.config.model_type} " in str(e)
        right = named and re.search(text, str(e)) and not passes
        said = f"{e} (after {len(passes)} passes)" if passes else str(e)
        return name, "refused" if right else "FAILED", said
    except Exception as e:
        return name, "FAILED", f"{line(e)}\n{traceback.format_exc()}"


def on_gpu():
    """Errors of logits in bfloat16 against float32, the package's attention and kvq's."""
    import kvq.cuda

    if not torch.cuda.is_available() or not kvq.cuda.available():
        print("on a GPU: not tested, there is none or the library was built without KVQ_LIBRARY_CUDA")
        return True
    well = True
    print(f"\n{'bfloat16 on a GPU':24}{'own error':>12}{'kvq':>12}{'ratio':>8}")
    for name in ("Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3", "Gemma3n", "Gemma4, nothing shared", "Gemma4", "Phi3", "Cohere2",
                 "Exaone4", "GptOss", "Llama4", "Qwen3Next", "Whisper"):
        options = dict(initializer_range=0.05, hidden_size=256, head_dim=64, intermediate_size=384, max_position_embeddings=1024)
        options.update(OPTIONS[name])
        for option, value in (("sliding_window", 100), ("global_head_dim", 64), ("attention_chunk_size", 100), ("d_model", 256),
                              ("decoder_attention_heads", 4), ("max_source_positions", 150), ("max_target_positions", 512)):
            if option in options:
                options[option] = value
        try:
            model = made(name, options)
            if model is None:
                continue
            model = model.cuda()
            torch.manual_seed(3)
            ids = torch.randint(2, WORDS, (2, 340), device="cuda")

            sounds = torch.sin(torch.arange(2 * 8 * 300.0, device="cuda")).view(2, 8, 300)

            def all_logits(given):
                steps, more, of = [(0, 300)] + [(i, i + 1) for i in range(300, 340)], {}, "input_ids"
                with torch.no_grad():
                    if model.config.is_encoder_decoder:
                        more, of = dict(encoder_outputs=model.get_encoder()(sounds.to(model.dtype))), "decoder_input_ids"
                    outs = [model(**{of: ids[:, a:b]}, past_key_values=given, use_cache=True, **more).logits for a, b in steps]
                return torch.cat(outs, 1).double()

            model.set_attn_implementation("eager")
            right = all_logits(theirs(model))
            model = model.to(torch.bfloat16)
            own = (all_logits(theirs(model)) - right).square().mean().sqrt().item()
            model.set_attn_implementation("kvq")
            ours = (all_logits(kvq.transformers.Cache.for_model(model, "bf16", max_tokens=512)) - right).square().mean().sqrt().item()
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
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, kvq {kvq.__version__}")
    rows = list(HELD) + [name + "*" for name in FOR_MODEL]
    held, refused = ([n for n in of if not a.names or n in a.names] for of in (rows, REFUSED))
    failed, logs, generated, equal = 0, [], 0, 0
    with multiprocessing.get_context("fork").Pool(a.jobs) as pool:
        later = pool.map_async(refuse, refused, chunksize=1)
        print(f"{'':23}" + "".join(f"{m:>14}" for m in MODES) + f"{'s':>8}")
        for name, results, log, seconds in pool.imap(compare, held):
            if not results:
                print(f"{name:23}not in this version of transformers")
                continue
            print(f"{name:23}" + "".join(f"{results[m]:>14}" for m in MODES) + f"{seconds:8.1f}", flush=True)
            equal += sum(r == "equal" for r in results.values())
            bad = [m for m in MODES if results[m] not in ("equal", "-")]
            failed += len(bad)
            generated += not bad and results["greedy"] == "equal" and name in HELD
            logs.extend(f"{name}: {entry}" for entry in log)
        for name, result, said in later.get():
            print(f"{name:23}{result}: {said.splitlines()[0] if said else ''}")
            failed += result == "FAILED"
            if result == "FAILED":
                logs.append(f"{name}: {said}")
    print(f"\n{generated} architectures, {equal} generations equal, {failed} failures")
    well = True
    if not a.names:
        for part in (masks, on_gpu):
            try:
                well = part() and well
            except Exception:
                well = False
                logs.append(traceback.format_exc())
    if logs:
        print("\n" + "\n".join(logs), file=sys.stderr)
    least = a.least if not a.names else 0
    if generated < least:
        print(f"only {generated} architectures were generated from, not {least}", file=sys.stderr)
    sys.exit(0 if well and failed == 0 and generated >= least else 1)


if __name__ == "__main__":
    main()
