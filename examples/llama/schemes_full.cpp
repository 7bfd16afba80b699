#include "kvq_cache.hpp"

namespace llama {

// Nothing is coded where pages and window have one format: these three are the limits to compare with.
template <class T>
constexpr scheme_entry full_entry(std::string_view name) {
    return kvq_entry<kvq::full<T>, kvq::full<T>, T>(name);
}

std::span<const scheme_entry> full_schemes() {
    static constexpr scheme_entry entries[] = {
        full_entry<kvq::float16>("fp16"),
        full_entry<kvq::bfloat16>("bf16"),
        full_entry<float>("fp32"),
        kvq_entry<kvq::int8, kvq::int8>("int8"),
    };
    return entries;
}

}  // namespace llama
