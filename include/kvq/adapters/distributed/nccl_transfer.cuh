// Prefill on one GPU, decode on another: a sequence goes over layer by layer, while the next layer is
// computed.
//
//   cuda::sequence_sender sender;                                 after cache.begin_prompt(): all pages have
//                                                                 their numbers
//   s = sender.open(group, to, cache, id, stream);                waits for the request of the other rank
//   for each layer: s = cache.append(layer, k, v, stream); ...; s = sender.send_layer(layer, stream);
//   s = sender.finish(report);
//
//   cuda::sequence_receiver receiver;                             on the other rank
//   s = receiver.open(group, from, cache, stream, "std4");        "": pages as they are
//   s = receiver.receive(id, report);
//
// Both caches have the same layers, heads, type, sinks and page size. The receiver's recent window may be
// shorter than the sender's: pages behind it are quantized before they are sent; so are pages whose format is
// not the one that the receiver asks for. The bytes are those of requantizing after the transfer. Layers
// travel in messages of at most 144 MiB, several together where they are small; each is checked (sum of words
// times odd numbers, 64 bits: it finds every damaged word). Packing, sending and unpacking overlap.
// Contract: until finish(), neither sequence is changed, and pools of the receiver do not grow (that is an
// error). A message that is damaged, a rank that is gone, a refusal: a status, and the receiving cache has no
// page of the sequence. No call waits longer than the limit of the group. Memory: two messages on each side,
// until the object ends. An object sends or receives one sequence; group and cache outlive it.
#pragma once

#include <cstring>
#include <vector>

#include "nccl_pages.cuh"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

struct sequence_report {
    int tokens = 0;
    std::size_t bytes = 0;        ///< data of the pages that were sent
    std::size_t bytes_as_is = 0;  ///< what the sender's own pages have
    std::size_t saved() const noexcept { return bytes < bytes_as_is ? bytes_as_is - bytes : 0; }
};

/// The sender's side.
class sequence_sender {
public:
    /// Waits for the receiver's request and answers it. The sequence must not be changed before finish().
    status open(nccl_group& group, int to, cache& from, sequence_id id, cudaStream_t stream) {
        if (pipe_.group != nullptr) return detail::bad_value("the sender is open already");
        if (status s = detail::check_peer(group, to); !s) return s;
        if (status s = detail::transfer_access::check(from, id); !s) return s;
        if (status s = pipe_.open(group, to, from.options().memory, stream); !s) return s;
        cache_ = &from;
        const status s = negotiate(id, stream);
        if (!s) pipe_.close();
        return s;
    }
    /// Puts a layer on its way: what is on the stream so far is done before. Layers in order. Does not wait
    /// for the stream.
    status send_layer(int layer, cudaStream_t stream) {
        if (pipe_.group == nullptr) return detail::bad_value("the sender is not open");
        if (layer != layer_)
            return detail::bad_value("layer %d is sent, but layer %d is the next one", layer, layer_);
        if (status s = pipe_.follow(stream); !s) return s;
        for (int i = 0; i < plan_.slices(); ++i)
            if (status s = send_slice(i); !s) return s;
        ++layer_;
        return {};
    }
    /// Waits until everything is sent. The report may be null.
    status finish(sequence_report* report = nullptr) {
        if (pipe_.group == nullptr) return detail::bad_value("the sender is not open");
        if (layer_ != cache_->layer_count())
            return detail::bad_value("a sequence ends after %d of %d layers", layer_, cache_->layer_count());
        const status s = pipe_.group->wait(pipe_.messages, "until the layers of a sequence are sent");
        if (s && report != nullptr) *report = {offer_.tokens, offer_.bytes, offer_.bytes_as_is};
        return s;
    }

private:
    status negotiate(sequence_id id, cudaStream_t stream) {
        detail::transfer_request request;
        if (status s = pipe_.receive_words(request, "for the request for a sequence"); !s) return s;
        const status possible =
            detail::transfer_access::plan_sending(*cache_, id, request, offer_, plan_, memory_, stream);
        if (!possible) std::snprintf(offer_.refusal, sizeof offer_.refusal, "%s", possible.message);
        if (status s = pipe_.send_words(offer_, "until the offer of a sequence is sent"); !s) return s;
        if (!possible) return possible;
        if (status s = pipe_.send_list(plan_.formats, "until the formats of pages are sent"); !s) return s;
        detail::transfer_answer answer;
        if (status s = pipe_.receive_words(answer, "for the answer to an offer"); !s) return s;
        if (answer.refusal[0] != '\0')
            return detail::bad_value("rank %d refuses the sequence: %.140s", pipe_.peer, answer.refusal);
        return pipe_.reserve(plan_.most_bytes(), cache_->options().memory, stream);
    }
    status send_slice(int i) {
        const detail::transfer_plan::message& m = plan_.messages[message_];
        const detail::transfer_plan::slice& of = plan_.slice_at(i);
        const int at = layer_ * plan_.slices() + i;
        if (at == m.first) {
            place_ = pipe_.next();
            if (status s = pipe_.wait_for_buffer(pipe_.pages); !s) return s;
        }
        if (status s =
                detail::transfer_access::pack(*cache_, plan_, of, layer_, i, place_, memory_, pipe_.pages);
            !s)
            return s;
        place_ += of.bytes;
        if (at + 1 < m.end) return {};
        ++message_;
        if (status s = pipe_.pass(pipe_.pages, pipe_.messages); !s) return s;
        if (status s = pipe_.group->send(pipe_.next(), m.bytes, pipe_.peer, pipe_.messages); !s) return s;
        return pipe_.buffer_done(pipe_.messages);
    }

