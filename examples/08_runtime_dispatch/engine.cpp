// Compiled once for each instruction set, with its own flags and -DENGINE_ARCH=avx2, ...
// Kernels are templates of that architecture, so the objects share none of them. Other inline functions are shared: the weakest
// object must be linked first (CMakeLists.txt).
#include "engine.hpp"

#include <kvq/backends/simd.hpp>
#include <kvq/kvq.hpp>

using architecture = kvq::arch::ENGINE_ARCH;

namespace {

class packed_engine final : public engine {
public:
    const char* instructions() const override { return architecture::name(); }

    void append(const std::vector<float>& k, const std::vector<float>& v, int tokens) override {
        sequence_.append(0, kvq::token_view<const float>(k.data(), tokens, 2, 64),
                         kvq::token_view<const float>(v.data(), tokens, 2, 64));
    }
    std::vector<float> attend(const std::vector<float>& q) override {
        std::vector<float> out(q.size());
        sequence_.attend(0, kvq::token_view<const float>(q.data(), 1, 4, 64),
                         kvq::token_view<float>(out.data(), 1, 4, 64));
        return out;
    }

private:
    using scheme = kvq::kivi<4>;
    using cache_type = kvq::cache<scheme::keys, scheme::values, kvq::simd<architecture>>;
    cache_type cache_{{.layers = 1, .kv_heads = 2, .head_dim = 64}};
    kvq::sequence<cache_type> sequence_ = cache_.new_sequence();
};

}  // namespace

template <>
std::unique_ptr<engine> engine_for<architecture>() {
    return std::make_unique<packed_engine>();
}
