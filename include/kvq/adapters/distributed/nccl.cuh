// Ranks over NCCL, one GPU each: threads of one process or processes. Needs nccl.h (2.18 or later) and
// libnccl.
//
//   ncclUniqueId id;                                             made by one rank, brought to the others by
//                                                                any means
//   if (auto s = cuda::nccl_group::make_id(id); !s) ...
//   cuda::nccl_group group;                                      every rank, with its device current
//   s = group.open(id, rank, ranks, std::chrono::seconds(30));   or adopt(comm): a communicator of the engine
//
// nccl_attention.cuh, nccl_prefill.cuh and nccl_transfer.cuh work on a group; one per thread, one stream at a
// time.
// Contract: no call waits longer than the time limit. A rank that is gone, or that is silent for as long as
// the limit, is an error with a sentence; the communicator is then aborted, which ends kernels of NCCL that
// still wait, and every later call refuses. Work that is only put on a stream is watched by wait(): an engine
// calls it where it would call cudaStreamSynchronize.
// Source: NCCL's user guide: communicators that do not block, ncclCommGetAsyncError, ncclCommAbort.
#pragma once

#include <nccl.h>

#include <chrono>
#include <thread>

#include "../../cuda/layout/launch.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

class nccl_group {
public:
    nccl_group() = default;
    nccl_group(const nccl_group&) = delete;
    nccl_group& operator=(const nccl_group&) = delete;
    ~nccl_group() { close(); }

    static status make_id(ncclUniqueId& id) {
        const ncclResult_t r = ncclGetUniqueId(&id);
        return r == ncclSuccess ? status{}
                                : error(cudaErrorUnknown, "making an id: %s", ncclGetErrorString(r));
    }

    /// Joins the group; returns when all ranks have.
    status open(const ncclUniqueId& id, int rank, int ranks,
                std::chrono::milliseconds limit = std::chrono::seconds(30)) {
        if (status s = check_new(limit); !s) return s;
        if (ranks < 1 || rank < 0 || rank >= ranks)
            return detail::bad_value("rank %d is not among %d ranks", rank, ranks);
        limit_ = limit;
        rank_ = rank;
        ranks_ = ranks;
        owned_ = true;
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        const ncclResult_t r = ncclCommInitRankConfig(&comm_, ranks, id, rank, &config);
        return settle("joining the group", r);
    }
    /// A communicator that the engine has made. It stays the engine's, but an error aborts it.
    status adopt(ncclComm_t comm, std::chrono::milliseconds limit = std::chrono::seconds(30)) {
        if (status s = check_new(limit); !s) return s;
        ncclResult_t r = comm == nullptr ? ncclInvalidArgument : ncclCommUserRank(comm, &rank_);
        if (r == ncclSuccess) r = ncclCommCount(comm, &ranks_);
        if (r != ncclSuccess)
            return error(cudaErrorInvalidValue, "a communicator of the engine: %s", ncclGetErrorString(r));
        limit_ = limit;
        comm_ = comm;
        owned_ = false;
        return {};
    }
    /// Leaves the group. The other ranks must not wait for this one any more.
    void close() noexcept {
        if (comm_ != nullptr && owned_ && settle("leaving the group", ncclCommFinalize(comm_)))
            (void)ncclCommDestroy(comm_);
        comm_ = nullptr;
    }

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return ranks_; }
    std::chrono::milliseconds limit() const noexcept { return limit_; }
    /// Null where the group is not open, and after an error.
    ncclComm_t communicator() const noexcept { return comm_; }

    /// Calls f(communicator), which makes calls of NCCL and returns their first error.
    template <class F>
    status call(const char* what, F&& f) {
        if (status s = check_open(); !s) return s;
        return settle(what, f(comm_));
    }
    status send(const void* from, std::size_t bytes, int to, cudaStream_t stream) {
        return call("sending", [&](ncclComm_t c) { return ncclSend(from, bytes, ncclUint8, to, c, stream); });
    }
    status receive(void* to, std::size_t bytes, int from, cudaStream_t stream) {
        return call("receiving",
                    [&](ncclComm_t c) { return ncclRecv(to, bytes, ncclUint8, from, c, stream); });
    }

    /// Waits until the stream has done all of its work. what: a phrase such as "for the partial outputs".
    status wait(cudaStream_t stream, const char* what) {
        if (status s = check_open(); !s) return s;
        cudaError_t code = cudaSuccess;
        ncclResult_t r = ncclSuccess;
        const bool done = poll([&] {
            code = cudaStreamQuery(stream);
            if (code != cudaErrorNotReady) return true;
            const ncclResult_t asked = ncclCommGetAsyncError(comm_, &r);
            if (r == ncclInProgress) r = ncclSuccess;
            if (asked != ncclSuccess) r = asked;
            return r != ncclSuccess;
        });
        if (!done) return late(what);
        if (r != ncclSuccess) return fail("waiting", r);
        return code == cudaSuccess ? status{} : detail::runtime_error(code, "a stream with messages");
    }

private:
    using clock = std::chrono::steady_clock;

    template <class... Values>
    static status error(cudaError_t code, const char* format, Values... values) noexcept {
        status s = detail::bad_value(format, values...);
        s.code = code;
        return s;
    }
    status check_new(std::chrono::milliseconds limit) const {
        if (comm_ != nullptr) return detail::bad_value("the group is open already");
        if (limit.count() < 1)
            return detail::bad_value("the time limit of a group is %lld ms",
                                     static_cast<long long>(limit.count()));
        return {};
    }
    status check_open() const {
        if (comm_ != nullptr) return {};
        return detail::bad_value("the group of rank %d is not open, or has failed before", rank_);
    }
    /// Calls ready() until it is true, or the time limit is over. Returns whether it was.
    template <class Ready>
    bool poll(Ready&& ready) const {
        const auto end = clock::now() + limit_;
        for (int tries = 0; !ready(); ++tries) {
            if (clock::now() >= end) return false;
            if (tries < 2000)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        return true;
    }
    /// A call of a communicator that does not block may still be under way when it returns.
    status settle(const char* what, ncclResult_t r) {
        ncclResult_t asked = ncclSuccess;
        if (r == ncclInProgress && !poll([&] {
                asked = ncclCommGetAsyncError(comm_, &r);
                return asked != ncclSuccess || r != ncclInProgress;
            }))
            return late(what);
        if (asked != ncclSuccess) r = asked;
        return r == ncclSuccess ? status{} : fail(what, r);
    }
    status late(const char* what) {
        const status s = error(cudaErrorTimeout,
                               "rank %d of %d waited %lld ms, which is the time limit: %s; another rank has "
                               "failed or is silent",
                               rank_, ranks_, static_cast<long long>(limit_.count()), what);
        abort();
        return s;
    }
    status fail(const char* what, ncclResult_t r) {
        const status s =
            error(cudaErrorUnknown, "rank %d of %d: %s: %s", rank_, ranks_, what, ncclGetErrorString(r));
        abort();
        return s;
    }
    void abort() noexcept {
        if (comm_ != nullptr) (void)ncclCommAbort(comm_);
        comm_ = nullptr;
    }

    ncclComm_t comm_ = nullptr;
    int rank_ = 0, ranks_ = 1;
    bool owned_ = false;
    std::chrono::milliseconds limit_{30000};
};

}}}  // namespace kvq::cuda
