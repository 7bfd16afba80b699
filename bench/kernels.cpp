// SPDX-License-Identifier: MIT
// Prints the registry of kernels (cpu/registry.hpp): for every kind of format, the kernel of each operation,
// or why portable code runs.
//
//   scripts/bench kernels --dim 80 --tokens 128 --width 16      width: numbers of a vector, 16 with AVX-512,
//                                                               8 with AVX2, 4 with SSE and NEON
#include <CLI/CLI.hpp>
#include <cstdio>
#include <kvq/cpu/describe.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <map>
#include <string>

namespace {

int dim = 128, tokens = kvq::default_page_tokens, width = 16;
kvq::float_type window = kvq::float_type::fp16;

template <class Scheme>
void print(const char* name, kvq::tensor role) {
    const auto d = kvq::kernels::described(kvq::codec_of<Scheme>(), kvq::kernels::transform_of<Scheme>,
                                           {role, tokens, dim}, window, width);
    std::printf("%s, %s: %s\n", name, role == kvq::tensor::key ? "keys" : "values",
                codec_text(kvq::codec_of<Scheme>()).c_str());
    std::printf("    quantize    %s\n    dequantize  %s\n    attend      %s\n    transform   %s\n",
                d.quantize_by, d.dequantize_by, d.attend_by, d.transform_by);
}
template <class Keys, class Values = Keys>
void print_pair(const char* name) {
    print<Keys>(name, kvq::tensor::key);
    print<Values>(name, kvq::tensor::value);
}

}  // namespace

int main(int argc, char** argv) {
    const std::map<std::string, kvq::float_type> types{
        {"fp16", kvq::float_type::fp16}, {"bf16", kvq::float_type::bf16}, {"fp32", kvq::float_type::fp32}};
    CLI::App app("the registry of kernels");
    app.add_option("--dim", dim, "channels of a head");
    app.add_option("--tokens", tokens, "tokens of a page");
    app.add_option("--width", width, "numbers of a vector")->check(CLI::IsMember({4, 8, 16}));
    app.add_option("--window", window, "type of the window")->transform(CLI::CheckedTransformer(types));
    CLI11_PARSE(app, argc, argv);

    print_pair<kvq::full<kvq::float16>>("fp16");
    print_pair<kvq::full<float>>("fp32");
    print_pair<kvq::int8>("int8");
    print_pair<kvq::affine<4, kvq::per_token<64>>>("affine-4-g64");
    print_pair<kvq::kivi<3, 64>::keys, kvq::kivi<3, 64>::values>("kivi-3-g64");
    kvq::for_each_preset([]<class Preset>(Preset) {
        print_pair<typename Preset::keys, typename Preset::values>(Preset::name);
    });
}
