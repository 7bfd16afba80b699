#include "mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>

namespace llama {

mapped_file::mapped_file(const std::string& role, const std::string& path) : path_(path) {
    const auto refuse = [&](const char* reason) {
        throw std::runtime_error(role + " \"" + path + "\" " + reason);
    };
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        refuse("cannot be opened");
    }
    struct stat status {};
    const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    const auto size = regular ? static_cast<std::size_t>(status.st_size) : 0;
    void* const start = size > 0 ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    ::close(file);
    if (!regular) {
        refuse("cannot be opened");
    }
    if (size == 0) {
        refuse("is empty");
    }
    if (start == MAP_FAILED) {
        refuse("cannot be mapped into memory");
    }
    bytes_ = {static_cast<const std::byte*>(start), size};
}

mapped_file::~mapped_file() { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

}  // namespace llama
