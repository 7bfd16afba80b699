// Estimates the bytes of a cache and the longest context that fits, before anything is allocated.
#include <cstdio>
#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>

void show(const char* name, const kvq::format_pair& formats) {
    const kvq::cache_shape llama_3_8b{.layers = 32, .kv_heads = 8, .head_dim = 128};
    const kvq::cache cache(llama_3_8b,
                           {.keys = formats.keys, .values = formats.values, .sinks = 4, .recent = 64});
    const kvq::attention_use use{.q_heads = 32, .q_tokens = 1, .threads = 8};
    const kvq::footprint_report f = kvq::footprint(cache, 32768, 1, use);
    std::printf(
        "%-8s %8.1f MiB at 32768 tokens (%.1f quantized, %.1f window, %.2f bookkeeping, %.2f scratch)"
        "   longest context in 4 GiB: %d\n",
        name, static_cast<double>(f.total) / 1048576.0, static_cast<double>(f.quantized) / 1048576.0,
        static_cast<double>(f.window + f.rollback) / 1048576.0,
        static_cast<double>(f.bookkeeping) / 1048576.0,
        static_cast<double>(f.workspace + f.attention) / 1048576.0,
        kvq::longest_context(cache, std::size_t{4} << 30, 1, use));
}

int main() {
    show("fp16", kvq::make_formats<kvq::full<kvq::float16>, kvq::scalar>());
    show("int8", kvq::make_formats<kvq::int8, kvq::scalar>());
    show("affine-4", kvq::make_formats<kvq::affine<4>, kvq::scalar>());
    show("kivi-4", kvq::make_formats<kvq::kivi<4>, kvq::scalar>());
    show("kivi-2", kvq::make_formats<kvq::kivi<2>, kvq::scalar>());
    return 0;
}
