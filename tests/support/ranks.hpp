// SPDX-License-Identifier: MIT
// Ranks as threads of one process, and a transport between them that can damage what it carries.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <kvq/adapters/distributed/message.hpp>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace test {

using wire_bytes = std::vector<std::byte>;

/// Queues of messages between n ranks.
class wire {
public:
    /// Called for every message before it is queued; changes it, or returns how many copies are queued.
    using damage = std::function<int(int from, int to, int number, wire_bytes&)>;

    explicit wire(int ranks, std::chrono::milliseconds limit = std::chrono::seconds(60), damage d = {})
        : ranks_(ranks), limit_(limit), damage_(std::move(d)), queues_(square()), sent_(square()) {}

    class transport {
    public:
        transport(wire& over, int rank) : wire_(over), rank_(rank) {}
        int rank() const { return rank_; }
        int ranks() const { return wire_.ranks_; }
        void send(int to, wire_bytes bytes) { wire_.send(rank_, to, std::move(bytes)); }
        wire_bytes receive(int from) { return wire_.receive(from, rank_); }
        void progress() {}
        void flush() {}

    private:
        wire& wire_;
        int rank_;
    };

private:
    std::size_t square() const { return static_cast<std::size_t>(ranks_) * static_cast<std::size_t>(ranks_); }
    std::size_t at(int from, int to) const { return static_cast<std::size_t>(from * ranks_ + to); }
    void send(int from, int to, wire_bytes bytes) {
        const std::lock_guard lock(mutex_);
        const int copies = damage_ ? damage_(from, to, sent_[at(from, to)]++, bytes) : 1;
        for (int i = 0; i < copies; ++i) queues_[at(from, to)].push_back(bytes);
        arrived_.notify_all();
    }
    wire_bytes receive(int from, int to) {
        std::unique_lock lock(mutex_);
        auto& queue = queues_[at(from, to)];
        kvq::detail::expect(arrived_.wait_for(lock, limit_, [&] { return !queue.empty(); }), "rank ", to,
                            " waited ", limit_.count(), " ms for rank ", from);
        wire_bytes bytes = std::move(queue.front());
        queue.pop_front();
        return bytes;
    }

    int ranks_;
    std::chrono::milliseconds limit_;
    damage damage_;
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::vector<std::deque<wire_bytes>> queues_;
    std::vector<int> sent_;
};

using channel = kvq::message_channel<wire::transport>;

/// Runs f(channel) on every rank, a thread each. Returns the message of the error that each ended with; empty
/// if none.
template <class F>
std::vector<std::string> on_ranks(wire& over, int ranks, F&& f) {
    std::vector<std::string> errors(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            try {
                wire::transport transport(over, r);
                channel c(transport);
                f(c);
            } catch (const std::exception& e) {
                errors[static_cast<std::size_t>(r)] = e.what();
            }
        });
    for (std::thread& t : threads) t.join();
    return errors;
}

}  // namespace test
