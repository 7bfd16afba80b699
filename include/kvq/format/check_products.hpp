// Does attention on the blocks of a scheme of one's own give what dequantize() says?
//
// The blocks of a scheme that names itself in attends_as are read in two ways: by dequantize(), and by
// products with codes, zero_code, fold() and parameters, behind transform_query() and before
// restore_output(). No type makes both agree. So a cache that is made with such a format quantizes one block
// of noise. It compares products with one vector with double arithmetic on the dequantized block. Schemes
// composed of the library's parts are not compared (detail::composed_by_library).
// Contract: raises kvq::error when the norm of the difference is more than a tenth of that of the terms.
// (Fixed-point operands of 16 bits lose 1e-4 of it, of 8 bits 1e-2.) Cost: one block.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "../core/error.hpp"
#include "../core/workspace.hpp"
#include "format_names.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

/// what: "key format 2".
inline void check_products(const format& f, const block_shape& shape, const std::string& what) {
    const format_functions& of = f.functions();
    if (!of.reads_own_blocks) return;
    const block_id id{0, 0};
    const bool key = shape.role == tensor::key;
    const auto dim = static_cast<std::size_t>(shape.dim), tokens = static_cast<std::size_t>(shape.tokens);
    constexpr std::size_t slack = 64;  // vectors are read whole

    std::uint32_t state = 1;
    const auto noise = [&] {
        state = state * 1664525u + 1013904223u;
        return static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    };
    std::vector<float> values(shape.values() + slack), scratch(shape.values() + slack);
    for (float& v : values) v = noise();
    workspace block_space, plan_space, product_space;
    const std::size_t bytes = f.block_bytes(shape);
    std::byte* const block = block_space.reserve(bytes + slack);
    of.quantize_values(f.scheme(), shape, id, values.data(), block);
    of.dequantize(f.scheme(), shape, id, block, float_type::fp32, values.data(), shape.dim, scratch.data());

    // Weights are positive. One channel of four of a query is not, but the sum of any number is far from 0,
    // so that a wrong zero or bias shows; so is the first one, which is that sum behind a Hadamard matrix.
    std::vector<float> x((key ? dim : tokens) + slack), y((key ? tokens : dim) + slack);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = std::fabs(noise());
        if (key) x[i] = (i % 4 == 3 ? -0.25f : 0.5f) * (1.0f + x[i]);
    }
    std::vector<double> exact(key ? tokens : dim);
    double terms = 0.0, difference = 0.0;
    for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t c = 0; c < dim; ++c) {
            const double term =
                static_cast<double>(values[t * dim + c]) * static_cast<double>(x[key ? c : t]);
            exact[key ? t : c] += term;
            terms += term * term;
        }

    if (of.transforms && key) of.transform_query(f.scheme(), shape, id, x.data(), 0, 1);
    void* const plan = plan_space.reserve(of.plan_bytes);
    std::byte* const space = product_space.reserve(of.make_plan(f.scheme(), shape, id, 1, plan) + slack);
    alignas(64) std::byte tiles[backend_functions::tile_state_bytes];
    const auto stride = static_cast<std::ptrdiff_t>(x.size());
    of.begin(plan, shape, id, block, x.data(), stride, space);
    if (of.backend->open_tiles) of.backend->open_tiles(1, tiles);
    of.finish(plan, shape, id, block, x.data(), stride, shape.rows(), shape.cols(), y.data(),
              static_cast<std::ptrdiff_t>(y.size()), false, 0, space);
    if (of.backend->close_tiles) of.backend->close_tiles(tiles);
    if (of.transforms && !key) of.restore_output(f.scheme(), shape, id, y.data(), 0, 1);

    for (std::size_t i = 0; i < exact.size(); ++i) {
        const double d = static_cast<double>(y[i]) - exact[i];
        difference += d * d;
    }
    expect(
        difference <= 0.01 * terms, what, ", ", format_text(f),
        ", has attends_as, but products with its codes differ from those with its dequantized values by ",
        100.0 * std::sqrt(difference / terms),
        " %: dequantize() must agree with codes, zero_code, fold() and the parameters, behind its transform");
}

}}}  // namespace kvq::detail
