// Definitions of file.hpp.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "../core/error.hpp"
#include "file.hpp"

namespace kvq { inline namespace KVQ_COMMON {

namespace detail {

/// Raises kvq::error with the C library's reason, unless `done`.
template <class... Parts>
void expect_io(bool done, const Parts&... parts) {
    if (!done) expect(false, parts..., ": ", std::string(std::strerror(errno)));
}

class open_file {
public:
    open_file(const std::string& path, const char* mode) : file_(std::fopen(path.c_str(), mode)) {
        expect_io(file_ != nullptr, "cannot open ", path);
    }
    ~open_file() {
        if (file_) std::fclose(file_);
    }
    open_file(const open_file&) = delete;
    open_file& operator=(const open_file&) = delete;

    std::size_t read(void* to, std::size_t bytes) { return std::fread(to, 1, bytes, file_); }
    bool write(const void* from, std::size_t bytes) { return std::fwrite(from, 1, bytes, file_) == bytes; }
    bool failed() const { return std::ferror(file_) != 0; }
    bool close() { return std::fclose(std::exchange(file_, nullptr)) == 0; }

private:
    std::FILE* file_;
};

/// Removes the unfinished file when saving fails.
struct unfinished_file {
    std::string path;
    bool finished;
    ~unfinished_file() {
        if (!finished) std::remove(path.c_str());
    }
};

}  // namespace detail

KVQ_FUNC void save(const sequence& s, const std::string& path, const save_options& options) {
    const std::string unfinished = path + ".tmp";
    detail::unfinished_file guard{unfinished, true};
    detail::open_file file(unfinished, "wb");
    guard.finished = false;
    const auto check = [&](bool done) { detail::expect_io(done, "cannot write ", unfinished); };
    save(
        s, [&](const void* data, std::size_t bytes) { check(file.write(data, bytes)); }, options);
    check(file.close());
    std::error_code failed;
    // std::rename does not replace a file on Windows.
    std::filesystem::rename(unfinished, path, failed);
    detail::expect(!failed, "cannot rename ", unfinished, " to ", path, ": ", failed.message());
    guard.finished = true;
}

KVQ_FUNC sequence restore(cache& of, const std::string& path, const restore_options& options) {
    detail::open_file file(path, "rb");
    const auto read = [&](void* to, std::size_t bytes) {
        const std::size_t got = file.read(to, bytes);
        detail::expect_io(!file.failed(), "cannot read ", path);
        return got;
    };
    sequence s = restore(of, read, options);
    char more = 0;
    detail::expect(file.read(&more, 1) == 0, path, " has data after the saved sequence");
    return s;
}

}}  // namespace kvq
