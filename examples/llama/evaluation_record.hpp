// What was measured of each window with each scheme: in memory, and in a file of one JSON object a line,
// which grows as windows are done and from which an interrupted evaluation goes on. Several programs of the
// same conditions may write one file.
#pragma once

#include "divergence.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <utility>

namespace llama {

// A window with one scheme.
struct window_total {
    divergence_sums sums;
    double bytes_held = 0.0, tokens_held = 0.0, seconds = 0.0, tokens_read = 0.0;
    // Of a quantized token. Statistics may change it, and a record that is complete needs none; 0: not
    // recorded.
    double bytes_per_token = 0.0;
};

class evaluation_record {
public:
    // In memory alone.
    evaluation_record() = default;
    // conditions: everything that results depend on. Throws std::runtime_error where the file has a line of
    // other conditions, names what differs, and leaves the file as it is; lines that were cut off do not
    // count.
    evaluation_record(std::string path, nlohmann::ordered_json conditions);

    // nullptr: not measured.
    const window_total* find(std::size_t window, const std::string& scheme) const;
    void add(std::size_t window, const std::string& scheme, const window_total& of);

private:
    std::string path_;
    nlohmann::ordered_json conditions_;
    std::map<std::pair<std::size_t, std::string>, window_total> all_;
    std::ofstream file_;
};

// Throws std::runtime_error that names what differs between the conditions of `path` and those of this run,
// and how to go on.
void check_conditions(const std::string& path, const nlohmann::ordered_json& found,
                      const nlohmann::ordered_json& wanted, const std::string& advice);

// FNV-1a of some token ids.
std::string fingerprint_of(std::span<const int> tokens);

}  // namespace llama
