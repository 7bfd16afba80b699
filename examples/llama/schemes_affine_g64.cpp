#include "kvq_cache.hpp"

namespace llama {

std::span<const scheme_entry> affine_g64_schemes() {
    using group = kvq::per_token<64>;
    static constexpr scheme_entry entries[] = {
        kvq_entry<kvq::affine<8, group>, kvq::affine<8, group>>("affine-8-g64"),
        kvq_entry<kvq::affine<6, group>, kvq::affine<6, group>>("affine-6-g64"),
        kvq_entry<kvq::affine<5, group>, kvq::affine<5, group>>("affine-5-g64"),
        kvq_entry<kvq::affine<4, group>, kvq::affine<4, group>>("affine-4-g64"),
        kvq_entry<kvq::affine<3, group>, kvq::affine<3, group>>("affine-3-g64"),
        kvq_entry<kvq::affine<2, group>, kvq::affine<2, group>>("affine-2-g64"),
    };
    return entries;
}

}  // namespace llama
