// Two ways to your own scheme: compose one from policies, or write a struct that models the concept.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

// 1. Composed: runs on integer dot products like every composed scheme.
using my_keys = kvq::scheme<kvq::bits<3>, kvq::asymmetric, kvq::per_channel<32>, kvq::params<kvq::bfloat16>>;
static_assert(kvq::key_scheme<my_keys>);

// 2. Written by hand: the sign of every value and one mean magnitude per block (attention dequantizes it page
// by page).
struct sign_only {
    std::string name() const { return "sign-only"; }
    constexpr std::size_t block_bytes(const kvq::block_shape& s) const {
        return (s.values() / 8 + 4 + 16) / 16 * 16;
    }

    std::uint32_t quantize(const kvq::block_shape& s, kvq::block_id, float* values, std::byte* block) const {
        std::fill_n(block, block_bytes(s), std::byte{0});
        float sum = 0.0f;
        for (std::size_t i = 0; i < s.values(); ++i) {
            sum += std::fabs(values[i]);
            if (values[i] < 0.0f) block[4 + i / 8] |= std::byte{1} << (i % 8);
        }
        const float mean = sum / static_cast<float>(s.values());
        std::memcpy(block, &mean, 4);
        return 0;
    }
    void dequantize(const kvq::block_shape& s, kvq::block_id, const std::byte* block, float* values) const {
        float mean = 0.0f;
        std::memcpy(&mean, block, 4);
        for (std::size_t i = 0; i < s.values(); ++i)
            values[i] = (block[4 + i / 8] >> (i % 8) & std::byte{1}) == std::byte{0} ? mean : -mean;
    }
};
static_assert(kvq::value_scheme<sign_only>);

int main() {
    const kvq::format keys = kvq::make_format<my_keys, kvq::scalar>(),
                      values = kvq::make_format<sign_only, kvq::scalar>();
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = 64},
                     {.keys = keys, .values = values, .recent = 32});
    auto sequence = cache.new_sequence();
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> kv(500 * 64), out(64);
    for (float& x : kv) x = normal(random);
    sequence.append(0, kvq::token_view(kv.data(), 500, 1, 64), kvq::token_view(kv.data(), 500, 1, 64));
    sequence.attend(0, kvq::token_view(kv.data(), 1, 1, 64), kvq::token_view(out.data(), 1, 1, 64));
    std::printf("%s + %s: %.2f bytes per token; out[0] = %f\n", keys.name(), values.name(),
                kvq::bytes_per_token(cache.shape(), 64, keys, values), static_cast<double>(out[0]));
    return 0;
}