    detail::transfer_pipe pipe_;
    cache* cache_ = nullptr;
    detail::transfer_offer offer_;
    detail::transfer_plan plan_;
    detail::plan_memory memory_;
    std::byte* place_ = nullptr;  // of the next slice in its message
    std::size_t message_ = 0;
    int layer_ = 0;
};

/// The receiver's side. A sequence that is not complete when the receiver ends leaves no page.
class sequence_receiver {
public:
    sequence_receiver() = default;
    sequence_receiver(const sequence_receiver&) = delete;
    sequence_receiver& operator=(const sequence_receiver&) = delete;
    ~sequence_receiver() { drop(); }

    /// Asks for the sequence. format: of its quantized pages, one of this cache's and of the sender's; empty:
    /// as they are.
    status open(nccl_group& group, int from, cache& to, cudaStream_t stream, std::string_view format = {}) {
        if (pipe_.group != nullptr) return detail::bad_value("the receiver is open already");
        if (status s = detail::check_peer(group, from); !s) return s;
        detail::transfer_request request;
        if (status s = detail::transfer_access::make_request(to, format, request); !s) return s;
        if (status s = pipe_.open(group, from, to.options().memory, stream); !s) return s;
        cache_ = &to;
        stream_ = stream;
        const status s = pipe_.send_words(request, "until the request for a sequence is sent");
        if (!s) pipe_.close();
        return s;
    }
    /// Receives the sender's offer and takes pages for it. receive() does so if it was not done before.
    status begin() {
        if (pipe_.group == nullptr || begun_)
            return detail::bad_value("the receiver is not open, or has begun");
        const status s = accept();
        if (!s) drop();
        return s;
    }
    /// Puts the next layer on its way. Does not wait for it.
    status receive_layer() {
        if (!begun_ || layer_ == cache_->layer_count())
            return detail::bad_value("the receiver has not begun, or has all layers");
        for (int i = 0; i < plan_.slices(); ++i)
            if (status s = receive_slice(i); !s) {
                drop();
                return s;
            }
        ++layer_;
        return {};
    }
    /// Receives what is left, waits for it and checks it. made: the sequence.
    status receive(sequence_id& made, sequence_report* report = nullptr) {
        if (!begun_)
            if (status s = begin(); !s) return s;
        while (layer_ < cache_->layer_count())
            if (status s = receive_layer(); !s) return s;
        status s = pipe_.group->wait(pipe_.pages, "for the layers of a sequence");
        if (s) s = check_messages();
        if (s && generation_ != detail::transfer_access::generation(*cache_))
            s = detail::bad_value("pools of the receiving cache have grown while a sequence was received");
        if (s) {
            made = std::exchange(id_, {});
            if (report != nullptr) *report = {offer_.tokens, offer_.bytes, offer_.bytes_as_is};
        } else {
            drop();
        }
        return s;
    }

private:
    status accept() {
        if (status s = pipe_.receive_words(offer_, "for the offer of a sequence"); !s) return s;
        if (offer_.refusal[0] != '\0')
            return detail::bad_value("rank %d cannot send the sequence: %.140s", pipe_.peer, offer_.refusal);
        plan_.formats.resize(static_cast<std::size_t>(offer_.committed) +
                             static_cast<std::size_t>(offer_.cut_pages) * sizeof(detail::wire_cut));
        if (status s = pipe_.receive_list(plan_.formats, "for the formats of pages"); !s) return s;
        detail::transfer_answer answer;
        const status possible =
            detail::transfer_access::plan_receiving(*cache_, offer_, plan_, memory_, id_, stream_);
        if (!possible) std::snprintf(answer.refusal, sizeof answer.refusal, "%s", possible.message);
        if (status s = pipe_.send_words(answer, "until the answer to an offer is sent"); !s) return s;
        if (!possible) return possible;
        generation_ = detail::transfer_access::generation(*cache_);
        headers_.resize(static_cast<std::size_t>(cache_->layer_count() * plan_.slices()));
        if (status s = sums_.allocate(cache_->options().memory, headers_.size() * sizeof(headers_[0]),
                                      "checksums", stream_);
            !s)
            return s;
        if (status s = pipe_.reserve(plan_.most_bytes(), cache_->options().memory, stream_); !s) return s;
        if (status s = pipe_.follow(stream_); !s) return s;
        begun_ = true;
        return {};
    }
    status receive_slice(int i) {
        const detail::transfer_plan::message& m = plan_.messages[message_];
        const detail::transfer_plan::slice& of = plan_.slice_at(i);
        const int at = layer_ * plan_.slices() + i;
        if (at == m.first) {
            place_ = pipe_.next();
            if (status s = pipe_.wait_for_buffer(pipe_.messages); !s) return s;
            if (status s = pipe_.group->receive(place_, m.bytes, pipe_.peer, pipe_.messages); !s) return s;
            if (status s = pipe_.pass(pipe_.messages, pipe_.pages); !s) return s;
        }
        if (status s = detail::transfer_access::unpack(
                *cache_, of, layer_, place_, sums_.as<detail::slice_header>() + at, memory_, pipe_.pages);
            !s)
            return s;
        place_ += of.bytes;
        if (at + 1 < m.end) return {};
        ++message_;
        return pipe_.buffer_done(pipe_.pages);
    }
    /// Are the headers those that were expected, and their checksums those of what came?
    status check_messages() {
        const cudaError_t code = cudaMemcpy(headers_.data(), sums_.as<>(),
                                            headers_.size() * sizeof(headers_[0]), cudaMemcpyDeviceToHost);
        if (code != cudaSuccess) return detail::runtime_error(code, "reading checksums");
        for (std::size_t at = 0; at < headers_.size(); ++at) {
            const auto slices = static_cast<std::size_t>(plan_.slices());
            const int layer = static_cast<int>(at / slices), slice = static_cast<int>(at % slices);
            if (status s =
                    detail::check_header(headers_[at], pipe_.peer, layer, slice, plan_.slice_at(slice).bytes);
                !s)
                return s;
        }
        return {};
    }
    /// Forgets everything; pages of an incomplete sequence are given back.
    void drop() noexcept {
        pipe_.close();
        if (id_ != sequence_id{}) (void)cache_->free(id_);
        id_ = {};
        begun_ = false;
    }

    detail::transfer_pipe pipe_;
    cache* cache_ = nullptr;
    cudaStream_t stream_ = nullptr;
    detail::transfer_offer offer_;
    detail::transfer_plan plan_;
    detail::plan_memory memory_;
    detail::device_memory sums_;
    std::vector<detail::slice_header> headers_;
    sequence_id id_;
    std::uint64_t generation_ = 0;
    std::byte* place_ = nullptr;  // of the next slice in its message
    std::size_t message_ = 0;
    int layer_ = 0;
    bool begun_ = false;
};

}}}  // namespace kvq::cuda
