// The schemes that are compared, by name: one list for bench_quality and for examples/llama.
//
// Each function calls add.template operator()<Keys, Values>(name, source) for every scheme of a family. Families are apart so
// that programs that instantiate attention can give each a translation unit of its own.
#pragma once

#include <deque>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/presets.hpp>
#include <kvq/schemes/published.hpp>

namespace quality {

/// Groups of channels of a token; what MLX, HQQ and many engines have.
template <class Add>
void affine_schemes(Add&& add) {
    const char* const source = "min-max groups of channels of a token, as in MLX";
    add.template operator()<kvq::int8, kvq::int8>("int8",
                                                  "symmetric per token and head, as in vLLM, nearest");
    const auto same = [&]<class S>(const char* name) { add.template operator()<S, S>(name, source); };
    same.template operator()<kvq::affine<8, kvq::per_token<64>>>("affine-8-g64");
    same.template operator()<kvq::affine<6, kvq::per_token<64>>>("affine-6-g64");
    same.template operator()<kvq::affine<5, kvq::per_token<64>>>("affine-5-g64");
    same.template operator()<kvq::affine<4, kvq::per_token<64>>>("affine-4-g64");
    same.template operator()<kvq::affine<4, kvq::per_token<32>>>("affine-4-g32");
    same.template operator()<kvq::affine<3, kvq::per_token<32>>>("affine-3-g32");
    same.template operator()<kvq::affine<2, kvq::per_token<32>>>("affine-2-g32");
}

/// Keys per channel, values per token.
template <class Add>
void kivi_schemes(Add&& add) {
    const auto pair = [&]<int B, int G>(const char* name) {
        add.template operator()<typename kvq::kivi<B, G>::keys, typename kvq::kivi<B, G>::values>(
            name, "KIVI, arXiv 2402.02750");
    };
    pair.template operator()<4, 32>("kivi-4-g32");
    pair.template operator()<4, 64>("kivi-4-g64");
    pair.template operator()<4, 128>("kivi-4-g128");
    pair.template operator()<3, 32>("kivi-3-g32");
    pair.template operator()<3, 64>("kivi-3-g64");
    pair.template operator()<2, 32>("kivi-2-g32");
    pair.template operator()<2, 64>("kivi-2-g64");
    pair.template operator()<2, 128>("kivi-2-g128");
}

/// Codebooks and rotations. Not all of them are foldable.
template <class Add>
void rotation_schemes(Add&& add) {
    const auto pair = [&]<class P>(const char* name, const char* source) {
        add.template operator()<typename P::keys, typename P::values>(name, source);
    };
    pair.template operator()<kvq::quarot<4>>("quarot-4", "QuaRot, arXiv 2404.00456");
    pair.template operator()<kvq::vllm_int4>("vllm-int4", "vLLM int4_per_token_head");
    pair.template operator()<kvq::turboquant<4>>("turboquant-4",
                                                 "TurboQuant, arXiv 2504.19874, renormalised");
    pair.template operator()<kvq::turboquant<3>>("turboquant-3",
                                                 "TurboQuant, arXiv 2504.19874, renormalised");
    pair.template operator()<kvq::turboquant<2>>("turboquant-2",
                                                 "TurboQuant, arXiv 2504.19874, renormalised");
    pair.template operator()<kvq::turboquant_plain<4>>("turboquant-plain-4", "TurboQuant, arXiv 2504.19874");
    pair.template operator()<kvq::turboquant_plain<2>>("turboquant-plain-2", "TurboQuant, arXiv 2504.19874");
    pair.template operator()<kvq::exllamav3<4>>("exllamav3-4", "exllamav3");
    pair.template operator()<kvq::exllamav3<3>>("exllamav3-3", "exllamav3");
    pair.template operator()<kvq::exllamav3<2>>("exllamav3-2", "exllamav3");
}

template <class Add>
void kvarn_schemes(Add&& add) {
    const auto pair = [&]<class P>(const char* name, const char* source) {
        add.template operator()<typename P::keys, typename P::values>(name, source);
    };
    pair.template operator()<kvq::kvarn<4>>("kvarn-4", "KVarN, arXiv 2606.03458");
    pair.template operator()<kvq::kvarn<3>>("kvarn-3", "KVarN, arXiv 2606.03458");
    pair.template operator()<kvq::kvarn<2>>("kvarn-2", "KVarN, arXiv 2606.03458");
    pair.template operator()<kvq::kvarn<4, 4, false>>("kvarn-free-4", "KVarN without its floor of factors");
    pair.template operator()<kvq::kvarn<3, 3, false>>("kvarn-free-3", "KVarN without its floor of factors");
    pair.template operator()<kvq::kvarn<2, 2, false>>("kvarn-free-2", "KVarN without its floor of factors");
}

/// Groups of 32 or 64 channels without and with a rotation, and 8-bit floats.
template <class Add>
void group_schemes(Add&& add) {
    const auto pair = [&]<class P>(const char* name, const char* source) {
        add.template operator()<typename P::keys, typename P::values>(name, source);
    };
    pair.template operator()<kvq::fp8_per_token_head>("fp8-token-head", "vLLM fp8_per_token_head");
    pair.template operator()<kvq::ggml_q8_0>("q8_0", "ggml q8_0");
    pair.template operator()<kvq::rotating<kvq::ggml_q8_0>>("q8_0-h", "ggml q8_0 behind Hadamard, llama.cpp");
    pair.template operator()<kvq::ggml_q4_0>("q4_0", "ggml q4_0");
    pair.template operator()<kvq::rotating<kvq::ggml_q4_0>>("q4_0-h", "ggml q4_0 behind Hadamard, llama.cpp");
    pair.template operator()<kvq::ggml_iq4_nl>("iq4_nl", "ggml iq4_nl");
    pair.template operator()<kvq::rotating<kvq::ggml_iq4_nl>>("iq4_nl-h",
                                                              "ggml iq4_nl behind Hadamard, llama.cpp");
    pair.template operator()<kvq::nf4_groups<64>>("nf4-g64", "NormalFloat, arXiv 2305.14314");
}

/// This library's presets. Those that can use statistics are called by
/// add.template with_statistics<Keys, Values>(name, source, make_keys), make_keys(const calibration* or null) -> Keys.
template <class Add>
void preset_schemes(Add&& add) {
    const char* const source = "kvq preset";
    kvq::for_each_preset([&]<class P>(const P&) {
        using keys = typename P::keys;
        if constexpr (std::constructible_from<keys, const kvq::calibration&>)
            add.template with_statistics<keys, typename P::values>(
                P::name, source, [](const kvq::calibration* c) { return c ? keys(*c) : keys(); });
        else
            add.template operator()<keys, typename P::values>(P::name, source);
    });
}

/// The presets with mixed widths whose statistics make a plan of widths and nothing else, no error feedback: -plan with those of
/// queries and keys, -key-plan with those of keys alone.
template <class Add>
void plan_schemes(Add&& add) {
    const auto pair = [&]<class P>(const P&, const char* name, const char* by_keys) {
        using keys = typename P::keys;
        add.template with_statistics<keys, typename P::values>(
            name, "kvq preset without error feedback", [](const kvq::calibration* c) {
                return c ? keys(std::make_shared<const kvq::width_plan>(keys::make_plan(*c))) : keys();
            });
        add.template with_statistics<keys, typename P::values>(
            by_keys, "kvq preset, statistics of keys alone",
            [](const kvq::calibration* c) { return c ? keys(c->without_queries()) : keys(); });
    };
    pair(kvq::mix4{}, "mix4-plan", "mix4-key-plan");
    pair(kvq::low3{}, "low3-plan", "low3-key-plan");
    pair(kvq::low2{}, "low2-plan", "low2-key-plan");
}

/// A preset with mixed widths with one ingredient changed at a time, and each of its tensors alone. Bits: average width.
template <class P, int Bits, class Add>
void ingredient_schemes(Add&& add) {
    using namespace kvq;
    using sixteen = full<float16>;
    using encoder = typename P::keys::encoder_type;
    // low2 takes ranges where there is feedback, the others least squares for channels of 2 bits.
    using other_encoder =
        std::conditional_t<Bits == 2, kvq::detail::preset_key_encoder, error_feedback<min_max>>;
    using widths = typename P::keys::width_list;
    using best = mean_corrected<least_squares>;
    const auto name = [](const char* change) {
        static std::deque<std::string> names;  // entries keep views of them
        return names.emplace_back(std::string(P::name) + "-" + change).c_str();
    };
    const auto keys = [&]<class K, class V>(const char* change, const char* source) {
        add.template with_statistics<K, V>(name(change), source,
                                           [](const calibration* c) { return c ? K(*c) : K(); });
    };
    const auto values = [&]<class V>(const char* change, const char* source) {
        keys.template operator()<typename P::keys, V>(change, source);
    };
    keys.template operator()<typename P::keys, sixteen>("keys", "values in 16 bit");
    add.template operator()<sixteen, typename P::values>(name("values"), "keys in 16 bit");
    add.template with_statistics<typename P::keys, typename P::values>(
        name("trusting"), "widths as if the statistics were those of the text", [](const calibration* c) {
            using K = typename P::keys;
            if (!c) return K();
            const auto plan = std::make_shared<const width_plan>(K::make_plan(*c, 0.0));
            return K(plan, encoder(*c, plan.get()));
        });
    keys.template operator()<channel_grid<Bits, 64, encoder>, typename P::values>(
        "even", "keys of one width, error feedback alone");
    keys.template operator()<mixed_width<widths, 8 * Bits, 64, other_encoder>, typename P::values>(
        "other-keys", "keys of 2 bits: range; low2: least squares");
    keys.template operator()<mixed_width<widths, 8 * Bits, 64, encoder, params<float16>>,
                             channel_grid<Bits, 0, best, params<float16>, token_factors<params<float16>>>>(
        "fp16", "parameters in fp16");
    values.template operator()<channel_grid<Bits, 0, min_max, coded, token_factors<coded>>>(
        "range-values", "values without least squares and corrected mean");
    values.template operator()<channel_grid<Bits, 0, least_squares, coded, token_factors<coded>>>(
        "no-mean", "values without corrected mean");
    values.template operator()<channel_grid<Bits, 0, best>>("no-factors", "values without factors of tokens");
    values.template operator()<affine<Bits, per_token<64>>>("token-values", "values as in KIVI");
}

/// All of them.
template <class Add>
void all_schemes(Add&& add) {
    affine_schemes(add);
    kivi_schemes(add);
    group_schemes(add);
    rotation_schemes(add);
    kvarn_schemes(add);
    preset_schemes(add);
    plan_schemes(add);
}

}  // namespace quality
