// SPDX-License-Identifier: MIT
// Comparison family: bounded error. Pages that are requantized again and again: what ten steps lose, for
// every preset; the same bytes from both backends at every step.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <kvq/cpu/simd.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <string>
#include <tuple>

#include "support/blocks.hpp"
#include "support/typed_cache.hpp"

namespace requantize_chains_tests {

namespace {

using kvq::tensor;

// Places in both lists; 0 is 16 bit.
enum format : int {
    sixteen,
    ref8,
    hi6,
    std5,
    std4,
    mix4,
    low3,
    low2,
    int8,
    affine8,
    affine4,
    affine2,
    kivi4,
    kivi2,
    std4_h
};
constexpr int formats = std4_h + 1;
constexpr const char* names[formats] = {"fp16",     "ref8",     "hi6",    "std5",   "std4",
                                        "mix4",     "low3",     "low2",   "int8",   "affine-8",
                                        "affine-4", "affine-2", "kivi-4", "kivi-2", "std4-h"};

template <class... S>
using schemes = std::tuple<kvq::full<kvq::float16>, S...>;
using key_schemes =
    schemes<kvq::ref8::keys, kvq::hi6::keys, kvq::std5::keys, kvq::std4::keys, kvq::mix4::keys,
            kvq::low3::keys, kvq::low2::keys, kvq::int8, kvq::affine<8>, kvq::affine<4>, kvq::affine<2>,
            kvq::kivi<4, 64>::keys, kvq::kivi<2, 64>::keys, kvq::std4_h::keys>;
using value_schemes =
    schemes<kvq::ref8::values, kvq::hi6::values, kvq::std5::values, kvq::std4::values, kvq::mix4::values,
            kvq::low3::values, kvq::low2::values, kvq::int8, kvq::affine<8>, kvq::affine<4>, kvq::affine<2>,
            kvq::kivi<4, 64>::values, kvq::kivi<2, 64>::values, kvq::std4_h::values>;
struct keys {
    using all = key_schemes;
    static constexpr tensor role = tensor::key;
};
struct values {
    using all = value_schemes;
    static constexpr tensor role = tensor::value;
};
static_assert(std::tuple_size_v<keys::all> == formats && std::tuple_size_v<values::all> == formats);

/// f(scheme) with the scheme of an index.
template <class Table, class F>
void with_scheme(int index, F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        ((static_cast<int>(I) == index ? f(std::tuple_element_t<I, typename Table::all>{}) : void()), ...);
    }
    (std::make_index_sequence<formats>{});
}

/// What a backend does with blocks of a scheme, from the library's format or without the kernels of
/// attention.
template <class Backend, class S>
struct backend_of {
    static constexpr bool linked = test::library_has<Backend>() && test::built_in<test::any_group_scheme<S>>;

    static std::uint32_t quantize(const S& s, const kvq::block_shape& block, const std::byte* from,
                                  std::byte* to, float* scratch) {
        if constexpr (linked)
            return functions().quantize(format().scheme(), block, {}, kvq::float_type::fp16, from, to,
                                        scratch);
        else
            return Backend::quantize(s, block, {}, kvq::float_type::fp16, from, to, scratch);
    }
    static std::uint32_t requantize_values(const S& s, const kvq::block_shape& block, float* x,
                                           float* token_scales, std::byte* to) {
        if constexpr (linked)
            return functions().requantize_values(format().scheme(), block, {}, x, token_scales, to);
        else
            return Backend::requantize_values(s, block, {}, x, token_scales, to);
    }
    static void dequantize(const S& s, const kvq::block_shape& block, const std::byte* from, float* x) {
        if constexpr (linked)
            functions().dequantize(format().scheme(), block, {}, from, kvq::float_type::fp32, x, block.dim,
                                   x);
        else
            Backend::dequantize(s, block, {}, from, kvq::float_type::fp32, x, block.dim, x);
    }

private:
    static const kvq::format& format() {
        static const kvq::format made = test::made<Backend>(S{});
        return made;
    }
    static const kvq::format_functions& functions() { return format().functions(); }
};

/// One block that is requantized step by step, on both backends: what cache/convert.hpp does.
template <class Table>
class chain {
public:
    chain(int tokens, int dim, const std::vector<float>& x) : block_{Table::role, tokens, dim} {
        bytes_ = empty(sixteen);
        const kvq::full<kvq::float16> full;
        not_finite_ = full.quantize(block_, {}, x.data(), bytes_.data());
    }

