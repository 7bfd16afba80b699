#include "../../bench/quality_schemes.hpp"
#include "decoded_cache.hpp"

namespace llama {

std::span<const scheme_entry> ingredient_schemes() {
    static const std::vector<scheme_entry> entries = [] {
        std::vector<scheme_entry> list;
        quality::ingredient_schemes<kvq::mix4, 4>(collect_decoded{list});
        quality::ingredient_schemes<kvq::low3, 3>(collect_decoded{list});
        quality::ingredient_schemes<kvq::low2, 2>(collect_decoded{list});
        return list;
    }();
    return entries;
}

}  // namespace llama
