// As much of NCCL as kvq uses, between threads of one process (cuda_runtime_api.h). Stands in for NCCL's
// header.
//
// A message is copied when it is sent. Who receives waits for it, but not forever: then the stream is stuck,
// as one is whose kernel waits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"

#define NCCL_CONFIG_INITIALIZER \
    { 1 }

enum ncclResult_t {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
};
enum ncclDataType_t { ncclUint8, ncclFloat32 };
struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t {
    int blocking;
};

/// How long a receiver waits.
inline std::chrono::milliseconds emulated_patience{60000};

struct emulated_ranks {
    std::mutex mutex;
    std::condition_variable changed;
    int joined = 0;
    bool aborted = false;
    std::map<std::pair<int, int>, std::deque<std::vector<char>>> messages;  // from, to
};
struct emulated_communicator {
    std::shared_ptr<emulated_ranks> all;
    int rank, ranks;
};
using ncclComm_t = emulated_communicator*;

inline const char* ncclGetErrorString(ncclResult_t r) {
    return r == ncclRemoteError ? "remote process exited or there was a network error" : "emulated error";
}
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::mutex mutex;
    static int made = 0;
    const std::lock_guard lock(mutex);
    *id = {};
    ++made;
    std::memcpy(id->internal, &made, sizeof made);
    return ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* r) {
    const std::lock_guard lock(c->all->mutex);
    *r = c->all->aborted ? ncclRemoteError : c->all->joined < c->ranks ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int ranks, const ncclUniqueId& id, int rank,
                                           ncclConfig_t*) {
    static std::mutex mutex;
    static std::map<int, std::shared_ptr<emulated_ranks>> worlds;
    int number = 0;
    std::memcpy(&number, id.internal, sizeof number);
    const std::lock_guard lock(mutex);
    auto& world = worlds[number];
    if (world == nullptr) world = std::make_shared<emulated_ranks>();
    *c = new emulated_communicator{world, rank, ranks};
    const std::lock_guard other(world->mutex);
    ++world->joined;
    return world->joined == ranks ? ncclSuccess : ncclInProgress;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t c, int* rank) { return *rank = c->rank, ncclSuccess; }
inline ncclResult_t ncclCommCount(ncclComm_t c, int* ranks) { return *ranks = c->ranks, ncclSuccess; }
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    delete c;
    return ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t c) {
    {
        const std::lock_guard lock(c->all->mutex);
        c->all->aborted = true;
        c->all->changed.notify_all();
    }
    return ncclCommDestroy(c);
}
inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t ncclGroupEnd() { return ncclSuccess; }

template <class F>
ncclResult_t emulated_message(cudaStream_t stream, F&& f) {
    if (stream != nullptr && stream->capture != nullptr)
        stream->capture->push_back(f);
    else if (cudaStreamQuery(stream) == cudaSuccess)
        f();
    return ncclSuccess;
}
inline void emulated_send(ncclComm_t c, int to, const void* from, std::size_t bytes) {
    const auto* const p = static_cast<const char*>(from);
    const std::lock_guard lock(c->all->mutex);
    c->all->messages[{c->rank, to}].emplace_back(p, p + bytes);
    c->all->changed.notify_all();
}
inline void emulated_receive(ncclComm_t c, int from, void* to, std::size_t bytes, cudaStream_t stream) {
    std::unique_lock lock(c->all->mutex);
    auto& queue = c->all->messages[{from, c->rank}];
    if (!c->all->changed.wait_for(lock, emulated_patience, [&] { return !queue.empty(); })) {
        stream->stuck = true;
        return;
    }
    if (queue.front().size() != bytes) std::abort();
    std::memcpy(to, queue.front().data(), bytes);
    queue.pop_front();
}
inline std::size_t emulated_bytes(std::size_t count, ncclDataType_t type) {
    return count * (type == ncclUint8 ? 1 : 4);
}
inline ncclResult_t ncclSend(const void* p, std::size_t n, ncclDataType_t type, int to, ncclComm_t c,
                             cudaStream_t stream) {
    return emulated_message(stream, [=] { emulated_send(c, to, p, emulated_bytes(n, type)); });
}
inline ncclResult_t ncclRecv(void* p, std::size_t n, ncclDataType_t type, int from, ncclComm_t c,
                             cudaStream_t stream) {
    return emulated_message(stream, [=] { emulated_receive(c, from, p, emulated_bytes(n, type), stream); });
}
inline ncclResult_t ncclBroadcast(const void* own, void* to, std::size_t n, ncclDataType_t type, int root,
                                  ncclComm_t c, cudaStream_t stream) {
    const std::size_t bytes = emulated_bytes(n, type);
    return emulated_message(stream, [=] {
        if (c->rank != root) return emulated_receive(c, root, to, bytes, stream);
        for (int r = 0; r < c->ranks; ++r)
            if (r != root) emulated_send(c, r, own, bytes);
        if (to != own) std::memcpy(to, own, bytes);
    });
}
inline ncclResult_t ncclAllGather(const void* own, void* all, std::size_t n, ncclDataType_t type,
                                  ncclComm_t c, cudaStream_t stream) {
    for (int r = 0; r < c->ranks; ++r)
        ncclBroadcast(own, static_cast<char*>(all) + emulated_bytes(n, type) * static_cast<std::size_t>(r), n,
                      type, r, c, stream);
    return ncclSuccess;
}
