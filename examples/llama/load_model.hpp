// Readers of models, one for each kind of file.
#pragma once

#include "weights.hpp"

#include <string>

namespace llama {

// path: a GGUF file (of several, the first), a folder of Hugging Face's files, or a llama2.c checkpoint.
// rope_theta: base of the rotary frequencies, 0: what the file says. Throws std::runtime_error that names the
// file and what is wrong with it or not handled.
model_weights load_model(const std::string& path, double rope_theta = 0.0);

model_weights load_gguf_model(const std::string& path, double rope_theta = 0.0);
// A folder with config.json, and model.safetensors or the files of model.safetensors.index.json.
model_weights load_folder_model(const std::string& path, double rope_theta = 0.0);

}  // namespace llama
