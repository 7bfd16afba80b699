// Defines the list of built-in formats of a program that does not link kvq::library: include it in exactly
// one file.
//
// That file takes a minute or two to compile, since it holds the kernels of every built-in format for the
// instructions of this build.
#pragma once

#include "../cpu/simd.hpp"
#include "builtin_schemes.hpp"

namespace kvq { inline namespace v0_3 {

const builtin_format* builtin_formats(std::size_t* count) {
    static const auto all = [] {
        kvq::KVQ_TAGGED::detail::builtin_list list;
        [&]<int... Part>(std::integer_sequence<int, Part...>) {
            (kvq::KVQ_TAGGED::detail::add_builtin_part<simd<>, Part>(list), ...);
        }
        (std::make_integer_sequence<int, kvq::KVQ_TAGGED::detail::builtin_parts>{});
        return list;
    }();
    *count = all.size();
    return all.data();
}

}}  // namespace kvq
