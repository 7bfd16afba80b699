// Statuses and messages of the C interface, and the memory of handles.
#include <kvq/kvq_cuda.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <kvq/version.hpp>
#include <stdexcept>

#include "handle.hpp"

namespace kvq::c {

namespace {

thread_local char last_message[short_text::room + 1] = "";

kvq_status keep(kvq_status status, const char* message) noexcept {
    std::strncpy(last_message, message, short_text::room);
    last_message[short_text::room] = 0;
    return status;
}

}  // namespace

kvq_status report(kvq_status of_errors) noexcept {
    try {
        throw;
    } catch (const failure& e) {
        return keep(e.status, e.message.c_str());
    } catch (const out_of_memory& e) {
        return keep(KVQ_ERROR_MEMORY, e.what());
    } catch (const error& e) {
        return keep(of_errors, e.what());
    } catch (const std::bad_alloc&) {
        return keep(KVQ_ERROR_MEMORY, "kvq: out of memory");
    } catch (const std::length_error&) {
        return keep(KVQ_ERROR_MEMORY, "kvq: a table would be longer than memory");
    } catch (const std::exception& e) {
        return keep(KVQ_ERROR_INTERNAL, e.what());
    } catch (...) {
        return keep(KVQ_ERROR_INTERNAL, "kvq: an exception of an unknown type");
    }
}

void* handle_memory::take() {
    {
        const std::lock_guard lock(mutex_);
        if (count_ > resting) {
            freed* const memory = first_;
            first_ = memory->next;
            --count_;
            return memory;
        }
    }
    return ::operator new(std::max(bytes_, sizeof(freed)));
}

void handle_memory::put(void* memory) noexcept {
    auto* const last = ::new (memory) freed{freed_word, nullptr};
    const std::lock_guard lock(mutex_);
    (count_ == 0 ? first_ : last_->next) = last;
    last_ = last;
    ++count_;
}

}  // namespace kvq::c

#define KVQ_TEXT_OF(x) #x
#define KVQ_TEXT(x) KVQ_TEXT_OF(x)

extern "C" {

const char* kvq_last_error(void) { return kvq::c::last_message; }

const char* kvq_status_name(kvq_status status) {
    static const char* const names[] = {"KVQ_OK",
                                        "KVQ_ERROR_ARGUMENT",
                                        "KVQ_ERROR_HANDLE",
                                        "KVQ_ERROR_STRUCT",
                                        "KVQ_ERROR_MEMORY",
                                        "KVQ_ERROR_DATA",
                                        "KVQ_ERROR_CALLBACK",
                                        "KVQ_ERROR_UNSUPPORTED",
                                        "KVQ_ERROR_INTERNAL",
                                        "KVQ_ERROR_CUDA"};
    return status >= 0 && status <= KVQ_ERROR_CUDA ? names[status] : "unknown status";
}

const char* kvq_version(void) {
    return KVQ_TEXT(KVQ_VERSION_MAJOR) "." KVQ_TEXT(KVQ_VERSION_MINOR) "." KVQ_TEXT(KVQ_VERSION_PATCH);
}

int32_t kvq_abi_version(void) { return KVQ_ABI_VERSION; }
}
