#include "kvq_cache.hpp"

namespace llama {

// Widths that the table of scripts/demo leaves out.
std::span<const scheme_entry> more_g32_schemes() {
    using group = kvq::per_token<32>;
    static constexpr scheme_entry entries[] = {
        kvq_entry<kvq::affine<6, group>, kvq::affine<6, group>>("affine-6-g32"),
        kvq_entry<kvq::affine<5, group>, kvq::affine<5, group>>("affine-5-g32"),
        kvq_entry<kvq::kivi<8, 32>::keys, kvq::kivi<8, 32>::values>("kivi-8-g32"),
    };
    return entries;
}

}  // namespace llama
