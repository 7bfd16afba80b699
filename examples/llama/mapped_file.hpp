// A file in memory without a copy: the system reads a page of it when somebody looks, and may drop it again.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace llama {

class mapped_file {
public:
    // `role`: kind of the file, for the error message. Throws std::runtime_error when the file cannot be
    // opened or is empty.
    mapped_file(const std::string& role, const std::string& path);
    ~mapped_file();
    mapped_file(const mapped_file&) = delete;
    mapped_file& operator=(const mapped_file&) = delete;

    const std::string& path() const { return path_; }
    std::span<const std::byte> bytes() const { return bytes_; }

private:
    std::string path_;
    std::span<const std::byte> bytes_;
};

}  // namespace llama
