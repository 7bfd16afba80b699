// Converts a saved sequence, or raw pages of another system, to other formats and pages, and prints the error
// that this adds.
//
//   kvq_convert [options] IN OUT           saved sequences (kvq::save)
//     --from JSON                            IN is raw pages, as the file JSON describes them (raw_pages.hpp)
//     --to JSON                              OUT is raw pages
//     --format NAME, --keys, --values NAME   any name of find_format; else the formats stay
//     --page-tokens N --sinks N --recent N   of the sequence; else they stay, and are 128, 0, 0 of raw pages
//     --model TEXT                           what the saved sequence must say; of raw pages what OUT says
//   kvq_convert --errors                     what formats lose on normal values
//
// Pages are converted as attention reads them: 16-bit copies that a saved sequence keeps for its rollback are
// left out. Errors are squared, as a part of the squares of the values. Exit status: 0; 1 after a refusal, of
// which it prints one sentence and writes nothing; 2 for a wrong command line.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <kvq/format/find_format.hpp>
#include <kvq/format/format_names.hpp>
#include <kvq/io/file.hpp>
#include <kvq/io/safetensors.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/rotated_records.hpp>
#include <map>
#include <random>
#include <sstream>

#include "raw_pages.hpp"

namespace convert { namespace {

constexpr kvq::tensor roles[] = {kvq::tensor::key, kvq::tensor::value};

struct options {
    std::string in, out, from, to, keys, values, model;
    int page_tokens = -1, sinks = -1, recent = -1;
    bool errors = false;
};

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    if (!file || !all) refuse(path, " cannot be read");
    return all.str();
}
void write_file(const std::string& path, const std::vector<std::byte>& data) {
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
    file.close();
    if (!file) refuse(path, " cannot be written");
}
raw_pages description(const std::string& path) {
    const auto json = nlohmann::json::parse(read_file(path), nullptr, false);
    if (json.is_discarded()) refuse(path, " is no JSON");
    return raw_pages::from(json);
}

// ---- sequences -------------------------------------------------------------------------------------------

struct held_sequence {
    std::unique_ptr<kvq::cache> cache;
    std::optional<kvq::sequence> sequence;
};

kvq::save_options of_model(const std::string& model) { return {.model = model, .copies = false}; }
std::string saved(const kvq::sequence& s, const std::string& model) {
    std::string bytes;
    kvq::save(
        s, [&](const void* data, std::size_t n) { bytes.append(static_cast<const char*>(data), n); },
        of_model(model));
    return bytes;
}
auto reader(const std::string& bytes, std::size_t& at) {
    return [&](void* to, std::size_t n) {
        n = std::min(n, bytes.size() - at);
        std::memcpy(to, bytes.data() + at, n);
        at += n;
        return n;
    };
}

/// The built-in format of a scheme's name.
kvq::format format_of_scheme(const std::string& scheme, kvq::tensor role) {
    const std::string all = kvq::scheme_text(scheme, role);  // "std4 (channel4-g64-coded)"
    try {
        const kvq::format f = kvq::find_format(all.substr(0, all.find_first_of(" ,")), role);
        if (f.name() == scheme) return f;
    } catch (const kvq::error&) {
    }
    refuse("the saved sequence has pages of ", all, ", of which this program knows no built-in format");
}

/// What a saved sequence says of itself (docs/reference/files.md).
struct saved_header {
    std::vector<kvq::layer> layers;
    kvq::cache_options options;
    std::string model;

