#include "kvq_cache.hpp"

namespace llama {

std::span<const scheme_entry> affine_g32_schemes() {
    using group = kvq::per_token<32>;
    static constexpr scheme_entry entries[] = {
        kvq_entry<kvq::affine<8, group>, kvq::affine<8, group>>("affine-8-g32"),
        kvq_entry<kvq::affine<4, group>, kvq::affine<4, group>>("affine-4-g32"),
        kvq_entry<kvq::affine<3, group>, kvq::affine<3, group>>("affine-3-g32"),
        kvq_entry<kvq::affine<2, group>, kvq::affine<2, group>>("affine-2-g32"),
    };
    return entries;
}

}  // namespace llama
