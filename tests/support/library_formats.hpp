// SPDX-License-Identifier: MIT
// Built-in formats from the objects of kvq::library, where these are for the instruction set of the tests:
// the same kernels from the same sources with the same flags, which are compiled for the library anyway.
// KVQ_TEST_LIBRARY, from CMake, names the instruction set.
#pragma once

#include <kvq/cpu/scalar.hpp>
#include <kvq/format/format.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#if defined(KVQ_TEST_LIBRARY)
#include <cstring>
#include <kvq/cpu/simd.hpp>
#include <kvq/format/builtin_format.hpp>
#include <stdexcept>
#endif

namespace test {

/// The backend of tests of what lies above a block: formats of kvq::library as far as they are built in, all
/// others and all formats of programs without the library are those of kvq::scalar.
struct usual {
#if defined(KVQ_TEST_LIBRARY)
    using lanes = kvq::simd<kvq::arch::KVQ_TEST_LIBRARY>::lanes;
#else
    using lanes = kvq::scalar::lanes;
#endif
};

template <class Scheme>
inline constexpr bool built_in = false;
template <kvq::float_format T>
inline constexpr bool built_in<kvq::full<T>> = true;
template <>
inline constexpr bool built_in<kvq::detail::with_any_group<kvq::int8>::type> = true;
template <int Bits>
inline constexpr bool built_in<kvq::affine<Bits, kvq::per_token<kvq::any_group>>> = true;
template <int Bits>
inline constexpr bool built_in<kvq::affine<Bits, kvq::per_channel<kvq::any_group>>> = true;
template <>
inline constexpr bool built_in<kvq::ref8::values> = true;
template <>
inline constexpr bool built_in<kvq::hi6::keys> = true;
template <>
inline constexpr bool built_in<kvq::hi6::values> = true;
template <>
inline constexpr bool built_in<kvq::std5::keys> = true;
template <>
inline constexpr bool built_in<kvq::std5::values> = true;
template <>
inline constexpr bool built_in<kvq::std4::keys> = true;
template <>
inline constexpr bool built_in<kvq::std4::values> = true;
template <>
inline constexpr bool built_in<kvq::std4_h::keys> = true;
template <>
inline constexpr bool built_in<kvq::hi6_h::keys> = true;
template <>
inline constexpr bool built_in<kvq::std5_h::keys> = true;
template <>
inline constexpr bool built_in<kvq::low3_h::keys> = true;
template <>
inline constexpr bool built_in<kvq::low2_h::keys> = true;
template <>
inline constexpr bool built_in<kvq::mix4::keys> = true;
template <>
inline constexpr bool built_in<kvq::mix5::keys> = true;
template <>
inline constexpr bool built_in<kvq::mix6::keys> = true;
template <>
inline constexpr bool built_in<kvq::low3::keys> = true;
template <>
inline constexpr bool built_in<kvq::low3::values> = true;
template <>
inline constexpr bool built_in<kvq::low2::keys> = true;
template <>
inline constexpr bool built_in<kvq::low2::values> = true;

/// Does the program link formats of this backend?
template <class Backend>
constexpr bool library_has() {
#if defined(KVQ_TEST_LIBRARY)
    if constexpr (std::is_same_v<Backend, usual>) return true;
    if constexpr (requires { typename Backend::architecture; })
        return std::is_same_v<typename Backend::architecture, kvq::arch::KVQ_TEST_LIBRARY> &&
               Backend::query_bytes == 2;
#endif
    return false;
}

#if defined(KVQ_TEST_LIBRARY)

namespace detail {

using add_entry = void (*)(void*, const kvq::builtin_format*);
#define KVQ_TEST_PART_NAME(level, part) kvq_builtin_##level##_##part
#define KVQ_TEST_PART_OF(level, part) KVQ_TEST_PART_NAME(level, part)
#define KVQ_TEST_PARTS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10)
#define KVQ_TEST_DECLARE(part) extern "C" void KVQ_TEST_PART_OF(KVQ_TEST_LIBRARY, part)(void*, add_entry);
KVQ_TEST_PARTS(KVQ_TEST_DECLARE)

inline const std::vector<kvq::builtin_format>& library_list() {
    static const auto all = [] {
        std::vector<kvq::builtin_format> list;
        const add_entry add = [](void* to, const kvq::builtin_format* entry) {
            static_cast<std::vector<kvq::builtin_format>*>(to)->push_back(*entry);
        };
#define KVQ_TEST_ADD(part) KVQ_TEST_PART_OF(KVQ_TEST_LIBRARY, part)(&list, add);
        KVQ_TEST_PARTS(KVQ_TEST_ADD)
        return list;
    }();
    return all;
}

}  // namespace detail

/// The library's format of a built-in scheme; `statistics`: what it was made from. Name and fingerprint say
/// all of a scheme.
template <class Scheme>
kvq::format from_library(const Scheme& scheme, const std::vector<std::byte>& statistics = {}) {
    int group = 0;
    if constexpr (requires { scheme.granularity.group; }) group = scheme.granularity.group;
    for (const kvq::builtin_format& entry : detail::library_list()) {
        const kvq::format f =
            entry.make(group, statistics.empty() ? nullptr : statistics.data(), statistics.size());
        if (std::strcmp(f.name(), scheme.name().c_str()) != 0) continue;
        if constexpr (requires { scheme.fingerprint(); })
            if (f.record().fingerprint != scheme.fingerprint()) continue;
        return f;
    }
    throw std::logic_error("kvq::library has no format of this scheme");
}

#endif

}  // namespace test