    explicit saved_header(const std::string& bytes) {
        std::size_t at = 0;
        const kvq::safetensors_header header = kvq::read_safetensors_header(reader(bytes, at));
        const auto said = [&](const std::string& name) {
            const auto found = header.metadata.find(name);
            if (found == header.metadata.end())
                refuse("the file is no saved sequence: it does not say its ", name);
            return found->second;
        };
        const auto number = [&](const std::string& name) {
            const std::string text = said(name);
            int n = 0;
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
            if (error != std::errc() || end != text.data() + text.size() || n < 0)
                refuse("the saved sequence has ", name, " ", text);
            return n;
        };
        if (said("format") != "kvq sequence") refuse("the file is no saved sequence, but ", said("format"));
        const int count = number("layers");
        if (header.metadata.count("kv_heads") > 0) {
            const kvq::layer one{number("kv_heads"), number("head_dim"), number("value_dim")};
            if (count > 1 << 16) refuse("the saved sequence has ", count, " layers");
            layers.assign(static_cast<std::size_t>(count), one);
        } else {
            read_shapes(header, bytes, at);
        }
        options.sinks = number("sinks");
        options.recent = number("recent");
        options.page_tokens = number("page_tokens");
        options.rollback = number("rollback");
        model = said("model");
        options.window = kvq::find_format(said("window"), kvq::tensor::key);
        for (const auto role : roles)
            for (int i = 1;; ++i) {
                const std::string name =
                    (role == kvq::tensor::key ? "key_scheme." : "value_scheme.") + std::to_string(i);
                if (header.metadata.count(name) == 0) break;
                (role == kvq::tensor::key ? options.keys : options.values)
                    .push_back(format_of_scheme(said(name), role));
            }
    }

private:
    void read_shapes(const kvq::safetensors_header& header, const std::string& bytes, std::size_t data) {
        constexpr std::size_t columns = 6;
        for (const kvq::safetensors_tensor& t : header.tensors) {
            if (t.name != "shapes") continue;
            if (t.dtype != "I32" || t.shape.size() != 2 || t.shape[1] != columns ||
                t.end > bytes.size() - data)
                refuse("the saved sequence has impossible shapes");
            for (std::size_t i = 0; i < t.shape[0]; ++i) {
                std::int32_t row[columns];
                std::memcpy(row, bytes.data() + data + t.begin + i * sizeof(row), sizeof(row));
                kvq::layer l{row[1], row[2], row[3]};
                l.kind = static_cast<kvq::layer_kind>(row[0]);
                if (l.kind == kvq::layer_kind::state)
                    refuse("layer ", i,
                           " of the saved sequence is a recurrent state, which has no format to change");
                (l.kind == kvq::layer_kind::shared   ? l.owner
                 : l.kind == kvq::layer_kind::latent ? l.rotary_channels
                                                     : l.window) = row[4];
                l.sinks = row[5];
                layers.push_back(l);
            }
            return;
        }
        refuse("the saved sequence does not say its shapes");
    }
};

held_sequence restored(const std::string& bytes, const std::vector<kvq::layer>& layers,
                       const kvq::cache_options& o, const kvq::restore_options& how) {
    held_sequence h;
    h.cache = std::make_unique<kvq::cache>(layers, o);
    std::size_t at = 0;
    h.sequence.emplace(kvq::restore(*h.cache, reader(bytes, at), how));
    if (at != bytes.size()) refuse("the saved sequence ends after ", at, " of ", bytes.size(), " bytes");
    return h;
}

/// Raw pages as a sequence in fp32.
held_sequence read_raw(const raw_pages& pages, const std::string& bytes) {
    pages.check_size(bytes.size());
    const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
    held_sequence h;
    const kvq::format fp32 = kvq::find_format("fp32", kvq::tensor::key);
    h.cache = std::make_unique<kvq::cache>(
        std::vector<kvq::layer>(static_cast<std::size_t>(pages.layers), pages.layer()),
        kvq::cache_options{.keys = fp32, .window = fp32});
    h.sequence.emplace(h.cache->new_sequence());
    std::uint32_t not_finite = 0;
    for (int layer = 0; layer < pages.layers; ++layer) {
        std::vector<float> x[2];
        for (const auto role : roles) {
            if (!pages.has(role)) continue;
            auto& to = x[static_cast<std::size_t>(role)];
            const auto n = static_cast<std::size_t>(pages.dim(role));
            pages.each_row(layer, role, [&](const row_place& at) {
                to.resize(to.size() + n);
                not_finite += pages.read(at, data, to.data() + to.size() - n);
            });
        }
        const kvq::input_view k(x[0].data(), pages.tokens, pages.kv_heads, pages.head_dim);
        h.sequence->append(layer, k,
                           pages.latent
                               ? kvq::input_view(kvq::no_rows())
                               : kvq::input_view(x[1].data(), pages.tokens, pages.kv_heads, pages.value_dim));
    }
    if (not_finite > 0) refuse("the pages have ", not_finite, " values that are NaN or infinite");
    return h;
}

std::vector<float> values_of(const held_sequence& h, int layer, kvq::tensor role, int first) {
    const kvq::layer& l = h.cache->layers()[static_cast<std::size_t>(layer)];
    const int dim = role == kvq::tensor::key || l.value_dim == 0 ? l.head_dim : l.value_dim,
              n = h.sequence->tokens(layer) - first;
    std::vector<float> x(static_cast<std::size_t>(n) * static_cast<std::size_t>(l.kv_heads * dim));
    h.sequence->dequantize(layer, role, first, kvq::output_view(x.data(), n, l.kv_heads, dim));
    return x;
}

struct error_sum {
    double error = 0, power = 0;

