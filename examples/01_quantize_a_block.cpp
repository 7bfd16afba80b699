// Quantizes one block (64 tokens of one head) with a few schemes and prints its bytes and its error.
#include <cmath>
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <vector>

template <kvq::kv_scheme Scheme>
void show(const Scheme& scheme, const std::vector<float>& values, const kvq::block_shape& shape) {
    std::vector<std::byte> block(scheme.block_bytes(shape));
    std::vector<float> input = values, output(values.size());  // quantize may overwrite its input
    scheme.quantize(shape, {}, input.data(), block.data());
    scheme.dequantize(shape, {}, block.data(), output.data());

    double error = 0.0, power = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        error += std::pow(output[i] - values[i], 2.0);
        power += std::pow(values[i], 2.0);
    }
    std::printf("%-24s %6zu bytes   %5.2f bits per value   relative error %.5f\n", scheme.name().c_str(),
                block.size(), kvq::bits_per_value(shape, scheme), std::sqrt(error / power));
}

int main() {
    const kvq::block_shape keys{kvq::tensor::key, 64, 128};
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(keys.values());
    // Keys like those of models: a few channels are much larger than the others.
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = normal(random) * (i % 128 < 4 ? 8.0f : 1.0f);

    show(kvq::full<kvq::float16>{}, values, keys);
    show(kvq::int8{}, values, keys);
    show(kvq::affine<4, kvq::per_token<64>>{}, values, keys);
    show(kvq::kivi<4, 64>::keys{}, values, keys);
    show(kvq::kivi<2, 64>::keys{}, values, keys);
    return 0;
}
