// The scheme concept: how one tensor (K or V) of one head is quantized in a block of a page.
//
// Required (pages, cache and attention need no more; a struct with these members is a scheme):
//
//   std::string name() const
//   std::size_t block_bytes(block_shape) const                        multiple of 16; the same for every
//                                                                     block of a shape
//   std::uint32_t quantize(block_shape, block_id, float* values, std::byte* block) const
//       values: [tokens][dim], may be overwritten; writes every byte of the block; returns how many values
//       were not finite. An exception of quantize or dequantize reaches the caller of append, trim or
//       dequantize, and the sequence is unchanged
//   void dequantize(block_shape, block_id, const std::byte* block, float* values) const
//
// Optional, found by `requires`:
//   using attends_as = the scheme itself          attention may read the blocks without dequantize(), in one
//                                                 of four ways:
//       foldable         integer codes with parameters on rows and columns
//       segmented        keys whose columns are cut into ranges, each foldable by itself (widths that differ
//                        between channels)
//       full_precision   16- or 32-bit values, not quantized
//       rows_of_tokens   rows of tokens in the layout of another system
//       rows_of_floats   8-bit floats in rows of tokens, each row with a scale
//   void check(cache_shape, tensor) const         raises kvq::error when the state belongs to another shape;
//                                                 caches call it first
//   static constexpr bool supports(tensor)        a scheme for keys only or values only
//   std::uint64_t fingerprint() const             of state that dequantizing needs; required to save and send
//                                                 (io/scheme_identity.hpp)
//   std::uint32_t requantize(block_shape, block_id, float* values, float* token_scales, std::byte* block)
//     const
//       quantize() for values that were quantized before; token_scales: those of their last block, one each,
//         may be overwritten; or null.
//       Repeated conversions with other schemes in between must not drift (quant/grid_keeper.hpp). A type
//       with a quantize() of its own does not inherit the requantize() of its base: quantize() is called
//   using requantizes_as = the scheme itself      only where quantize() or requantize() is static, overloaded
//                                                 or a template: requantize()
//       belongs to this quantize(). Without it, it is not called
//   void read_token_scales(block_shape, const std::byte* block, float* token_scales) const
//       the token scales in a block, for the requantize() of another scheme
//   bool read(row_place, int dim, int from, int tokens, float* values) const
//       with layout(): records of tokens, which are also read where their owner keeps them
//   transform_query(block_shape, block_id, float* x), restore_output(block_shape, block_id, float* y)
//       a linear transform before the quantizing of a foldable or segmented scheme: dequantize() undoes it,
//       attention applies it to q once and to the output once
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../core/row_place.hpp"
#include "../core/shape.hpp"
#include "../pack/code_layout.hpp"

namespace kvq { inline namespace v0_3 {

/// Parameters of a foldable scheme, on the axes of the block's matrix:
///
///   x^[r][c] = row_scale[r] * (col_scale[c] * (code[r][c] - zero_code) + col_bias[c]) + row_bias[r] *
///     col_scale[c]
///
/// Absent scales are 1, absent biases 0. Row parameters may differ per column group, column parameters per
/// row group.
struct fold_use {
    bool row_scale = false;
    bool row_bias = false;
    bool col_scale = false;
    bool col_bias = false;

