#include "load_model.hpp"

#include "checkpoint.hpp"
#include "gguf.hpp"

#include <filesystem>

namespace llama {

model_weights load_model(const std::string& path, double rope_theta) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
        return load_folder_model(path, rope_theta);
    }
    return is_gguf(path) ? load_gguf_model(path, rope_theta) : load_checkpoint(path, rope_theta);
}

}  // namespace llama