    void step(int format) {
        auto next = empty(format), other = empty(format);
        const std::uint32_t mine = convert<kvq::simd<>>(format, next),
                            theirs = convert<kvq::scalar>(format, other);
        CHECK(next == other);
        CHECK(mine == theirs);
        not_finite_ += mine;
        bytes_ = std::move(next);
        format_ = format;
    }
    std::vector<float> values() const {
        std::vector<float> x(block_.values());
        with_scheme<Table>(format_,
                           [&](const auto& s) { s.dequantize(block_, {}, bytes_.data(), x.data()); });
        return x;
    }

private:
    std::vector<std::byte> empty(int format) const {
        std::size_t bytes = 0;
        with_scheme<Table>(format, [&](const auto& s) { bytes = s.block_bytes(block_); });
        return std::vector<std::byte>(bytes, format == sixteen ? std::byte{0} : std::byte{0xcd});
    }
    /// Returns how many values were not finite.
    template <class Backend>
    std::uint32_t convert(int format, std::vector<std::byte>& to) const {
        std::uint32_t not_finite = 0;
        std::vector<float> x(block_.values());
        if (format_ == sixteen) {
            with_scheme<Table>(format, [&]<class S>(const S& s) {
                not_finite = backend_of<Backend, S>::quantize(s, block_, bytes_.data(), to.data(), x.data());
            });
            return not_finite;
        }
        float token_scales[kvq::detail::most_quantized];
        bool known = false;
        with_scheme<Table>(format_, [&]<class S>(const S& s) {
            backend_of<Backend, S>::dequantize(s, block_, bytes_.data(), x.data());
            if constexpr (kvq::detail::with_token_scales<S>) {
                s.read_token_scales(block_, bytes_.data(), token_scales);
                known = true;
            }
        });
        if (format == sixteen) {
            for (const float value : x) not_finite += !kvq::detail::is_finite(value);
            Backend::template write_tokens<kvq::float16>(block_, to.data(), kvq::float_type::fp32, x.data(),
                                                         block_.dim, block_.tokens, 0);
            return not_finite;
        }
        with_scheme<Table>(format, [&]<class S>(const S& s) {
            not_finite = backend_of<Backend, S>::requantize_values(s, block_, x.data(),
                                                                   known ? token_scales : nullptr, to.data());
        });
        return not_finite;
    }

    kvq::block_shape block_;
    std::vector<std::byte> bytes_;
    std::uint32_t not_finite_ = 0;
    int format_ = sixteen;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        sum += d * d;
    }
    return std::sqrt(sum);
}

/// Normal numbers; channels of other sizes; channels far from zero; tokens of other sizes.
std::vector<float> page_values(test::generator& random, int tokens, int dim) {
    const int kind = random.between(1, 5);
    auto x = random.normals(static_cast<std::size_t>(tokens * dim));
    const auto n = static_cast<std::size_t>(dim), rows = static_cast<std::size_t>(tokens);
    for (std::size_t c = 0; c < n && kind >= 2; ++c) {
        const float size = kind == 2 || random.one_in(8) ? random.any_magnitude(-3, 3) : 1.0f;
        const float shift = kind == 4 && random.one_in(8) ? 20.0f * random.normal() : 0.0f;
        for (std::size_t t = 0; t < rows; ++t) x[t * n + c] = size * x[t * n + c] + shift;
    }
    for (std::size_t t = 0; t < rows && kind == 5; ++t)
        if (random.one_in(5))
            for (std::size_t c = 0; c < n; ++c) x[t * n + c] *= 8.0f;
    return x;
}

struct page_size {
    int tokens, dim;
};
page_size random_size(test::generator& random, int fewest_tokens, int fewest_channels) {
    if (random.one_in(2)) return {64 * random.between(1, 2), 64 * random.between(1, 2)};
    return {random.between(fewest_tokens, 130), random.between(fewest_channels, 130)};
}

/// Chains of ten, two formats by turns or any of a list; `coarse`: the list that the first of two is from.
/// check(distance from the first values, their size, formats so far, losses of single steps by format)
template <class Table, class Check>
void run_chains(int rounds, const std::vector<int>& coarse, const std::vector<int>& list, bool walks,
                Check check) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < rounds; ++round) {
        const auto size_of = random_size(random, 16, 16);
        const int tokens = size_of.tokens, dim = size_of.dim;
        const auto x = page_values(random, tokens, dim);
        chain<Table> page(tokens, dim, x);
        const auto start = page.values();
        const double size = distance(start, std::vector<float>(start.size()));
        const bool walk = walks && random.one_in(2);
        const int pair[2] = {random.pick(coarse), random.pick(list)};
        std::vector<int> steps;
        double losses[formats] = {};
        std::string text;
        for (int i = 0; i < 10; ++i) {
            const int next = walk ? random.pick(list) : pair[i % 2];
            if (!steps.empty() && next == steps.back()) continue;
            if (losses[next] == 0.0) {
                chain<Table> one(tokens, dim, x);
                one.step(next);
                losses[next] = distance(start, one.values());
            }
            page.step(next);
            steps.push_back(next);
            text += std::string(" ") + names[next];
            INFO(tokens, " x ", dim, ":", text);
            check(distance(start, page.values()), size, steps, losses);
        }
    }
}

