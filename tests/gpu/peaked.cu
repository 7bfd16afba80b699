// Attention in which one key of every page dominates: weights below half a step of fixed-point numbers must
// not be lost. The bound is on the norm of all outputs of a call, as in the contract of attention.
#include "attention_test.cuh"

using namespace kvq;

namespace {

template <class Format>
void check_peaked(const char* name) {
    constexpr int page = Format::page_tokens;
    test::rng r(static_cast<unsigned>(page + Format::head_dim));
    double worst = 0.0, state = 0.0;
    const auto check = [&](int group, int query_tokens, std::vector<int> lengths) {
        test::attention_case c{.kv_heads = 1, .group = group, .query_tokens = query_tokens};
        c.lengths = std::move(lengths);
        c.peaked = true;
        test::check_attention<Format, float16>(r, c, name, &worst, &state);
    };
    check(4, 1, {8 * page, page + 7});
    check(1, 1, {8 * page});
#ifdef __CUDACC__  // emulated, one length of each kind will do
    check(8, 1, {1024, 8192, 65536});
    check(16, 1, {4096});
    check(4, 4, {2048, 300});
#endif
    std::printf("%s: %.2g of the norm of all outputs, %.2g of one row rounded to float16\n", name, state,
                worst);
}

}  // namespace

int main() {
    check_peaked<cuda::kivi_pair<4, 64, 128, 64>>("kivi-4-g64");
    check_peaked<cuda::preset_pair<std4, 128>>("std4");
#ifdef __CUDACC__
    check_peaked<cuda::block_pair<full<float16>, full<float16>, 128, 64>>("fp16");
    check_peaked<cuda::block_pair<int8, int8, 128, 64>>("int8");
    check_peaked<cuda::block_pair<affine<4, per_token<>>, affine<4, per_token<>>, 128, 64>>("affine-4");
    check_peaked<cuda::kivi_pair<2, 128, 128, 128>>("kivi-2-g128");
    check_peaked<cuda::preset_pair<low2, 128>>("low2");
#endif
    return test::report("peaked");
}
