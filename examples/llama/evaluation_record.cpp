#include "evaluation_record.hpp"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace llama {
namespace {

using json = nlohmann::ordered_json;

// JSON has no numbers that are not finite.
double number_or_nan(const json& x) { return x.is_null() ? std::nan("") : x.get<double>(); }

}  // namespace

void check_conditions(const std::string& path, const json& found, const json& wanted,
                      const std::string& advice) {
    for (const auto& [name, value] : wanted.items()) {
        if (!found.contains(name) || found[name] != value) {
            throw std::runtime_error("\"" + path + "\" was measured with another " + name + ": " +
                                     (found.contains(name) ? found[name].dump() : "none") + ", not " +
                                     value.dump() + "; " + advice);
        }
    }
}

evaluation_record::evaluation_record(std::string path, json conditions)
    : path_(std::move(path)), conditions_(std::move(conditions)) {
    if (path_.empty()) {
        return;
    }
    std::ifstream found(path_);
    bool ends_line = true;
    for (std::string line; std::getline(found, line);) {
        ends_line = !found.eof();
        const json of = json::parse(line, nullptr, false);
        if (of.is_discarded() && line.starts_with("{\"window\"")) {
            continue;  // cut off
        }
        if (!of.is_object() || !of.contains("conditions") || !of.contains("window")) {
            throw std::runtime_error("\"" + path_ +
                                     "\" is no record of an evaluation: --record takes another file");
        }
        check_conditions(path_, of["conditions"], conditions_, "--record takes another file");
        all_[{of.at("window"), of.at("scheme")}] = {
            {of.at("tokens"), number_or_nan(of.at("negative_log_likelihood")),
             number_or_nan(of.at("kl_divergence")), of.at("same_top")},
            of.at("bytes_held"),
            of.at("tokens_held"),
            of.at("seconds"),
            of.at("tokens_read"),
            of.contains("bytes_per_token") ? number_or_nan(of["bytes_per_token"]) : 0.0};
    }
    file_.open(path_, std::ios::app);
    if (!ends_line) {
        file_ << '\n';
    }
    if (!file_.flush()) {
        throw std::runtime_error("cannot write \"" + path_ + "\"");
    }
}

const window_total* evaluation_record::find(std::size_t window, const std::string& scheme) const {
    const auto at = all_.find({window, scheme});
    return at == all_.end() ? nullptr : &at->second;
}

void evaluation_record::add(std::size_t window, const std::string& scheme, const window_total& of) {
    all_[{window, scheme}] = of;
    if (path_.empty()) {
        return;
    }
    const json line{{"window", window},
                    {"scheme", scheme},
                    {"tokens", of.sums.tokens},
                    {"negative_log_likelihood", of.sums.negative_log_likelihood},
                    {"kl_divergence", of.sums.kl_divergence},
                    {"same_top", of.sums.same_top},
                    {"bytes_held", of.bytes_held},
                    {"tokens_held", of.tokens_held},
                    {"seconds", of.seconds},
                    {"tokens_read", of.tokens_read},
                    {"bytes_per_token", of.bytes_per_token},
                    {"conditions", conditions_}};
    file_ << line.dump() + '\n';
    if (!file_.flush()) {
        throw std::runtime_error("cannot write \"" + path_ + "\"");
    }
}

std::string fingerprint_of(std::span<const int> tokens) {
    std::uint64_t hash = 14695981039346656037ULL;
    for (const int token : tokens) {
        hash = (hash ^ static_cast<std::uint64_t>(token)) * 1099511628211ULL;
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

}  // namespace llama
