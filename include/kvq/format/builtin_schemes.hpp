// The built-in formats of one backend, in parts that can be compiled apart: each part takes some seconds.
//
//   add_builtin_part<Backend, Part>(list)     appends the entries of one part
//
// A new built-in scheme is one line here.
#pragma once

#include <span>
#include <vector>

#include "../schemes/int8.hpp"
#include "../schemes/kivi.hpp"
#include "../schemes/presets.hpp"
#include "builtin_format.hpp"
#include "make_format.hpp"

namespace kvq::inline KVQ_TAGGED::detail {

template <class Backend, class Scheme>
format make_builtin(int group, const std::byte* statistics, std::size_t bytes) {
    if constexpr (requires { typename Scheme::granularity_type; })
        if constexpr (std::is_constructible_v<Scheme, typename Scheme::granularity_type> &&
                      !fixed_group<typename Scheme::granularity_type>)
            return make_format<Backend>(Scheme(typename Scheme::granularity_type(group)));
    if constexpr (std::is_constructible_v<Scheme, const calibration&>)
        if (statistics != nullptr)
            return make_format<Backend>(Scheme(calibration::load(std::span(statistics, bytes))));
    return make_format<Backend>(Scheme{});
}
template <class Backend, class Scheme>
builtin_format builtin_entry(const char* name, bool keys, bool values, int group = 0) {
    return {name,   keys,
            values, std::is_constructible_v<Scheme, const calibration&>,
            group,  &make_builtin<Backend, Scheme>};
}

using builtin_list = std::vector<builtin_format>;

template <class Backend>
void add_builtin_values(builtin_list& list) {
    list.push_back(builtin_entry<Backend, full<float16>>("fp16", true, true));
    list.push_back(builtin_entry<Backend, full<bfloat16>>("bf16", true, true));
    list.push_back(builtin_entry<Backend, full<float>>("fp32", true, true));
    list.push_back(builtin_entry<Backend, int8>("int8", true, true));
}

/// `Bits` bits per channel or per token. Names: for groups of 32, 64 and 128.
template <class Backend, int Bits>
void add_builtin_affine(builtin_list& list, const char* const (&names)[3],
                        const char* const (&kivi_names)[3]) {
    using by_token = affine<Bits, per_token<any_group>>;
    using by_channel = affine<Bits, per_channel<any_group>>;
    for (int i = 0; i < 3; ++i) {
        const int group = 32 << i;
        list.push_back(builtin_entry<Backend, by_token>(names[i], true, true, group));
        list.push_back(builtin_entry<Backend, by_channel>(kivi_names[i], true, false, group));
        list.push_back(builtin_entry<Backend, by_token>(kivi_names[i], false, true, group));
    }
}

template <class Backend, class Preset>
void add_builtin_preset(builtin_list& list) {
    list.push_back(builtin_entry<Backend, typename Preset::keys>(Preset::name, true, false));
    list.push_back(builtin_entry<Backend, typename Preset::values>(Preset::name, false, true));
}

inline constexpr int builtin_parts = 11;

/// Part 0 to 10: full precision and int8; widths 1 to 8; presets with one width; presets with several widths.
template <class Backend, int Part>
void add_builtin_part(builtin_list& list) {
#define KVQ_BUILTIN_AFFINE(B)                                                                              \
    add_builtin_affine<Backend, B>(list, {"affine-" #B "-g32", "affine-" #B "-g64", "affine-" #B "-g128"}, \
                                   {"kivi-" #B "-g32", "kivi-" #B "-g64", "kivi-" #B "-g128"})
    if constexpr (Part == 0) add_builtin_values<Backend>(list);
    if constexpr (Part == 1) KVQ_BUILTIN_AFFINE(1);
    if constexpr (Part == 2) KVQ_BUILTIN_AFFINE(2);
    if constexpr (Part == 3) KVQ_BUILTIN_AFFINE(3);
    if constexpr (Part == 4) KVQ_BUILTIN_AFFINE(4);
    if constexpr (Part == 5) KVQ_BUILTIN_AFFINE(5);
    if constexpr (Part == 6) KVQ_BUILTIN_AFFINE(6);
    if constexpr (Part == 7) KVQ_BUILTIN_AFFINE(7);
    if constexpr (Part == 8) KVQ_BUILTIN_AFFINE(8);
#undef KVQ_BUILTIN_AFFINE
    if constexpr (Part == 9) {
        add_builtin_preset<Backend, std4>(list);
        add_builtin_preset<Backend, std4_h>(list);
        add_builtin_preset<Backend, std5>(list);
        add_builtin_preset<Backend, hi6>(list);
        add_builtin_preset<Backend, ref8>(list);
    }
    if constexpr (Part == 10) {
        add_builtin_preset<Backend, low2>(list);
        add_builtin_preset<Backend, low3>(list);
        add_builtin_preset<Backend, mix4>(list);
    }
}

}  // namespace kvq::inline KVQ_TAGGED::detail
