// Each ingredient on and off: first one tensor at a time, keys quantized and values in 16 bit, or the other
// way round; then whole presets with one ingredient changed. Options and columns are those of bench_quality;
// the bits to read are those of K (or 16 - K for values).
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/presets.hpp>

#include "baselines/centred.hpp"
#include "baselines/published.hpp"
#include "quality.hpp"

namespace {

using list = std::vector<quality::listed_format>;

/// A format that quantizes and dequantizes, and nothing else: with attention this file would take six minutes
/// to compile.
template <class Scheme>
struct coder : kvq::format_record {
    Scheme held;

    explicit coder(Scheme s) : held(std::move(s)) {
        functions = &table;
        scheme = &held;
        name = "";
        destroy = [](kvq::format_record* self) { delete static_cast<coder*>(self); };
    }

    static const Scheme& of(const void* scheme) { return *static_cast<const Scheme*>(scheme); }
    static constexpr kvq::format_functions table = [] {
        kvq::format_functions f{};
        f.block_bytes = [](const void* scheme, const kvq::block_shape& shape) -> std::size_t {
            return of(scheme).block_bytes(shape);
        };
        f.quantize_values = [](const void* scheme, const kvq::block_shape& shape, kvq::block_id id,
                               float* values, std::byte* block) {
            return kvq::simd<>::quantize_values(of(scheme), shape, id, values, block);
        };
        // Dense floats are all that is asked for.
        f.dequantize = [](const void* scheme, const kvq::block_shape& shape, kvq::block_id id,
                          const std::byte* block, kvq::float_type, void* out, std::ptrdiff_t,
                          float*) { of(scheme).dequantize(shape, id, block, static_cast<float*>(out)); };
        return f;
    }();
};
template <class Scheme>
kvq::format format_of(Scheme scheme) {
    return kvq::format(new coder<Scheme>(std::move(scheme)));
}
kvq::format sixteen() { return format_of(kvq::full<kvq::float16>()); }

template <class Keys>
void add_keys(list& to, const std::string& name) {
    to.push_back({name, "keys alone", [](const kvq::calibration*) { return format_of(Keys()); }, &sixteen});
}
/// make: statistics -> scheme.
template <class Keys, class Make>
void add_keys_with_statistics(list& to, const std::string& name, Make make) {
    to.push_back({name, "keys alone",
                  [make](const kvq::calibration* statistics) {
                      return format_of(statistics ? make(*statistics) : Keys());
                  },
                  &sixteen, true});
}
template <class Values>
void add_values(list& to, const std::string& name) {
    to.push_back({name, "values alone", [](const kvq::calibration*) { return sixteen(); },
                  [] { return format_of(Values()); }});
}

template <int B>
void keys(list& to) {
    const auto key = [&]<class S>(const char* name) {
        add_keys<S>(to, "K" + std::to_string(B) + " " + name);
    };
    using namespace kvq;
    using namespace baselines;
    key.template operator()<affine<B, per_token<64>>>("token g64");
    key.template operator()<hadamard<affine<B, per_token<64>>>>("token g64, Hadamard");
    key.template operator()<centred<affine<B, per_token<64>>>>("token g64, centred");
    key.template operator()<hadamard<centred<affine<B, per_token<64>>>>>("token g64, Hadamard, centred");
    key.template operator()<affine<B, per_channel<64>>>("channel g64");
    key.template operator()<centred<codebook_scheme<by_norm<normal_levels<B>>, per_channel<64>>>>(
        "channel g64, centred, normal levels");
    key.template operator()<affine<B, per_channel<64>, byte_params, min_max>>(
        "channel g64, 8-bit parameters");
    key.template operator()<hadamard<affine<B, per_channel<64>, byte_params, min_max>>>(
        "channel g64, 8-bit parameters, Hadamard");
    key.template operator()<affine<B, per_channel<64>, byte_params, shrink_search>>(
        "channel g64, 8-bit parameters, shrink");
    key.template operator()<affine<B, per_channel<64>, byte_params, least_squares>>(
        "channel g64, 8-bit parameters, least squares");
    key.template operator()<affine<B, per_channel<64>, byte_params, mean_corrected<min_max>>>(
        "channel g64, 8-bit parameters, mean corrected");
    key.template operator()<affine<B, per_channel<>, byte_params, min_max, token_scales<byte_params>>>(
        "dual g128, 8-bit parameters");
    key.template operator()<variance_normalized<B>>("variance normalized");
    key.template operator()<typename kvarn<B>::keys>("variance normalized, Hadamard (KVarN)");
}

/// Statistics of queries: widths of channels, error feedback, both. Widths are those of the presets mix4,
/// low3 and low2.
template <int B, class Widths>
void keys_with_statistics(list& to) {
    using namespace kvq;
    const std::string name = "K" + std::to_string(B) + " ";
    const auto feedback = [&]<class S>(const std::string& what) {
        add_keys_with_statistics<S>(to, name + what, [](const calibration& c) { return S(c); });
    };
    const auto plan = [&]<class Encoder>(const std::string& encoder) {
        using S = mixed_affine<Widths, average_eighths<8 * B>, per_channel<64>, byte_params, Encoder>;
        add_keys_with_statistics<S>(
            to, name + "widths, 8-bit parameters, " + encoder,
            [](const calibration& c) { return S(std::make_shared<const width_plan>(S::make_plan(c))); });
    };
    feedback.template operator()<affine<B, per_channel<64>, byte_params, error_feedback<min_max>>>(
        "channel g64, 8-bit parameters, feedback");
    plan.template operator()<min_max>("min-max");
    plan.template operator()<least_squares_below_3_bits>("least squares below 3 bits");
    using both = error_feedback<least_squares_below_3_bits>;
    feedback.template
    operator()<mixed_affine<Widths, average_eighths<8 * B>, per_channel<64>, byte_params, both>>(
        "widths, 8-bit parameters, least squares below 3 bits, feedback");
    // At head_dim 48 a row of 3-bit codes takes 5 words for 4.5; this one takes 4.
    if constexpr (B == 3)
        feedback.template
        operator()<mixed_affine<Widths, average_eighths<21>, per_channel<64>, byte_params, both>>(
            "2.625 bits, widths, 8-bit parameters, least squares below 3 bits, feedback");
}

template <int B>
void values(list& to) {
    const auto value = [&]<class S>(const char* name) {
        add_values<S>(to, "V" + std::to_string(B) + " " + name);
    };
    using namespace kvq;
    using namespace baselines;
    using dual = token_scales<byte_params>;
    value.template operator()<affine<B, per_token<64>>>("token g64");
    value.template operator()<hadamard<affine<B, per_token<64>>>>("token g64, Hadamard");
    value.template operator()<affine<B, per_channel<64>, byte_params, min_max>>(
        "channel g64, 8-bit parameters");
    value.template operator()<affine<B, per_channel<64>, byte_params, mean_corrected<min_max>>>(
        "channel g64, 8-bit parameters, mean corrected");
    value.template operator()<affine<B, per_channel<>, byte_params, min_max, dual>>(
        "dual g128, 8-bit parameters");
    value.template operator()<affine<B, per_channel<>, byte_params, shrink_search, dual>>(
        "dual g128, 8-bit parameters, shrink");
    value.template operator()<affine<B, per_channel<>, byte_params, least_squares, dual>>(
        "dual g128, 8-bit parameters, least squares");
    value.template operator()<affine<B, per_channel<>, byte_params, mean_corrected<min_max>, dual>>(
        "dual g128, 8-bit parameters, mean corrected");
    value.template operator()<affine<B, per_channel<>, byte_params, mean_corrected<least_squares>, dual>>(
        "dual g128, 8-bit parameters, least squares, mean corrected");
    value.template operator()<hadamard<affine<B, per_channel<>, byte_params, min_max, dual>>>(
        "dual g128, 8-bit parameters, Hadamard");
    value.template
    operator()<affine<B, per_channel<>, packed_params<float16>, min_max, token_scales<params<float16>>>>(
        "dual g128, fp16");
    value.template operator()<variance_normalized<B>>("variance normalized");
    value.template operator()<hadamard<variance_normalized<B, false>>>(
        "variance normalized, Hadamard, no floor");
    value.template operator()<typename kvarn<B>::values>("variance normalized, Hadamard (KVarN)");
}

}  // namespace

int main(int argc, char** argv) {
    list all;
    keys<4>(all);
    keys<3>(all);
    keys<2>(all);
    keys_with_statistics<4, kvq::code_widths<6, 4, 3, 0>>(all);
    keys_with_statistics<3, kvq::code_widths<6, 4, 3, 2, 0>>(all);
    keys_with_statistics<2, kvq::code_widths<4, 2, 0>>(all);
    values<4>(all);
    values<3>(all);
    values<2>(all);
    for (const auto family : {&quality::preset_formats, &quality::plan_formats, &quality::ingredient_formats})
        for (quality::listed_format& f : family()) all.push_back(std::move(f));
    return quality::run_program(argc, argv, all);
}
