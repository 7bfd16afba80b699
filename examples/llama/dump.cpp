#include "dump.hpp"

#include "recording_cache.hpp"

#include <kvq/core/float_formats.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace llama {
namespace {

void write_tensor(const std::filesystem::path& folder, std::size_t layer, char name,
                  std::span<const float> values, int heads, int head_dim) {
    const std::size_t row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(head_dim);
    char file_name[80];
    std::snprintf(file_name, sizeof file_name, "L%02zu_%c_f16_T%zu_H%d_D%d.bin", layer, name,
                  values.size() / row, heads, head_dim);
    std::vector<char> bytes;
    for (const float value : values) {
        const std::uint16_t half = kvq::float16(value).bits;
        bytes.push_back(static_cast<char>(half & 0xff));
        bytes.push_back(static_cast<char>(half >> 8));
    }
    std::ofstream file(folder / file_name, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file) {
        throw std::runtime_error("\"" + (folder / file_name).string() + "\" cannot be written");
    }
}

}  // namespace

int dump(const model& llama, std::span<const int> tokens, const std::string& directory,
         const dump_settings& settings) {
    const model_shape& shape = llama.shape();
    const std::size_t step = static_cast<std::size_t>(settings.window - 1);
    int written = 0;
    for (; written < settings.windows && (static_cast<std::size_t>(written) + 1) * step <= tokens.size();
         ++written) {
        // As in evaluate: begin-of-text, then the next tokens of the input.
        std::vector<int> input{llama.begin_of_text()};
        const auto text = tokens.subspan(static_cast<std::size_t>(written) * step, step);
        input.insert(input.end(), text.begin(), text.end());
        recording_cache cache(shape);
        activations space;
        llama.read(input, 0, cache, static_cast<int>(input.size()), space);

        char name[16];
        std::snprintf(name, sizeof name, "w%03d", written);
        const std::filesystem::path folder = std::filesystem::path(directory) / name;
        std::filesystem::create_directories(folder);
        for (const int number : shape.attention_layers()) {
            const auto layer = static_cast<std::size_t>(number);
            const auto& of = cache.layers()[layer];
            const int queries =
                settings.queries > 0 ? std::min(settings.queries, settings.window) : settings.window;
            const auto last =
                std::span<const float>(of.queries)
                    .last(static_cast<std::size_t>(queries) * static_cast<std::size_t>(shape.query_dim()));
            write_tensor(folder, layer, 'q', last, shape.heads, shape.head_dim());
            write_tensor(folder, layer, 'k', of.keys, shape.kv_heads, shape.head_dim());
            write_tensor(folder, layer, 'v', of.values, shape.kv_heads, shape.head_dim());
        }
    }
    return written;
}

}  // namespace llama