    void add(float x, float y) {
        const double d = static_cast<double>(x) - static_cast<double>(y);
        error += d * d;
        power += static_cast<double>(x) * static_cast<double>(x);
    }
    double relative() const { return power > 0 ? error / power : 0; }
};

bool holds(const kvq::layer& l, kvq::tensor role) {
    const bool keys_alone = l.kind == kvq::layer_kind::latent || l.kind == kvq::layer_kind::index;
    return l.kind != kvq::layer_kind::shared && (role == kvq::tensor::key || !keys_alone);
}
/// Tokens before it may have been freed.
int first_held(const held_sequence& h, int layer) {
    const kvq::layer& l = h.cache->layers()[static_cast<std::size_t>(layer)];
    const int n = h.sequence->tokens(layer);
    return l.window == 0 || l.kind == kvq::layer_kind::shared ? 0
           : l.kind == kvq::layer_kind::chunked               ? n / l.window * l.window
                                                              : std::max(0, n - l.window);
}

std::string names(const kvq::format_list& list) { return kvq::format_text(list[0]); }

int convert_files(const options& o) {
    const std::string bytes = read_file(o.in);
    held_sequence source;
    std::string in = bytes;
    if (!o.from.empty()) {
        source = read_raw(description(o.from), bytes);
        in = saved(*source.sequence, o.model);
    }
    saved_header header(in);
    if (o.from.empty()) {
        source = restored(in, header.layers, header.options, {o.model});
        in = saved(*source.sequence, header.model);
    }
    std::printf("%s: %d tokens, %zu layers, keys %s, values %s, pages of %d\n", o.in.c_str(),
                source.sequence->tokens(), header.layers.size(),
                o.from.empty() ? names(header.options.keys).c_str() : "raw",
                o.from.empty() ? names(header.options.values).c_str() : "raw", header.options.page_tokens);

    kvq::cache_options target = header.options;
    if (o.page_tokens >= 0) target.page_tokens = o.page_tokens;
    if (o.sinks >= 0) target.sinks = o.sinks;
    if (o.recent >= 0) target.recent = o.recent;
    if (!o.from.empty() && (!o.keys.empty() || !o.values.empty())) target.window = {};
    const auto put_first = [](kvq::format_list& list, const std::string& name, kvq::tensor role) {
        if (name.empty()) return;
        std::vector<kvq::format> all{kvq::find_format(name, role)};
        for (const kvq::format& f : list)
            if (!f.same_as(all[0])) all.push_back(f);
        list = kvq::format_list(all);
    };
    put_first(target.keys, o.keys, kvq::tensor::key);
    put_first(target.values, o.values, kvq::tensor::value);
    held_sequence result = restored(in, header.layers, target, {.convert = true});

    const bool raw = !o.to.empty();
    std::optional<raw_pages> pages;
    std::vector<std::byte> out;
    if (raw) {
        pages.emplace(description(o.to));
        const kvq::layer l = pages->layer();
        const auto text_of = [](const kvq::layer& of) {
            const int value_dim = of.value_dim == 0 ? of.head_dim : of.value_dim;
            return (of.kind == kvq::layer_kind::latent ? "latents of " : "keys and values of ") +
                   std::to_string(of.kv_heads) + " x " + std::to_string(of.head_dim) + " and " +
                   std::to_string(value_dim) + " channels";
        };
        for (std::size_t i = 0; i < header.layers.size(); ++i) {
            const kvq::layer& x = header.layers[i];
            if (x.kind != l.kind || text_of(x) != text_of(l) ||
                pages->layers != static_cast<int>(header.layers.size()) ||
                pages->tokens != result.sequence->tokens())
                refuse(o.to, " describes ", pages->tokens, " tokens of ", pages->layers, " layers, ",
                       text_of(l), ", but there are ", result.sequence->tokens(), " of ",
                       header.layers.size(), ", layer ", i, " of kind ", static_cast<int>(x.kind), " with ",
                       text_of(x));
        }
        out.resize(pages->bytes());
    }

    error_sum sums[2];
    for (int layer = 0; layer < static_cast<int>(header.layers.size()); ++layer)
        for (const auto role : roles) {
            if (!holds(header.layers[static_cast<std::size_t>(layer)], role)) continue;
            const int first = first_held(source, layer);
            const std::vector<float> x = values_of(source, layer, role, first);
            std::vector<float> y = values_of(result, layer, role, first);
            if (raw) {
                std::size_t at = 0;
                pages->each_row(layer, role, [&](const row_place& place) {
                    pages->write(place, y.data() + at, out.data());
                    at += static_cast<std::size_t>(pages->dim(role));
                });
            }
            for (std::size_t i = 0; i < x.size(); ++i) sums[static_cast<std::size_t>(role)].add(x[i], y[i]);
        }

    if (raw) {
        write_file(o.out, out);
        std::printf("%s: raw %s, %zu bytes\n", o.out.c_str(), pages->format.c_str(), out.size());
    } else {
        // Without the formats of the source, of which no page is left.
        const auto only = [](kvq::format_list& list) { list = kvq::format_list(list[0]); };
        const std::string all = saved(*result.sequence, header.model);
        only(target.keys);
        only(target.values);
        const held_sequence alone = restored(all, header.layers, target, {});
        kvq::save(*alone.sequence, o.out, of_model(header.model));
        std::printf("%s: keys %s, values %s, pages of %d, %zu bytes\n", o.out.c_str(),
                    names(target.keys).c_str(), names(target.values).c_str(), target.page_tokens,
                    kvq::saved_bytes(*alone.sequence, of_model(header.model)));
    }
    std::printf("error added: keys %.2e, values %.2e of the squares\n", sums[0].relative(),
                sums[1].relative());
    return 0;
}

// ---- what formats lose -----------------------------------------------------------------------------------

/// Records of models have theirs.
int head_dim_of(const std::string& name) {
    for (const kvq::record_layout& l : kvq::record_layouts)
        if (name == l.name && l.head_dim > 0) return l.head_dim;
    return 128;
}

double error_of(const std::string& name, kvq::tensor role, double* bits) {
    const kvq::format f = kvq::find_format(name, role);
    const kvq::block_shape shape{role, kvq::default_page_tokens, head_dim_of(name)};
    *bits = f.bits(shape);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(shape.values()), given, y(shape.values()), scratch(shape.values());
    std::vector<std::byte> memory(f.block_bytes(shape));
    const std::size_t lower = f.lower_bytes(shape);
    kvq::block_id id;
    std::byte* const block =
        f.block_at(shape, memory.data(), lower > 0 ? memory.data() + memory.size() - lower : nullptr, 0, id);
    error_sum sum;
    for (int page = 0; page < 32; ++page) {
        for (float& v : x) v = normal(random);
        given = x;
        const kvq::format_functions& run = f.functions();
        run.quantize_values(f.scheme(), shape, id, given.data(), block);
        run.dequantize(f.scheme(), shape, id, block, kvq::float_type::fp32, y.data(), shape.dim,
                       scratch.data());
        for (std::size_t i = 0; i < x.size(); ++i) sum.add(x[i], y[i]);
    }
    return sum.relative();
}

int print_errors() {
    std::printf(
        "squared error on N(0,1) as a part of the squares, pages of %d tokens, heads of 128 channels, "
        "records of "
        "their own\n\n"
        "| format | bits | keys | values |\n|---|---:|---:|---:|\n",
        kvq::default_page_tokens);
    std::vector<std::string> all{"int8", "e4m3",   "ref8",    "hi6",     "hi6-h",  "std5",   "std5-h",
                                 "std4", "std4-h", "nested8", "nested4", "low3-h", "low2-h", "kivi-4-g64"};
    for (const kvq::row_layout& l : kvq::row_layouts) all.emplace_back(l.name);
    for (const kvq::record_layout& l : kvq::record_layouts) all.emplace_back(l.name);
    all.emplace_back(kvq::int4_token_head.name);
    struct line {
        std::string name;
        double bits, keys, values;
    };
    std::vector<line> lines;
    for (const std::string& name : all) {
        double bits[2];
        const double keys = error_of(name, kvq::tensor::key, bits),
                     values = error_of(name, kvq::tensor::value, bits + 1);
        lines.push_back({name, (bits[0] + bits[1]) / 2, keys, values});
    }
    std::stable_sort(lines.begin(), lines.end(),
                     [](const line& a, const line& b) { return a.bits > b.bits; });
    for (const line& l : lines)
        std::printf("| %s | %.2f | %.2e | %.2e |\n", l.name.c_str(), l.bits, l.keys, l.values);
    return 0;
}

int usage() {
    std::fprintf(stderr,
                 "kvq_convert [--from JSON] [--to JSON] [--format NAME] [--keys NAME] [--values NAME]\n"
                 "            [--page-tokens N] [--sinks N] [--recent N] [--model TEXT] IN OUT\n"
                 "kvq_convert --errors\n");
    return 2;
}

int run(int argc, char** argv) {
    options o;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--errors") {
            o.errors = true;
            continue;
        }
        if (!name.starts_with("--")) {
            files.push_back(name);
            continue;
        }
        if (i + 1 == argc) return usage();
        const std::string value = argv[++i];
        std::string* const text = name == "--from"     ? &o.from
                                  : name == "--to"     ? &o.to
                                  : name == "--keys"   ? &o.keys
                                  : name == "--values" ? &o.values
                                  : name == "--model"  ? &o.model
                                                       : nullptr;
        int* const number = name == "--page-tokens" ? &o.page_tokens
                            : name == "--sinks"     ? &o.sinks
                            : name == "--recent"    ? &o.recent
                                                    : nullptr;
        if (text != nullptr) {
            *text = value;
        } else if (name == "--format") {
            o.keys = o.values = value;
        } else if (number == nullptr ||
                   std::from_chars(value.data(), value.data() + value.size(), *number).ptr !=
                       value.data() + value.size() ||
                   *number < 0) {
            return usage();
        }
    }
    if (o.errors) return files.empty() ? print_errors() : usage();
    if (files.size() != 2) return usage();
    o.in = files[0];
    o.out = files[1];
    return convert_files(o);
}

}  // namespace

}  // namespace convert

int main(int argc, char** argv) {
    try {
        return convert::run(argc, argv);
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "kvq_convert: not enough memory\n");
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
    }
    return 1;
}
