// Words that a begin sends to the device: they travel in the parameters of launches, so the host waits for
// nothing.
//
// Contract: put() in any order; neighbouring words are one run. flush() sends what is left and reports the
// first error of all launches.
#pragma once

#include "device_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// Collects words and launches when there are enough.
class word_writer {
public:
    word_writer(const device_functions& functions, int* words, cudaStream_t stream) noexcept
        : write_(functions.write_words), words_(words), stream_(stream) {}

    void put(int index, int value) noexcept {
        const bool continues = begin_ >= 0 && index == runs_.data[begin_] + runs_.data[begin_ + 1];
        if (runs_.count + (continues ? 1 : 3) > word_runs::room) {
            (void)flush();
            put(index, value);
            return;
        }
        if (!continues) {
            begin_ = runs_.count;
            runs_.data[runs_.count++] = index;
            runs_.data[runs_.count++] = 0;
        }
        ++runs_.data[begin_ + 1];
        runs_.data[runs_.count++] = value;
    }
    /// Launches what is left. The first error of all launches.
    status flush() noexcept {
        if (runs_.count > 0 && result_) result_ = write_(runs_, words_, stream_);
        runs_.count = 0;
        begin_ = -1;
        return result_;
    }

private:
    decltype(device_functions::write_words) write_;
    int* words_;
    cudaStream_t stream_;
    word_runs runs_;
    int begin_ = -1;  // of the current run
    status result_;
};

}}}  // namespace kvq::cuda::detail
