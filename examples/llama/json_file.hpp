// JSON files of Hugging Face's folders: values by name, with errors that say which file and which value.
#pragma once

#include "read_file.hpp"

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

namespace llama {

// An object in a JSON file. Copies share the file, which lives as long as one of them.
class json_object {
public:
    explicit json_object(const std::string& path)
        : path_(path),
          file_(std::make_shared<const nlohmann::json>(
              nlohmann::json::parse(read_file("file", path), nullptr, false))),
          value_(file_.get()) {
        if (!value_->is_object()) {
            refuse("it is not a JSON object");
        }
    }

    const nlohmann::json& value() const { return *value_; }

    // A missing value and null are the same.
    bool has(const char* name) const {
        const auto found = value_->find(name);
        return found != value_->end() && !found->is_null();
    }
    const nlohmann::json& get(const char* name) const {
        if (!has(name)) {
            refuse(std::string("it lacks \"") + name + '"');
        }
        return *value_->find(name);
    }
    json_object object(const char* name) const {
        if (!get(name).is_object()) {
            refuse(std::string("\"") + name + "\" is not an object");
        }
        return with(get(name));
    }
    // Another object, which is a part of this one.
    json_object with(const nlohmann::json& part) const {
        json_object other = *this;
        other.value_ = &part;
        return other;
    }

    int whole(const char* name, int least, int most, std::optional<int> otherwise = {}) const {
        if (otherwise && !has(name)) {
            return *otherwise;
        }
        const nlohmann::json& found = get(name);
        const double value = found.is_number() ? found.get<double>() : -1e300;
        if (!found.is_number_integer() || value < least || value > most) {
            refuse(std::string("\"") + name + "\" is " + short_text(found) + ", expected an integer from " +
                   std::to_string(least) + " to " + std::to_string(most));
        }
        return static_cast<int>(value);
    }
    double number(const char* name, std::optional<double> otherwise = {}) const {
        if (otherwise && !has(name)) {
            return *otherwise;
        }
        if (!get(name).is_number()) {
            refuse(std::string("\"") + name + "\" is " + short_text(get(name)) + ", expected a number");
        }
        return get(name).get<double>();
    }
    bool flag(const char* name, bool otherwise) const {
        if (!has(name)) {
            return otherwise;
        }
        if (!get(name).is_boolean()) {
            refuse(std::string("\"") + name + "\" is " + short_text(get(name)) + ", expected true or false");
        }
        return get(name).get<bool>();
    }
    std::string text(const char* name, std::optional<std::string> otherwise = {}) const {
        if (otherwise && !has(name)) {
            return *otherwise;
        }
        if (!get(name).is_string()) {
            refuse(std::string("\"") + name + "\" is " + short_text(get(name)) + ", expected a text");
        }
        return get(name).get<std::string>();
    }

    [[noreturn]] void refuse(const std::string& reason) const {
        throw std::runtime_error("\"" + path_ + "\": " + reason);
    }

    static std::string short_text(const nlohmann::json& value) {
        std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
        return text.size() > 60 ? text.substr(0, 60) + "..." : text;
    }

private:
    std::string path_;
    std::shared_ptr<const nlohmann::json> file_;
    const nlohmann::json* value_;
};

}  // namespace llama
