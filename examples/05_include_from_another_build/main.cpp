// Everything that an engine needs: the headers of kvq and its own tensors.
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <vector>

int main() {
    kvq::cache cache({.layers = 1, .kv_heads = 1, .head_dim = 4},
                     {.keys = kvq::make_format<kvq::int8, kvq::scalar>(), .page_tokens = 32});
    auto sequence = cache.new_sequence();
    std::vector<float> tensor(40 * 4, 0.5f), out(4);
    sequence.append(0, kvq::token_view(tensor.data(), 40, 1, 4), kvq::token_view(tensor.data(), 40, 1, 4));
    sequence.attend(0, kvq::token_view(tensor.data(), 1, 1, 4), kvq::token_view(out.data(), 1, 1, 4));
    std::printf("kvq %d.%d.%d: %f\n", KVQ_VERSION_MAJOR, KVQ_VERSION_MINOR, KVQ_VERSION_PATCH,
                static_cast<double>(out[0]));
    return out[0] > 0.49f && out[0] < 0.51f ? 0 : 1;
}
