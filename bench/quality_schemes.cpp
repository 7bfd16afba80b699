#include "quality_schemes.hpp"

#include <concepts>
#include <initializer_list>
#include <kvq/cpu/simd.hpp>
#include <kvq/format/find_format.hpp>
#include <kvq/schemes/presets.hpp>
#include <memory>

#include "baselines/block_gtq.hpp"
#include "baselines/octopus.hpp"
#include "baselines/oscar_spectral.hpp"
#include "baselines/progressive.hpp"
#include "baselines/published.hpp"
#include "baselines/token_normalized.hpp"

namespace quality {
namespace {

using list = std::vector<listed_format>;

make_keys built_in_keys(const std::string& name) {
    return [name](const kvq::calibration* statistics) {
        return statistics ? kvq::find_format(name, kvq::tensor::key, *statistics)
                          : kvq::find_format(name, kvq::tensor::key);
    };
}
make_values built_in_values(const std::string& name) {
    return [name] { return kvq::find_format(name, kvq::tensor::value); };
}
bool takes_statistics(const std::string& name) {
    bool takes = false;
    kvq::for_each_format([&](const kvq::builtin_format& f) {
        if (f.name == name && f.keys) takes = f.takes_statistics;
    });
    return takes;
}
listed_format built_in(const std::string& name, const std::string& source) {
    const bool plans = kvq::find_format(name, kvq::tensor::key).wants_plan();
    return {name, source, built_in_keys(name), built_in_values(name), takes_statistics(name), plans};
}

template <class Keys>
constexpr bool made_from_statistics = std::constructible_from<Keys, const kvq::calibration&>;

template <class Keys>
kvq::format compiled_keys(const kvq::calibration* statistics) {
    if constexpr (made_from_statistics<Keys>)
        if (statistics) return kvq::make_format<kvq::simd<>>(Keys(*statistics));
    return kvq::make_format<Keys>();
}
template <class Values>
kvq::format compiled_values() {
    return kvq::make_format<Values>();
}
template <class Pair>
listed_format compiled(const char* name, const char* source) {
    using keys = typename Pair::keys;
    return {name, source, &compiled_keys<keys>, &compiled_values<typename Pair::values>,
            made_from_statistics<keys>};
}

template <class Oscar>
kvq::format spectral_keys(const kvq::calibration* statistics) {
    if (!statistics || !statistics->has_products() || !statistics->has_queries())
        return kvq::make_format<typename Oscar::keys_without_statistics>();
    return kvq::make_format<kvq::simd<>>(typename Oscar::keys(baselines::spectral_rotation(*statistics)));
}
/// Widths by pair for keys of B bits, TurboQuant for values.
template <int Bits>
listed_format block_gtq(const char* name) {
    return {name, "Block-GTQ, arXiv 2606.24033", &compiled_keys<baselines::block_gtq_keys<Bits>>,
            &compiled_values<typename baselines::turboquant_plain<Bits>::values>, true};
}

/// A plan of widths alone, no error feedback.
template <class Keys>
kvq::format planned_keys(const kvq::calibration* statistics) {
    return kvq::make_format<kvq::simd<>>(
        statistics ? Keys(std::make_shared<const kvq::width_plan>(Keys::make_plan(*statistics))) : Keys());
}
template <class Preset>
void add_plans(list& to) {
    const std::string name = Preset::name;
    const make_keys built_in = built_in_keys(name);
    to.push_back({name + "-plan", "kvq preset without error feedback", &planned_keys<typename Preset::keys>,
                  built_in_values(name), true});
    to.push_back({name + "-key-plan", "kvq preset, statistics of keys alone",
                  [built_in](const kvq::calibration* statistics) {
                      if (!statistics) return built_in(nullptr);
                      const kvq::calibration keys_alone = statistics->without_queries();
                      return built_in(&keys_alone);
                  },
                  built_in_values(name), true});
}

/// Widths as if the statistics were those of the text.
template <class Keys>
kvq::format trusting_keys(const kvq::calibration* statistics) {
    using encoder = typename Keys::encoder_type;
    if (!statistics) return kvq::make_format<Keys>();
    const auto plan = std::make_shared<const kvq::width_plan>(Keys::make_plan(*statistics, 0.0));
    return kvq::make_format<kvq::simd<>>(Keys(plan, encoder(*statistics, plan.get())));
}

/// Bits: average width.
template <class Preset, int Bits>
void add_ingredients(list& to) {
    using namespace kvq;
    using preset_keys = typename Preset::keys;
    using encoder = typename preset_keys::encoder_type;
    // low2 takes ranges where there is feedback, the others least squares for channels of 2 bits.
    using other_encoder = std::conditional_t<Bits == 2, low3::keys::encoder_type, error_feedback<min_max>>;
    using codes = typename preset_keys::policy;
    using fp16 = packed_params<float16>;
    using best = mean_corrected<least_squares>;
    const std::string name = Preset::name;
    const make_keys same_keys = built_in_keys(name);
    const make_values same_values = built_in_values(name);
    const auto add = [&](const char* change, const char* source, make_keys keys, make_values values,
                         bool statistics = true) {
        to.push_back({name + "-" + change, source, std::move(keys), std::move(values), statistics});
    };

    add("keys", "values in 16 bit", same_keys, built_in_values("fp16"));
    add("values", "keys in 16 bit", built_in_keys("fp16"), same_values, false);
    add("trusting", "widths as if the statistics were those of the text", &trusting_keys<preset_keys>,
        same_values);
    add("even", "keys of one width, error feedback alone",
        &compiled_keys<affine<Bits, per_channel<64>, byte_params, encoder>>, same_values);
    add("other-keys", "keys of 2 bits: range; low2: least squares",
        &compiled_keys<scheme<codes, asymmetric, per_channel<64>, byte_params, other_encoder>>, same_values);
    add("fp16", "parameters in fp16",
        &compiled_keys<scheme<codes, asymmetric, per_channel<64>, fp16, encoder>>,
        &compiled_values<affine<Bits, per_channel<>, fp16, best, token_scales<params<float16>>>>);
    add("range-values", "values without least squares and corrected mean", same_keys,
        &compiled_values<affine<Bits, per_channel<>, byte_params, min_max, token_scales<byte_params>>>);
    add("no-mean", "values without corrected mean", same_keys,
        &compiled_values<affine<Bits, per_channel<>, byte_params, least_squares, token_scales<byte_params>>>);
    add("no-factors", "values without token scales", same_keys,
        &compiled_values<affine<Bits, per_channel<>, byte_params, best>>);
    add("token-values", "values as in KIVI", same_keys,
        built_in_values("affine-" + std::to_string(Bits) + "-g64"));
}

}  // namespace

std::vector<listed_format> affine_formats() {
    list all{built_in("fp16", "16-bit values, not quantized"),
             built_in("int8", "symmetric per token and head, as in vLLM, nearest")};
    for (const char* const name : {"affine-8-g64", "affine-6-g64", "affine-5-g64", "affine-4-g64",
                                   "affine-4-g32", "affine-3-g32", "affine-2-g32"})
        all.push_back(built_in(name, "min-max groups of channels of a token, as in MLX"));
    return all;
}

std::vector<listed_format> kivi_formats() {
    list all;
    for (const char* const name :
         {"kivi-8-g64", "kivi-6-g64", "kivi-5-g64", "kivi-4-g32", "kivi-4-g64", "kivi-4-g128", "kivi-3-g32",
          "kivi-3-g64", "kivi-2-g32", "kivi-2-g64", "kivi-2-g128"})
        all.push_back(built_in(name, "KIVI, arXiv 2402.02750"));
    return all;
}

std::vector<listed_format> group_formats() {
    using namespace baselines;
    return {compiled<fp8_per_token_head>("fp8-token-head", "vLLM fp8_per_token_head"),
            compiled<ggml_q8_0>("q8_0", "ggml q8_0"),
            compiled<rotating<ggml_q8_0>>("q8_0-h", "ggml q8_0 behind Hadamard, llama.cpp"),
            compiled<ggml_q4_0>("q4_0", "ggml q4_0"),
            compiled<rotating<ggml_q4_0>>("q4_0-h", "ggml q4_0 behind Hadamard, llama.cpp"),
            compiled<ggml_iq4_nl>("iq4_nl", "ggml iq4_nl"),
            compiled<rotating<ggml_iq4_nl>>("iq4_nl-h", "ggml iq4_nl behind Hadamard, llama.cpp"),
            compiled<nf4_groups<64>>("nf4-g64", "NormalFloat, arXiv 2305.14314")};
}

std::vector<listed_format> rotation_formats() {
    using namespace baselines;
    const char* const renormalised = "TurboQuant, arXiv 2504.19874, renormalised";
    const char* const plain = "TurboQuant, arXiv 2504.19874";
    return {compiled<quarot<4>>("quarot-4", "QuaRot, arXiv 2404.00456"),
            compiled<vllm_int4>("vllm-int4", "vLLM int4_per_token_head"),
            compiled<turboquant<4>>("turboquant-4", renormalised),
            compiled<turboquant<3>>("turboquant-3", renormalised),
            compiled<turboquant<2>>("turboquant-2", renormalised),
            compiled<turboquant_plain<4>>("turboquant-plain-4", plain),
            compiled<turboquant_plain<2>>("turboquant-plain-2", plain),
            compiled<exllamav3<4>>("exllamav3-4", "exllamav3"),
            compiled<exllamav3<3>>("exllamav3-3", "exllamav3"),
            compiled<exllamav3<2>>("exllamav3-2", "exllamav3")};
}

std::vector<listed_format> kvarn_formats() {
    using namespace baselines;
    const char* const source = "KVarN, arXiv 2606.03458";
    const char* const free = "KVarN without its floor of factors";
    return {compiled<kvarn<4>>("kvarn-4", source),
            compiled<kvarn<3>>("kvarn-3", source),
            compiled<kvarn<2>>("kvarn-2", source),
            compiled<kvarn<4, 4, false>>("kvarn-free-4", free),
            compiled<kvarn<3, 3, false>>("kvarn-free-3", free),
            compiled<kvarn<2, 2, false>>("kvarn-free-2", free)};
}

std::vector<listed_format> recent_formats() {
    using namespace baselines;
    const char* const scaled = "OScaR, arXiv 2605.19660";
    const char* const spectral = "OSCAR, arXiv 2605.17757";
    const char* const triplets = "OCTOPUS, arXiv 2605.21226";
    const char* const steps = "PM-KVQ's widths, arXiv 2505.18610, on KIVI's grid";
    return {compiled<oscar_scaled<2, 32>>("oscar-scaled-2-g32", scaled),
            compiled<oscar_scaled<2, 64>>("oscar-scaled-2-g64", scaled),
            compiled<oscar_scaled<3, 32>>("oscar-scaled-3-g32", scaled),
            compiled<oscar_scaled<3, 64>>("oscar-scaled-3-g64", scaled),
            compiled<oscar_scaled<4, 32>>("oscar-scaled-4-g32", scaled),
            compiled<oscar_scaled<4, 64>>("oscar-scaled-4-g64", scaled),
            compiled<oscar_scaled<5, 32>>("oscar-scaled-5-g32", scaled),
            compiled<oscar_scaled<5, 64>>("oscar-scaled-5-g64", scaled),
            compiled<oscar_scaled<6, 32>>("oscar-scaled-6-g32", scaled),
            compiled<oscar_scaled<6, 64>>("oscar-scaled-6-g64", scaled),
            {"oscar-spectral-2", spectral, &spectral_keys<oscar_spectral<2>>,
             &compiled_values<oscar_spectral<2>::values>, true},
            block_gtq<2>("block-gtq-2"),
            block_gtq<3>("block-gtq-3"),
            block_gtq<4>("block-gtq-4"),
            compiled<octopus<2>>("octopus-2", triplets),
            compiled<octopus<3>>("octopus-3", triplets),
            compiled<octopus<4>>("octopus-4", triplets),
            compiled<progressive_kivi<4, 8>>("progressive-4-g64", steps),
            compiled<progressive_kivi<2, 8, 4>>("progressive-2-g64", steps)};
}

std::vector<listed_format> preset_formats() {
    list all;
    kvq::for_each_preset([&](const auto& preset) { all.push_back(built_in(preset.name, "kvq preset")); });
    return all;
}

std::vector<listed_format> plan_formats() {
    list all;
    add_plans<kvq::mix4>(all);
    add_plans<kvq::low3>(all);
    add_plans<kvq::low2>(all);
    return all;
}

std::vector<listed_format> ingredient_formats() {
    list all;
    add_ingredients<kvq::mix4, 4>(all);
    add_ingredients<kvq::low3, 3>(all);
    add_ingredients<kvq::low2, 2>(all);
    return all;
}

std::vector<listed_format> all_formats() {
    list all;
    for (const auto family : {&affine_formats, &kivi_formats, &group_formats, &rotation_formats,
                              &kvarn_formats, &recent_formats, &preset_formats, &plan_formats})
        for (listed_format& f : family()) all.push_back(std::move(f));
    return all;
}

}  // namespace quality
