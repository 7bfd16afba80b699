// Compile-time messages for a scheme that lacks a member: one sentence names the member.
//
// checked_scheme<S>::type is S for a scheme. Otherwise a static_assert fails with the message, and the type
// is full<float16>, which compiles, so that no further errors follow. checked_folding<S>::complete: does S
// have all members that attention on its blocks needs?
#pragma once

#include <string>

#include "../quant/params.hpp"
#include "full.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

/// A static_assert names the member that the scheme lacks.
template <class S>
struct checked_scheme {
    using type = full<float16>;  // compiles, so that no further errors follow
    static constexpr bool has_name = requires(const S s) {
        { s.name() } -> std::convertible_to<std::string>;
    };
    static constexpr bool has_block_bytes = requires(const S s, block_shape shape) {
        { s.block_bytes(shape) } -> std::convertible_to<std::size_t>;
    };
    static constexpr bool has_quantize =
        requires(const S s, block_shape shape, block_id id, float* values, std::byte* block) {
        { s.quantize(shape, id, values, block) } -> std::convertible_to<std::uint32_t>;
    };
    static constexpr bool has_dequantize =
        requires(const S s, block_shape shape, block_id id, const std::byte* block, float* values) {
        s.dequantize(shape, id, block, values);
    };
    static constexpr bool something = has_block_bytes || has_quantize || has_dequantize;
    static_assert(something,
                  "kvq::make_format: the argument must be a scheme (kv_scheme); of a pair like kivi<4> take "
                  "its keys or values");
    static_assert(!something || std::copy_constructible<S>,
                  "kvq::make_format: a scheme must be copyable and destructible");
    static_assert(!something || has_name, "kvq::make_format: a scheme needs `std::string name() const`");
    static_assert(!something || has_block_bytes,
                  "kvq::make_format: a scheme needs `std::size_t block_bytes(block_shape) const`");
    static_assert(!something || has_quantize,
                  "kvq::make_format: a scheme needs `std::uint32_t quantize(block_shape, "
                  "block_id, float* values, std::byte* block) const`");
    static_assert(!something || has_dequantize,
                  "kvq::make_format: a scheme needs `void dequantize(block_shape, block_id, "
                  "const std::byte* block, float* values) const`");
};
template <kv_scheme S>
struct checked_scheme<S> {
    using type = S;
};

/// For a scheme with `attends_as`: does it have the members that attention on its blocks needs?
template <class S>
struct checked_folding {
    static constexpr bool read = read_by_attention<S>;
    static constexpr bool known =
        !read || foldable<S> || segmented<S> || full_precision<S> || rows_of_floats<S> || rows_of_tokens<S>;
    static constexpr fold_use use = [] {
        fold_use all;
        if constexpr (foldable<S>)
            for (const tensor role : {tensor::key, tensor::value}) {
                const fold_use u = supports<S>(role) ? S::fold(role) : fold_use();
                all.row_scale |= u.row_scale;
                all.row_bias |= u.row_bias;
                all.col_scale |= u.col_scale;
                all.col_bias |= u.col_bias;
            }
        return all;
    }();
    static constexpr bool has_rows =
        requires(const S s, block_shape shape, block_id id, const std::byte* block, float* out) {
        s.template row_parameters<plain_loads>(shape, id, block, 0, out, out);
    };
    static constexpr bool has_columns =
        requires(const S s, block_shape shape, block_id id, const std::byte* block, float* out) {
        s.template col_parameters<plain_loads>(shape, id, block, 0, out, out);
    };
    static constexpr bool lacks_rows = (use.row_scale || use.row_bias) && !has_rows,
                          lacks_columns = use.columns() && !has_columns;
    static constexpr bool complete = known && !lacks_rows && !lacks_columns;

    static_assert(
        known,
        "kvq::make_format: this scheme says `attends_as`, so it needs code_bits, zero_code, fold(tensor) "
        "and codes(shape) (schemes/concepts.hpp)");
    static_assert(
        !lacks_rows,
        "kvq::make_format: fold() of this scheme says that rows have parameters, so it needs `template "
        "<class "
        "Backend> void row_parameters(block_shape, block_id, const std::byte* block, int col_group, float* "
        "scale, float* bias) const`");
    static_assert(
        !lacks_columns,
        "kvq::make_format: fold() of this scheme says that columns have parameters, so it needs `template "
        "<class Backend> void col_parameters(block_shape, block_id, const std::byte* block, int row_group, "
        "float* scale, float* bias) const`");
};

}}}  // namespace kvq::detail