    KVQ_HD KVQ_NO_COPY constexpr bool columns() const noexcept { return col_scale || col_bias; }
};

/// A range of columns with codes of one width, laid out as a block of its own (segment_layout), at `offset`.
struct code_segment {
    int first = 0;    ///< column; a multiple of 4
    int columns = 0;  ///< a multiple of 4, except in the last range
    std::size_t offset = 0;
};

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED {

template <class S>
concept kv_scheme = std::copy_constructible<S> &&
    requires(const S s, block_shape shape, block_id id, float* values, const std::byte* in, std::byte* out) {
    { s.name() } -> std::convertible_to<std::string>;
    { s.block_bytes(shape) } -> std::convertible_to<std::size_t>;
    { s.quantize(shape, id, values, out) } -> std::convertible_to<std::uint32_t>;
    s.dequantize(shape, id, in, values);
};

namespace detail {
template <class S>
constexpr bool supports(tensor role) {
    if constexpr (requires { S::supports(role); })
        return S::supports(role);
    else
        return true;
}
}  // namespace detail

template <class S>
concept key_scheme = kv_scheme<S> && detail::supports<S>(tensor::key);
template <class S>
concept value_scheme = kv_scheme<S> && detail::supports<S>(tensor::value);

namespace detail {
/// A derived type inherits the members that attention reads from its base, but its dequantize() may differ.
/// So a scheme names itself in attends_as. A derived type that does not name itself again is dequantized
/// before it is multiplied.
template <class S>
concept read_by_attention = kv_scheme<S> && std::same_as<typename S::attends_as, S>;
}  // namespace detail

namespace detail {
/// The scheme of the format: a scheme with the group size as a value replaces one with the group size in its
/// type, so that formats of all group sizes share compiled functions (schemes/scheme.hpp).
template <class S>
struct with_any_group {
    using type = S;
    static S of(S scheme) { return scheme; }
};

/// Do two schemes of one type and one name always dequantize the same? If not, saving needs a fingerprint.
template <class S>
inline constexpr bool name_says_all = std::is_empty_v<S>;
/// Do they quantize the same, too? Not if an encoder holds statistics.
template <class S>
inline constexpr bool quantizes_by_name = std::is_empty_v<S>;
}  // namespace detail

namespace detail {
template <class C, class R, class... A>
C declared_in(R (C::*)(A...) const);
template <class C, class R, class... A>
C declared_in(R (C::*)(A...) const noexcept);
/// Does the requantize() of S belong to its quantize()? Not if a derived type has a quantize() of its own and
/// inherits requantize(): it would be requantized as its base is. Of a member that is static, overloaded or a
/// template the class is unknown.
template <class S>
inline constexpr bool requantizes_as_it_quantizes = [] {
    if constexpr (requires { typename S::requantizes_as; })
        return std::same_as<typename S::requantizes_as, S>;
    else if constexpr (requires {
                           declared_in(&S::quantize);
                           declared_in(&S::requantize);
                       })
        return std::is_base_of_v<decltype(declared_in(&S::quantize)), decltype(declared_in(&S::requantize))>;
    else
        return false;
}();

/// The same rule as for attends_as: a derived type that does not name itself has only quantize() and
/// dequantize().
template <class S>
concept requantizing = read_by_attention<S> && requantizes_as_it_quantizes<S> &&
    requires(const S s, block_shape shape, block_id id, float* values, std::byte* out) {
    { s.requantize(shape, id, values, values, out) } -> std::convertible_to<std::uint32_t>;
};
template <class S>
concept with_token_scales = read_by_attention<S> &&
    requires(const S s, block_shape shape, const std::byte* in, float* token_scales) {
    s.read_token_scales(shape, in, token_scales);
};
}  // namespace detail

namespace detail {
/// Do the parts of S make its dequantize() agree with what attention reads? Of other schemes a cache compares
/// both (format/check_products.hpp).
template <class S>
inline constexpr bool composed_by_library = false;
}  // namespace detail

/// A scheme whose blocks start with codes (pack/code_layout.hpp) and whose parameters can be multiplied into
/// the operands of a product. `Backend` gives load_floats(const P*, int, float*), so that parameters of known
/// types load as vectors. Codes of 4 bits may stand for 16 integers that are no grid, such as twice the
/// values of e2m1:
///
///   static constexpr std::array<std::uint8_t, 16> code_entries     what is multiplied in place of each code,
///                                                                  0 to 127; zero_code is subtracted from it
template <class S>
concept foldable = detail::read_by_attention<S> && requires(const S s, block_shape shape) {
    { S::code_bits } -> std::convertible_to<int>;
    { S::zero_code } -> std::convertible_to<int>;
    { S::fold(tensor::key) } -> std::same_as<fold_use>;
    { s.codes(shape) } -> std::same_as<code_layout<S::code_bits>>;
    // template <class Backend> void row_parameters(shape, id, block, col_group, float* scale, float* bias)
    // const template <class Backend> void col_parameters(shape, id, block, row_group, float* scale, float*
    // bias) const
};

namespace detail {
template <class S>
concept with_code_entries = requires {
    { S::code_entries[15] } -> std::convertible_to<int>;
};
/// The largest number that products take in place of a code.
template <class S>
inline constexpr int largest_multiplied = (1 << S::code_bits) - 1;
template <with_code_entries S>
inline constexpr int largest_multiplied<S> = [] {
    int largest = 0;
    for (const int entry : S::code_entries) largest = entry > largest ? entry : largest;
    return largest;
}();
}  // namespace detail

/// A scheme whose columns form ranges with codes of different widths, and whose columns carry the parameters:
///
///   width_list                       its count and values: the widths of codes, 0 for none
///   for_each_segment(shape, id, f)   `f.operator()<Bits>(code_segment)` for every width in use, in the order
///                                    of columns
///   columns(shape)
///     all columns as one matrix: codes(shape), as if of 8 bits; fold(role); parameters, offset of their
///                                    first one in a block; load<Backend>(block, row_group, scale, bias,
///                                      factor): scales times factor[c]
///
/// Columns are in the order after transform_query. Row groups are those of columns(shape).codes(shape).
template <class S>
concept segmented = detail::read_by_attention<S> && requires(const S s, block_shape shape) {
    { S::width_list::count } -> std::convertible_to<int>;
    s.columns(shape).codes(shape);
};

/// A scheme with codes that transforms tokens before quantizing: its codes are those of T x. (Blocks of other
/// schemes are dequantized before they are multiplied, and dequantize() has already undone the transform.)
template <class S>
concept transforming = (foldable<S> || segmented<S>)&&requires(const S s, block_shape shape, block_id id,
                                                               float* x) {
    s.transform_query(shape, id, x);
    s.restore_output(shape, id, x);
};

/// 16- or 32-bit values, not quantized (schemes/full.hpp).
template <class S>
concept full_precision = detail::read_by_attention<S> && requires {
    typename S::value_type;
};

/// 8-bit floats in rows of tokens (schemes/float_rows.hpp).
template <class S>
concept rows_of_floats = detail::read_by_attention<S> && requires {
    typename S::row_code;
};

/// Rows of tokens in a layout that is a value (schemes/token_rows.hpp).
template <class S>
concept rows_of_tokens = detail::read_by_attention<S> && requires(const S s) {
    s.layout();
    s.tensor_scale(block_id{});
};

/// Records of tokens, which are read where their owner keeps them (schemes/token_records.hpp).
template <class S>
concept records_of_tokens = kv_scheme<S> && requires(const S s, const row_place& place, float* values) {
    s.layout();
    { s.read(place, 1, 0, 1, values) } -> std::same_as<bool>;
};

}}  // namespace kvq
