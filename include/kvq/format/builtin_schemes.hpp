// The built-in formats of one backend, in parts that can be compiled apart: each part takes some seconds.
//
//   add_builtin_part<Backend, Part>(list)             appends the entries of one part
//   add_builtin_part<Backend, Part, Wanted>(list)     those whose names, without a group size, Wanted
//                                                     accepts; others are not compiled
//
// A new built-in scheme is one line here; so that KVQ_LIBRARY_FORMATS may name it, also one in
// src/CMakeLists.txt.
#pragma once

#include <iterator>
#include <span>
#include <string_view>
#include <utility>

#include "../core/tagged_vector.hpp"
#include "../schemes/head_rows.hpp"
#include "../schemes/int8.hpp"
#include "../schemes/kivi.hpp"
#include "../schemes/presets.hpp"
#include "../schemes/rotated_records.hpp"
#include "builtin_format.hpp"
#include "make_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

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

using builtin_list = tagged_vector<builtin_format>;

constexpr bool every_format(std::string_view) { return true; }

template <class Backend, bool (*Wanted)(std::string_view)>
void add_builtin_values(builtin_list& list) {
    if constexpr (Wanted("fp16")) list.push_back(builtin_entry<Backend, full<float16>>("fp16", true, true));
    if constexpr (Wanted("bf16")) list.push_back(builtin_entry<Backend, full<bfloat16>>("bf16", true, true));
    if constexpr (Wanted("fp32")) list.push_back(builtin_entry<Backend, full<float>>("fp32", true, true));
    if constexpr (Wanted("int8")) list.push_back(builtin_entry<Backend, int8>("int8", true, true));
    if constexpr (Wanted("e4m3"))
        list.push_back(builtin_entry<Backend, float_rows<e4m3>>("e4m3", true, true));
}

/// `Bits` bits per token (Affine), or keys per channel and values per token (Kivi). Names: for groups of 32,
/// 64 and 128.
template <class Backend, int Bits, bool Affine, bool Kivi>
void add_builtin_width(builtin_list& list, const char* const (&names)[3],
                       const char* const (&kivi_names)[3]) {
    using by_token = affine<Bits, per_token<any_group>>;
    using by_channel = affine<Bits, per_channel<any_group>>;
    for (int i = 0; i < 3; ++i) {
        const int group = 32 << i;
        if constexpr (Affine) list.push_back(builtin_entry<Backend, by_token>(names[i], true, true, group));
        if constexpr (Kivi) {
            list.push_back(builtin_entry<Backend, by_channel>(kivi_names[i], true, false, group));
            list.push_back(builtin_entry<Backend, by_token>(kivi_names[i], false, true, group));
        }
    }
}

template <class Backend, class Preset, bool (*Wanted)(std::string_view)>
void add_builtin_preset(builtin_list& list) {
    if constexpr (Wanted(Preset::name)) {
        list.push_back(builtin_entry<Backend, typename Preset::keys>(Preset::name, true, false));
        list.push_back(builtin_entry<Backend, typename Preset::values>(Preset::name, false, true));
    }
}

template <class Backend, class Scheme, const auto& Layouts, int At>
format make_builtin_layout(int kv_heads, const std::byte* scales, std::size_t bytes) {
    if constexpr (std::is_constructible_v<Scheme, const row_layout&, float>) {
        if (kv_heads != 0)
            return make_format<Backend>(head_rows(
                Layouts[At], {reinterpret_cast<const float*>(scales), bytes / sizeof(float)}, kv_heads));
        if (bytes == sizeof(float)) return make_format<Backend>(Scheme(Layouts[At], load_as<float>(scales)));
    }
    return make_format<Backend>(Scheme(Layouts[At]));
}
/// All layouts of a list, which one scheme reads.
template <class Backend, bool (*Wanted)(std::string_view), class Scheme, const auto& Layouts, int... Of>
void add_builtin_layouts(builtin_list& list, std::integer_sequence<int, Of...>) {
    const auto add = [&]<int At>(std::integral_constant<int, At>) {
        if constexpr (Wanted(Layouts[At].name))
            list.push_back(
                {Layouts[At].name, true, true, false, 0, &make_builtin_layout<Backend, Scheme, Layouts, At>});
    };
    (add(std::integral_constant<int, Of>{}), ...);
}

inline constexpr int builtin_parts = 12;

/// Part 0 to 11: full precision and 8 bits with a scale per token; widths 1 to 8; presets with one width;
/// presets with several widths; rows of tokens in the bytes of other systems.
template <class Backend, int Part, bool (*Wanted)(std::string_view) = every_format>
void add_builtin_part(builtin_list& list) {
#define KVQ_BUILTIN_WIDTH(B)                                                    \
    if constexpr (Part == B)                                                    \
    add_builtin_width<Backend, B, Wanted("affine-" #B), Wanted("kivi-" #B)>(    \
        list, {"affine-" #B "-g32", "affine-" #B "-g64", "affine-" #B "-g128"}, \
        {"kivi-" #B "-g32", "kivi-" #B "-g64", "kivi-" #B "-g128"})
    if constexpr (Part == 0) add_builtin_values<Backend, Wanted>(list);
    KVQ_BUILTIN_WIDTH(1);
    KVQ_BUILTIN_WIDTH(2);
    KVQ_BUILTIN_WIDTH(3);
    KVQ_BUILTIN_WIDTH(4);
    KVQ_BUILTIN_WIDTH(5);
    KVQ_BUILTIN_WIDTH(6);
    KVQ_BUILTIN_WIDTH(7);
    KVQ_BUILTIN_WIDTH(8);
#undef KVQ_BUILTIN_WIDTH
    if constexpr (Part == 9) {
        add_builtin_preset<Backend, std4, Wanted>(list);
        add_builtin_preset<Backend, std4_h, Wanted>(list);
        add_builtin_preset<Backend, nested4, Wanted>(list);
        add_builtin_preset<Backend, std5, Wanted>(list);
        add_builtin_preset<Backend, std5_h, Wanted>(list);
        add_builtin_preset<Backend, hi6, Wanted>(list);
        add_builtin_preset<Backend, hi6_h, Wanted>(list);
        add_builtin_preset<Backend, ref8, Wanted>(list);
    }
    if constexpr (Part == 10) {
        add_builtin_preset<Backend, low2, Wanted>(list);
        add_builtin_preset<Backend, low2_h, Wanted>(list);
        add_builtin_preset<Backend, low3, Wanted>(list);
        add_builtin_preset<Backend, low3_h, Wanted>(list);
        add_builtin_preset<Backend, mix4, Wanted>(list);
        add_builtin_preset<Backend, mix5, Wanted>(list);
        add_builtin_preset<Backend, mix6, Wanted>(list);
    }
    if constexpr (Part == 11) {
        add_builtin_layouts<Backend, Wanted, token_rows, row_layouts>(
            list, std::make_integer_sequence<int, std::size(row_layouts)>{});
        add_builtin_layouts<Backend, Wanted, token_records, record_layouts>(
            list, std::make_integer_sequence<int, std::size(record_layouts)>{});
        if constexpr (Wanted(int4_token_head.name))
            list.push_back({int4_token_head.name, true, true, false, 0,
                            [](int, const std::byte*, std::size_t) -> format {
                                return make_format<Backend>(rotated_records(int4_token_head));
                            }});
    }
}

}}}  // namespace kvq::detail
