#include "kvq_cache.hpp"

namespace llama {

std::span<const scheme_entry> kivi_schemes() {
    static constexpr scheme_entry entries[] = {
        kvq_entry<kvq::kivi<8, 32>::keys, kvq::kivi<8, 32>::values>("kivi-8"),
        kvq_entry<kvq::kivi<4, 32>::keys, kvq::kivi<4, 32>::values>("kivi-4"),
        kvq_entry<kvq::kivi<3, 32>::keys, kvq::kivi<3, 32>::values>("kivi-3"),
        kvq_entry<kvq::kivi<2, 32>::keys, kvq::kivi<2, 32>::values>("kivi-2"),
    };
    return entries;
}

}  // namespace llama
