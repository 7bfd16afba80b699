#include "kvq_cache.hpp"

namespace llama {

template <int Bits>
constexpr scheme_entry kivi_entry(std::string_view name) {
    return kvq_entry<typename kvq::kivi<Bits, 64>::keys, typename kvq::kivi<Bits, 64>::values>(name);
}

std::span<const scheme_entry> kivi_g64_schemes() {
    static constexpr scheme_entry entries[] = {
        kivi_entry<4>("kivi-4-g64"),
        kivi_entry<3>("kivi-3-g64"),
        kivi_entry<2>("kivi-2-g64"),
    };
    return entries;
}

}  // namespace llama
