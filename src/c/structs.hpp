// Structs of kvq.h with a member `size`, and tensors.
//
//   const kvq_cache_options o = read_struct(options, "options");     members that an older program does not
//                                                                    know are zero
//   expect_struct(usage, "usage"); ... write_struct(usage, filled);   members that it does not know are not
//                                                                     written
//
// A newer program may pass members that this library does not know, as long as they are zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <kvq/cache/requantize_request.hpp>
#include <kvq/core/row_view.hpp>
#include <kvq/core/shape.hpp>
#include <kvq/page/usage_report.hpp>
#include <kvq/policy/radix_tree.hpp>
#include <limits>

#include "handle.hpp"

namespace kvq::c {

/// Bytes of the struct in the first version of the interface. A struct that grows keeps its first size here.
template <class T>
inline constexpr std::size_t first_size = sizeof(T);
template <>
inline constexpr std::size_t first_size<kvq_mods> = offsetof(kvq_mods, token_ranges);
template <>
inline constexpr std::size_t first_size<kvq_cache_options> = offsetof(kvq_cache_options, preallocate);
template <>
inline constexpr std::size_t first_size<kvq_cache_info> = offsetof(kvq_cache_info, bytes_held);
template <>
inline constexpr std::size_t first_size<kvq_usage> = offsetof(kvq_usage, reserved);
template <>
inline constexpr std::size_t first_size<kvq_footprint> = offsetof(kvq_footprint, unused);

template <class T>
void expect_struct(const T* s, const char* name) {
    constexpr std::size_t most_unknown = 1024;
    expect(s != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
    expect(reinterpret_cast<std::uintptr_t>(s) % alignof(T) == 0, KVQ_ERROR_STRUCT, name,
           " is not aligned as a struct of its type");
    expect(s->size >= first_size<T> && s->size <= sizeof(T) + most_unknown, KVQ_ERROR_STRUCT, "the size of ",
           name, " is ", s->size, ", this library expects ", sizeof(T), "; set it with KVQ_INIT");
}

template <class T>
T read_struct(const T* s, const char* name) {
    expect_struct(s, name);
    T known{};
    std::memcpy(&known, s, std::min(s->size, sizeof(T)));
    const auto* const bytes = reinterpret_cast<const unsigned char*>(s);
    for (std::size_t i = sizeof(T); i < s->size; ++i)
        expect(bytes[i] == 0, KVQ_ERROR_STRUCT, name, " has ", s->size, " bytes, and byte ", i,
               " is not zero, but this library knows ", sizeof(T));
    return known;
}
/// The same for a struct with a member that later versions may use.
template <class T>
T read_reserved(const T* s, const char* name) {
    const T known = read_struct(s, name);
    expect(known.reserved == 0, KVQ_ERROR_STRUCT, name, ".reserved is ", known.reserved, ", not 0");
    return known;
}
/// NULL: all zero.
template <class T>
T read_optional(const T* s, const char* name) {
    if (s == nullptr) return T{};
    if constexpr (requires(T t) { t.reserved; })
        return read_reserved(s, name);
    else
        return read_struct(s, name);
}

template <class T>
void write_struct(T* to, const T& from) noexcept {
    const std::size_t size = to->size;
    std::memset(static_cast<void*>(to), 0, size);
    std::memcpy(static_cast<void*>(to), &from, std::min(size, sizeof(T)));
    to->size = size;
}
inline void write_report(kvq_requantize_report* to, const requantize_report& r) noexcept {
    write_struct(to, kvq_requantize_report{0, r.pages, r.pages_left, r.bytes_before, r.bytes_after,
                                           r.bytes_peak, r.bytes_freed, r.workspace});
}
inline void write_usage(kvq_usage* to, const usage_report& u) noexcept {
    write_struct(to, kvq_usage{0, u.quantized, u.window, u.slack, u.rollback, u.bookkeeping, u.workspace,
                               u.bytes, u.not_finite, u.tokens, u.reserved, u.repacked, u.state});
}

inline float_type type_of(kvq_dtype type, const char* name) {
    expect(type >= KVQ_FP32 && type <= KVQ_BF16, KVQ_ERROR_ARGUMENT, name, " has dtype ", type,
           ", which is none of KVQ_FP32, KVQ_FP16 and KVQ_BF16");
    return type == KVQ_FP32 ? float_type::fp32 : type == KVQ_FP16 ? float_type::fp16 : float_type::bf16;
}

inline tensor role_of(kvq_role role) {
    expect(role == KVQ_KEY || role == KVQ_VALUE, KVQ_ERROR_ARGUMENT, "role is ", role,
           ", neither KVQ_KEY nor KVQ_VALUE");
    return role == KVQ_KEY ? tensor::key : tensor::value;
}

/// Returns use(token_view<T>) for the type of the tensor, after checks that no address overflows.
template <class Use>
decltype(auto) with_tensor(const kvq_tensor* given, const char* name, Use&& use) {
    expect(given != nullptr, KVQ_ERROR_HANDLE, name, " is NULL");
    const kvq_tensor x = *given;
    const float_type type = type_of(x.dtype, name);
    constexpr std::int32_t most = 1 << 20;
    expect(x.tokens >= 0 && x.heads >= 0 && x.dim >= 0 && x.heads <= most && x.dim <= most,
           KVQ_ERROR_ARGUMENT, name, " is ", x.tokens, " tokens x ", x.heads, " heads x ", x.dim,
           " channels; heads and channels are 0 to ", most);
    expect(reinterpret_cast<std::uintptr_t>(x.data) % size_of(type) == 0, KVQ_ERROR_ARGUMENT, name,
           " is not aligned to its values of ", size_of(type), " bytes");
    const bool dense = x.token_stride == 0 && x.head_stride == 0;
    const std::ptrdiff_t per_token = dense ? std::ptrdiff_t{x.heads} * x.dim : x.token_stride;
    const std::ptrdiff_t per_head = dense ? std::ptrdiff_t{x.dim} : x.head_stride;
    std::ptrdiff_t tokens = 0, heads = 0, bytes = 0;
    const bool overflows = __builtin_mul_overflow(per_token, std::ptrdiff_t{x.tokens}, &tokens) ||
                           __builtin_mul_overflow(per_head, std::ptrdiff_t{x.heads}, &heads) ||
                           __builtin_add_overflow(tokens, heads, &bytes) ||
                           __builtin_mul_overflow(bytes, std::ptrdiff_t{4}, &bytes);
    expect(!overflows, KVQ_ERROR_ARGUMENT, name, " of ", x.tokens, " tokens with strides ", x.token_stride,
           " and ", x.head_stride, " is larger than memory");
    return detail::visit_float_type(type, [&]<class T>(T) {
        return use(token_view<T>(static_cast<T*>(x.data), x.tokens, x.heads, x.dim, per_token, per_head));
    });
}

inline input_view input_of(const kvq_tensor* x, const char* name) {
    return with_tensor(x, name, [](const auto& view) { return input_view(view); });
}
inline query_view query_of(const kvq_tensor* x, const char* name) {
    return with_tensor(x, name, [](const auto& view) { return query_view(view); });
}
inline output_view output_of(const kvq_tensor* x, const char* name) {
    return with_tensor(x, name, [](const auto& view) { return output_view(view); });
}

/// A number of tokens or entries: 0 is the usual one, KVQ_NONE is 0.
inline int or_default(std::int32_t given, int usual) noexcept {
    return given == 0 ? usual : given == KVQ_NONE ? 0 : given;
}

/// A list of `count` elements that may be NULL if it is empty.
template <class T>
void expect_list(const T* list, std::int32_t count, const char* name) {
    expect(count >= 0, KVQ_ERROR_ARGUMENT, "the number of ", name, " is ", count);
    expect(list != nullptr || count == 0, KVQ_ERROR_HANDLE, name, " is NULL, for ", count, " of them");
}

inline token_ids ids_of(const std::int32_t* tokens, std::int32_t count) {
    expect_list(tokens, count, "tokens");
    return {tokens, static_cast<std::size_t>(count)};
}

}  // namespace kvq::c
