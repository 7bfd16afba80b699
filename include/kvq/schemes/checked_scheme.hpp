// A scheme that lacks a member is told which, in one sentence.
//
// checked_scheme<S>::type is S for a scheme; else a static_assert speaks and the type is one that compiles, so that nothing else is said.
#pragma once

#include <string>

#include "full.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

/// A scheme that lacks something is told what.
template <class S>
struct checked_scheme {
    using type = full<float16>;  // so that nothing else is said
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

}  // namespace kvq::inline KVQ_TAGGED::detail
