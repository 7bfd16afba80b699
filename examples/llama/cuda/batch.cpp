#include "batch.hpp"

#include "../stopwatch.hpp"

#include <algorithm>
#include <deque>

namespace llama::device {
namespace {

// A request in the batch, or one that waits with what it has generated so far.
struct job {
    int request;
    sampler pick;
    int sequence = -1;
};

int common_tokens(std::span<const request> requests) {
    if (requests.size() < 2) {
        return 0;
    }
    std::size_t common = requests.front().prompt.size();
    for (const request& r : requests) {
        const auto end = std::mismatch(r.prompt.begin(), r.prompt.end(), requests.front().prompt.begin(),
                                       requests.front().prompt.end());
        // A prompt's last token is read for itself: its logits are the first that count.
        common =
            std::min({common, static_cast<std::size_t>(end.first - r.prompt.begin()), r.prompt.size() - 1});
    }
    return static_cast<int>(common);
}

class batch {
public:
    batch(engine& on, std::span<const request> requests, const batch_settings& settings)
        : on_(on), requests_(requests), settings_(settings) {
        for (const request& r : requests) {
            if (r.prompt.empty()) {
                throw std::invalid_argument("a request without a prompt");
            }
        }
        result_.replies.resize(requests.size());
        for (std::size_t i = 0; i < requests.size(); ++i) {
            if (requests[i].steps > 0) {
                waiting_.push_back({static_cast<int>(i), sampler(requests[i].sampler)});
            }
        }
    }
    ~batch() {
        for (const job& j : running_) {
            on_.free(j.sequence);
        }
        if (prefix_ >= 0) {
            on_.free(prefix_);
        }
    }

    batch_result run() {
        result_.shared_tokens = common_tokens(requests_);
        if (result_.shared_tokens > 0) {
            prefix_ = on_.new_sequence();
            on_.read(
                prefix_,
                std::span(requests_.front().prompt).first(static_cast<std::size_t>(result_.shared_tokens)));
            on_.wait();
            result_.prompt_tokens += result_.shared_tokens;
        }
        result_.prompt_seconds = time_.seconds();
        while (!waiting_.empty() || !running_.empty()) {
            const double before = time_.seconds();
            while (!waiting_.empty() && static_cast<int>(running_.size()) < on_.options().max_batch &&
                   join()) {
            }
            const double between = time_.seconds();
            result_.prompt_seconds += between - before;
            if (!running_.empty()) {
                step();
            }
            result_.decode_seconds += time_.seconds() - between;
        }
        return std::move(result_);
    }

private:
    reply& reply_of(const job& j) { return result_.replies[static_cast<std::size_t>(j.request)]; }

    // The next request reads its prompt; false: the memory has no room for it now.
    bool join() {
        job& next = waiting_.front();
        const request& r = requests_[static_cast<std::size_t>(next.request)];
        std::vector<int> tokens(r.prompt.begin() + result_.shared_tokens, r.prompt.end());
        const std::vector<int>& generated = reply_of(next).tokens;  // before it was evicted
        tokens.insert(tokens.end(), generated.begin(), generated.end());
        int sequence = -1;
        try {
            sequence = prefix_ >= 0 ? on_.fork(prefix_) : on_.new_sequence();
            on_.read(sequence, tokens);
        } catch (const out_of_memory&) {
            if (sequence >= 0) {
                on_.free(sequence);
            }
            if (running_.empty()) {
                throw;
            }
            return false;
        }
        result_.prompt_tokens += static_cast<int>(tokens.size());
        running_.push_back(std::move(next));
        waiting_.pop_front();
        running_.back().sequence = sequence;
        take_tokens(running_.size() - 1);
        return true;
    }

    // Every running request takes its next token.
    void step() {
        std::vector<int> sequences, tokens;
        for (const job& j : running_) {
            sequences.push_back(j.sequence);
            tokens.push_back(reply_of(j).tokens.back());
        }
        try {
            on_.decode(sequences, tokens);
        } catch (const out_of_memory&) {
            if (running_.size() < 2) {
                throw;
            }
            on_.free(running_.back().sequence);
            waiting_.push_front(std::move(running_.back()));
            running_.pop_back();
            ++result_.evictions;
            return;
        }
        ++result_.steps;
        result_.largest_batch = std::max(result_.largest_batch, static_cast<int>(running_.size()));
        take_tokens(0);
    }

    // The last read() or decode() has a row for each of the running requests from `first` on.
    void take_tokens(std::size_t first) {
        const std::size_t rows = running_.size() - first,
                          vocab = static_cast<std::size_t>(on_.config().shape.vocab);
        const bool draws = std::any_of(
            running_.begin() + static_cast<std::ptrdiff_t>(first), running_.end(), [&](const job& j) {
                return requests_[static_cast<std::size_t>(j.request)].sampler.temperature > 0.0;
            });
        choices_.resize(rows);
        if (draws) {
            logits_.resize(rows * vocab);
            on_.logits(logits_);
        } else {
            on_.choices(choices_);
        }
        for (std::size_t i = 0; i < rows; ++i) {
            job& j = running_[first + i];
            const int token = draws ? j.pick(std::span(logits_).subspan(i * vocab, vocab)) : choices_[i];
            reply& to = reply_of(j);
            if (to.tokens.empty()) {
                to.first_seconds = time_.seconds();
            }
            const bool ended = settings_.ends_text(token);
            if (!ended) {
                to.tokens.push_back(token);
                ++result_.generated_tokens;
                settings_.on_token(j.request, token);
            }
            const request& r = requests_[static_cast<std::size_t>(j.request)];
            if (ended || static_cast<int>(to.tokens.size()) >= r.steps) {
                to.bytes = on_.bytes(j.sequence);
                on_.free(j.sequence);
                j.sequence = -1;
            }
        }
        std::erase_if(running_, [](const job& j) { return j.sequence < 0; });
    }

    engine& on_;
    std::span<const request> requests_;
    const batch_settings& settings_;
    stopwatch time_;
    std::deque<job> waiting_;
    std::vector<job> running_;
    int prefix_ = -1;
    std::vector<int> choices_;
    std::vector<float> logits_;
    batch_result result_;
};

}  // namespace

batch_result run_batch(engine& on, std::span<const request> requests, const batch_settings& settings) {
    return batch(on, requests, settings).run();
}

}  // namespace llama::device
