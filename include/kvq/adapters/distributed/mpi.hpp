// The transport of adapters/distributed/message.hpp over MPI, for processes on CPUs. Needs an MPI library
// (CMake: MPI::MPI_C).
//
//   MPI_Init(...);
//   kvq::mpi_transport transport(MPI_COMM_WORLD, std::chrono::seconds(30));
//   kvq::message_channel channel(transport);
//
// Point to point and nonblocking: MPI_Isend, MPI_Improbe, MPI_Imrecv and loops of MPI_Test with a time limit,
// no collective call. So a rank that is gone costs the others the limit, and then raises kvq::error. The
// limit must be longer than the longest work between two messages. Errors of MPI return (MPI_ERRORS_RETURN is
// set on the communicator). After an error the process ends without MPI_Finalize, which would wait for the
// rank that is gone: MPI_Abort, or std::_Exit after mpirun --enable-recovery. Messages advance while a
// function of the transport runs. Standard: MPI 3.0, sections 3.7 and 3.8.
#pragma once

// The old C++ interface of MPI is not used.
#if !defined(OMPI_SKIP_MPICXX)
#define OMPI_SKIP_MPICXX 1
#endif
#if !defined(MPICH_SKIP_MPICXX)
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include <chrono>
#include <limits>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "../../core/error.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

class mpi_transport {
public:
    /// The communicator is of this transport alone, or at least `tag` is. Only the thread that made it calls
    /// it (MPI_THREAD_FUNNELED).
    explicit mpi_transport(MPI_Comm comm, std::chrono::milliseconds limit = std::chrono::seconds(30),
                           int tag = 0)
        : comm_(comm), limit_(limit), tag_(tag) {
        detail::expect(limit.count() > 0, "the time limit of messages must be above 0, got ", limit.count(),
                       " ms");
        check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        check(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
        check(MPI_Comm_size(comm, &ranks_), "MPI_Comm_size");
    }
    mpi_transport(const mpi_transport&) = delete;
    mpi_transport& operator=(const mpi_transport&) = delete;
    /// Waits for messages on their way, at most for the time limit.
    ~mpi_transport() {
        const auto end = clock::now() + limit_;
        while (!broken_ && !advance() && clock::now() < end) pause();
        if (!pending_.empty()) abandon();
    }

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return ranks_; }

    void send(int to, std::vector<std::byte> bytes) {
        detail::expect(bytes.size() <= static_cast<std::size_t>((std::numeric_limits<int>::max)()),
                       "a message of ", bytes.size(),
                       " bytes is longer than MPI counts: ", (std::numeric_limits<int>::max)());
        advance();
        pending_.push_back({std::move(bytes), MPI_REQUEST_NULL});
        outgoing& m = pending_.back();
        const int done = MPI_Isend(m.bytes.data(), static_cast<int>(m.bytes.size()), MPI_BYTE, to, tag_,
                                   comm_, &m.request);
        if (done != MPI_SUCCESS) pending_.pop_back();
        check(done, "MPI_Isend");
    }

    std::vector<std::byte> receive(int from) {
        MPI_Message matched = MPI_MESSAGE_NULL;
        MPI_Status status{};
        wait("for a message from rank", from, [&] {
            int found = 0;
            check(MPI_Improbe(from, tag_, comm_, &found, &matched, &status), "MPI_Improbe");
            return found != 0;
        });
        int count = 0;
        check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
        detail::expect(count >= 0, "a message from rank ", from, " has no number of bytes");
        pending_.push_back({std::vector<std::byte>(static_cast<std::size_t>(count)), MPI_REQUEST_NULL});
        // MPI writes to this buffer until the request is complete, so that it stays when the time is over.
        const auto m = std::prev(pending_.end());
        check(MPI_Imrecv(m->bytes.data(), count, MPI_BYTE, &matched, &m->request), "MPI_Imrecv");
        wait("for the rest of a message from rank", from, [&] { return test(*m); });
        std::vector<std::byte> bytes = std::move(m->bytes);
        pending_.erase(m);
        return bytes;
    }

    void progress() { advance(); }
    void flush() {
        wait("until messages are sent by rank", rank_, [&] { return advance(); });
    }

private:
    using clock = std::chrono::steady_clock;
    struct outgoing {
        std::vector<std::byte> bytes;
        MPI_Request request;
    };

    static void check(int result, const char* what) {
        if (result == MPI_SUCCESS) return;
        char text[MPI_MAX_ERROR_STRING] = {};
        int length = 0;
        MPI_Error_string(result, text, &length);
        detail::fail(what, " failed: ", std::string(text, static_cast<std::size_t>(length)));
    }
    bool test(outgoing& m) {
        int done = 0;
        if (m.request == MPI_REQUEST_NULL) return true;
        check(MPI_Test(&m.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        return done != 0;
    }
    /// Forgets messages that are sent; true if none is left.
    bool advance() noexcept {
        for (auto m = pending_.begin(); m != pending_.end();) {
            int done = 0;
            if (m->request != MPI_REQUEST_NULL &&
                MPI_Test(&m->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
                broken_ = true;
            m = done ? pending_.erase(m) : std::next(m);
        }
        return pending_.empty();
    }
    static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

    /// Calls ready() until it is true. Polls, then leaves the processor to others.
    template <class Ready>
    void wait(const char* what, int rank, Ready&& ready) {
        const auto start = clock::now();
        for (int tries = 0; !ready(); ++tries) {
            if (tries < 200)
                std::this_thread::yield();
            else
                pause();
            if (clock::now() - start < limit_) continue;
            broken_ = true;
            detail::fail("rank ", rank_, " waited ", limit_.count(), " ms ", what, " ", rank,
                         ", which is the time limit");
        }
    }
    /// MPI may still read or write these buffers: they are never freed.
    void abandon() {
        static auto* const left = new std::list<outgoing>;
        left->splice(left->end(), pending_);
    }

    MPI_Comm comm_;
    std::chrono::milliseconds limit_;
    int tag_, rank_ = 0, ranks_ = 1;
    bool broken_ = false;
    std::list<outgoing> pending_;
};

}}  // namespace kvq