double sum_of_distinct(const double (&losses)[formats]) {
    double sum = 0.0;
    for (const double l : losses) sum += l;
    return sum;
}

const std::vector<int> presets{ref8, hi6, std5, std4, mix4, low3, low2}, eights{ref8, int8, affine8},
    coarse_presets{std4, mix4, low3, low2},
    all{ref8, hi6, std5, std4, mix4, low3, low2, int8, affine8, affine4, affine2, kivi4, kivi2, std4_h};

}  // namespace

TEST_CASE_TEMPLATE("presets: ten steps lose at most half more than their formats lose one by one", Table,
                   keys, values) {
    run_chains<Table>(test::rounds(30), presets, presets, true,
                      [](double loss, double size, const std::vector<int>&, const double(&losses)[formats]) {
                          CHECK(loss <= 1.5 * sum_of_distinct(losses) + 1e-3 * size);
                      });
}

/// Chains of a preset of `coarse` and one of 8 bits: no loss is above twice what both lose alone, and in 98
/// of 100 it stays below 1.25 times.
template <class Table>
void check_there_and_back(int rounds, const std::vector<int>& coarse) {
    int links = 0, drifted = 0;
    run_chains<Table>(rounds, coarse, eights, false,
                      [&](double loss, double size, const std::vector<int>&, const double(&losses)[formats]) {
                          const double alone = sum_of_distinct(losses);
                          CHECK(loss <= 2.0 * alone + 1e-3 * size);
                          ++links;
                          drifted += loss > 1.25 * alone + 1e-3 * size ? 1 : 0;
                      });
    INFO(drifted, " of ", links, " losses");
    CHECK(drifted <= links / 50);
}

TEST_CASE_TEMPLATE(
    "a preset of 4 bits or less that is changed to 8 bits and back: after ten steps what it lost at once",
    Table, keys, values) {
    check_there_and_back<Table>(test::rounds(30), coarse_presets);
}

TEST_CASE_TEMPLATE("a preset behind a transform that is changed to 8 bits and back: the same", Table, keys,
                   values) {
    check_there_and_back<Table>(test::rounds(20), {std4_h});
}

TEST_CASE_TEMPLATE("any formats: a chain loses at most twice the sum of what its links lose alone", Table,
                   keys, values) {
    run_chains<Table>(
        test::rounds(30), all, all, true,
        [](double loss, double size, const std::vector<int>& steps, const double(&losses)[formats]) {
            double sum = 0.0;
            for (const int s : steps) sum += losses[s];
            CHECK(loss <= 2.0 * sum + 1e-3 * size);
        });
}

TEST_CASE_TEMPLATE("ranges, whatever the values: at most half a step of each link", Table, keys, values) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const std::vector<int> list{int8, affine8, affine4, affine2, kivi4, kivi2};
    for (int round = 0; round < test::rounds(20); ++round) {
        const auto size_of = random_size(random, 1, 1);
        const int tokens = size_of.tokens, dim = size_of.dim;
        chain<Table> page(tokens, dim, test::hostile_block(random, {tensor::key, tokens, dim}, true));
        const auto start = page.values();
        auto now = start;
        double bound = 0.0;
        std::string text;
        for (int i = 0; i < 10; ++i) {
            const int next = random.pick(list);
            text += std::string(" ") + names[next];
            INFO(tokens, " x ", dim, ":", text);
            // A range is at most that of all values, with zero for int8; parameters are 16-bit floats.
            float lo = now[0], hi = now[0];
            for (const float x : now) lo = std::fmin(lo, x), hi = std::fmax(hi, x);
            const double largest = std::fmax(std::fabs(lo), std::fabs(hi));
            const int top = next == affine2 || next == kivi2   ? 3
                            : next == affine4 || next == kivi4 ? 15
                                                               : 255;
            const double range = next == int8 ? 2.0 * largest * 255 / 254 : static_cast<double>(hi) - lo;
            bound +=
                0.5 * (range + largest * 0x1p-10) / top * (1 + 0x1p-9) + largest * 0x1p-20 + top * 0x1p-24;
            page.step(next);
            now = page.values();
            double worst = 0.0;
            for (std::size_t k = 0; k < now.size(); ++k)
                worst =
                    std::fmax(worst, std::fabs(static_cast<double>(now[k]) - static_cast<double>(start[k])));
            CHECK(worst <= bound);
        }
    }
}

TEST_CASE_TEMPLATE("hostile values: the same bytes from both backends in every chain", Table, keys, values) {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < test::rounds(20); ++round) {
        const auto size_of = random_size(random, 1, 1);
        const int tokens = size_of.tokens, dim = size_of.dim;
        chain<Table> page(tokens, dim, test::hostile_block(random, {tensor::key, tokens, dim}));
        for (int i = 0; i < 10; ++i) page.step(random.between(sixteen, std4_h));
    }
}

}  // namespace requantize_chains_tests
