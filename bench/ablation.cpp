// Each ingredient on and off: first one tensor at a time, keys coded and values in 16 bit, or the other way round; then whole
// presets with one ingredient changed. Options and columns are those of bench_quality; the bits to read are those of K (or 16 - K
// for values).
#include <kvq/schemes/centred.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/presets.hpp>
#include <kvq/schemes/published.hpp>

#include "quality.hpp"
#include "quality_schemes.hpp"

namespace {

using sixteen = kvq::full<kvq::float16>;

template <int B>
void keys(const quality::collect& add) {
    const auto key = [&]<class S>(const char* name) {
        add.operator()<S, sixteen>(("K" + std::to_string(B) + " " + name).c_str(), "keys alone");
    };
    using namespace kvq;
    key.template operator()<affine<B, per_token<64>>>("token g64");
    key.template operator()<hadamard<affine<B, per_token<64>>>>("token g64, Hadamard");
    key.template operator()<centred<affine<B, per_token<64>>>>("token g64, centred");
    key.template operator()<hadamard<centred<affine<B, per_token<64>>>>>("token g64, Hadamard, centred");
    key.template operator()<affine<B, per_channel<64>>>("channel g64");
    key.template operator()<centred<codebook_scheme<by_norm<normal_levels<B>>, per_channel<64>>>>(
        "channel g64, centred, normal levels");
    key.template operator()<channel_grid<B, 64>>("channel g64, coded");
    key.template operator()<hadamard<channel_grid<B, 64>>>("channel g64, coded, Hadamard");
    key.template operator()<channel_grid<B, 64, shrink_search>>("channel g64, coded, shrink");
    key.template operator()<channel_grid<B, 64, least_squares>>("channel g64, coded, least squares");
    key.template operator()<channel_grid<B, 64, mean_corrected<min_max>>>(
        "channel g64, coded, mean corrected");
    key.template operator()<channel_grid<B, 0, min_max, coded, token_factors<coded>>>("dual g128, coded");
    key.template operator()<variance_normalized<B>>("variance normalized");
    key.template operator()<typename kvarn<B>::keys>("variance normalized, Hadamard (KVarN)");
}

/// Statistics of queries: widths of channels, error feedback, both. Widths are those of the presets mix4, low3 and low2.
template <int B, class Widths>
void keys_with_statistics(const quality::collect& add) {
    using namespace kvq;
    const std::string name = "K" + std::to_string(B) + " ", source = "keys alone";
    using feedback = error_feedback<min_max>;
    add.with_statistics<channel_grid<B, 64, feedback>, sixteen>(
        name + "channel g64, coded, feedback", source, [](const calibration* c) {
            using keys = channel_grid<B, 64, feedback>;
            return c ? keys(*c) : keys();
        });
    const auto plan = [&]<class Encoder>(const char* encoder) {
        using keys = mixed_width<Widths, 8 * B, 64, Encoder>;
        add.with_statistics<keys, sixteen>(
            name + "widths, coded, " + encoder, source, [](const calibration* c) {
                return c ? keys(std::make_shared<const width_plan>(keys::make_plan(*c))) : keys();
            });
    };
    plan.template operator()<min_max>("min-max");
    plan.template operator()<least_squares_below_3_bits>("least squares below 3 bits");
    using keys = mixed_width<Widths, 8 * B, 64, error_feedback<least_squares_below_3_bits>>;
    add.with_statistics<keys, sixteen>(name + "widths, coded, least squares below 3 bits, feedback", source,
                                       [](const calibration* c) { return c ? keys(*c) : keys(); });
    // At head_dim 48 a row of 3-bit codes takes 5 words for 4.5; this one takes 4.
    if constexpr (B == 3) {
        using narrower = mixed_width<Widths, 21, 64, error_feedback<least_squares_below_3_bits>>;
        add.with_statistics<narrower, sixteen>(
            name + "2.625 bits, widths, coded, least squares below 3 bits, feedback", source,
            [](const calibration* c) { return c ? narrower(*c) : narrower(); });
    }
}

template <int B>
void values(const quality::collect& add) {
    const auto value = [&]<class S>(const char* name) {
        add.operator()<sixteen, S>(("V" + std::to_string(B) + " " + name).c_str(), "values alone");
    };
    using namespace kvq;
    using dual = token_factors<coded>;
    value.template operator()<affine<B, per_token<64>>>("token g64");
    value.template operator()<hadamard<affine<B, per_token<64>>>>("token g64, Hadamard");
    value.template operator()<channel_grid<B, 64>>("channel g64, coded");
    value.template operator()<channel_grid<B, 64, mean_corrected<min_max>>>(
        "channel g64, coded, mean corrected");
    value.template operator()<channel_grid<B, 0, min_max, coded, dual>>("dual g128, coded");
    value.template operator()<channel_grid<B, 0, shrink_search, coded, dual>>("dual g128, coded, shrink");
    value.template operator()<channel_grid<B, 0, least_squares, coded, dual>>(
        "dual g128, coded, least squares");
    value.template operator()<channel_grid<B, 0, mean_corrected<min_max>, coded, dual>>(
        "dual g128, coded, mean corrected");
    value.template operator()<channel_grid<B, 0, mean_corrected<least_squares>, coded, dual>>(
        "dual g128, coded, least squares, mean corrected");
    value.template operator()<hadamard<channel_grid<B, 0, min_max, coded, dual>>>(
        "dual g128, coded, Hadamard");
    value.template operator()<channel_grid<B, 0, min_max, params<float16>, token_factors<params<float16>>>>(
        "dual g128, fp16");
    value.template operator()<variance_normalized<B>>("variance normalized");
    value.template operator()<hadamard<variance_normalized<B, false>>>(
        "variance normalized, Hadamard, no floor");
    value.template operator()<typename kvarn<B>::values>("variance normalized, Hadamard (KVarN)");
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<quality::entry> entries;
    const quality::collect add{entries};
    keys<4>(add);
    keys<3>(add);
    keys<2>(add);
    keys_with_statistics<4, kvq::widths<6, 4, 3, 0>>(add);
    keys_with_statistics<3, kvq::widths<6, 4, 3, 2, 0>>(add);
    keys_with_statistics<2, kvq::widths<4, 2, 0>>(add);
    values<4>(add);
    values<3>(add);
    values<2>(add);
    quality::preset_schemes(add);
    quality::plan_schemes(add);
    quality::ingredient_schemes<kvq::mix4, 4>(add);
    quality::ingredient_schemes<kvq::low3, 3>(add);
    quality::ingredient_schemes<kvq::low2, 2>(add);
    return quality::run_program(argc, argv, entries);
}
