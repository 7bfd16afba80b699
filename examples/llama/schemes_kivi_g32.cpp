#include "kvq_cache.hpp"

namespace llama {

template <int Bits>
constexpr scheme_entry kivi_entry(std::string_view name) {
    return kvq_entry<typename kvq::kivi<Bits, 32>::keys, typename kvq::kivi<Bits, 32>::values>(name);
}

std::span<const scheme_entry> kivi_g32_schemes() {
    static constexpr scheme_entry entries[] = {
        kivi_entry<4>("kivi-4-g32"),
        kivi_entry<3>("kivi-3-g32"),
        kivi_entry<2>("kivi-2-g32"),
    };
    return entries;
}

}  // namespace llama
