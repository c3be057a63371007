#include "http/wire.h"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/status.hpp>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

namespace terrace::http {
namespace {

namespace beast = boost::beast::http;
using boost::beast::error_code;
using BeastView = boost::beast::string_view;

// What a backend may make us remember before the first byte goes to the client.
constexpr size_t kResponseHeadBytesMax = 256 << 10;

std::string_view View(BeastView text) { return {text.data(), text.size()}; }

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Fields that are for the next hop alone (RFC 9110, 7.6.1), and those that belong to the framing.
bool IsHopByHop(std::string_view name) {
  constexpr std::array<std::string_view, 10> kNames = {
      "connection", "keep-alive",          "proxy-connection", "transfer-encoding", "te", "trailer",
      "upgrade",    "proxy-authorization", "expect",           "proxy-authenticate"};
  return std::any_of(kNames.begin(), kNames.end(), [&](std::string_view n) { return EqualsIgnoreCase(n, name); });
}

bool Names(const Headers& headers, std::string_view name) {
  return std::any_of(headers.begin(), headers.end(), [&](const auto& h) { return EqualsIgnoreCase(h.first, name); });
}

void AppendField(std::string_view name, std::string_view value, std::string& out) {
  out.append(name).append(": ").append(value).append("\r\n");
}

void AppendNumber(size_t n, int base, std::string& out) {
  std::array<char, 24> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), n, base).ptr;
  out.append(digits.data(), end);
}

// Only `chunked` alone is understood: what stands before it would have to be undone by us or named to the next hop.
bool TransferEncodingOk(std::string_view value) { return EqualsIgnoreCase(Trimmed(value), "chunked"); }

// What both parsers do: find fields, ignore trailers (Beast reports them as fields), leave the rest to their owner.
template <bool kRequest, class Owner>
class Parser final : public beast::basic_parser<kRequest> {
 public:
  explicit Parser(Owner& owner) : owner_(owner) { this->header_limit(UINT32_MAX); }  // The owner counts.

 private:
  void on_request_impl(beast::verb, BeastView method, BeastView target, int version, error_code&) override {
    if constexpr (kRequest) owner_.OnRequestLine(View(method), View(target), version);
  }
  void on_response_impl(int status, BeastView reason, int, error_code&) override {
    if constexpr (!kRequest) owner_.OnStatusLine(status, View(reason));
  }
  void on_field_impl(beast::field field, BeastView name, BeastView value, error_code& error) override {
    if (this->is_header_done()) return;
    if (field == beast::field::transfer_encoding && !TransferEncodingOk(View(value))) {
      error = beast::error::bad_transfer_encoding;
      return;
    }
    owner_.OnField(View(name), View(value));
  }
  void on_header_impl(error_code& error) override {
    if (!owner_.OnHead()) error = beast::error::bad_value;
  }
  void on_body_init_impl(boost::optional<uint64_t> const& length, error_code&) override {
    owner_.OnBody(length.value_or(0));
  }
  size_t on_body_impl(BeastView bytes, error_code&) override {
    owner_.OnBytes(View(bytes));
    return bytes.size();
  }
  void on_chunk_header_impl(uint64_t, BeastView, error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, BeastView bytes, error_code&) override {
    owner_.OnBytes(View(bytes));
    return bytes.size();
  }
  void on_finish_impl(error_code&) override { owner_.OnEnd(); }

  Owner& owner_;
};

// Feeds a parser one piece of a message: its head, a chunk's line, or body. Not eager, so that the bytes of the head
// can be counted.
class Feeder {
 public:
  void Reset() { at_line_ = false; }

  template <class P>
  size_t Put(P& parser, std::string_view bytes, error_code& error) {
    // Beast asserts that five bytes are there when it looks at a last chunk's line again ("0 CR LF CR LF"), and does
    // not see to it. No line that begins here ends a message in fewer, so they can be waited for.
    if (at_line_ && bytes.size() < kLastChunk.size()) {
      error = beast::error::need_more;
      return 0;
    }
    const size_t used = parser.put(boost::asio::const_buffer(bytes.data(), bytes.size()), error);
    at_line_ = error == beast::error::need_more && parser.is_header_done();
    return used;
  }

 private:
  bool at_line_ = false;  // A chunk's line is there in part.
};

}  // namespace

bool EqualsIgnoreCase(std::string_view a, std::string_view b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) { return Lower(x) == Lower(y); });
}

bool ListContains(std::string_view list, std::string_view token) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (EqualsIgnoreCase(Trimmed(list.substr(0, comma)), token)) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

std::string_view Request::BodyCoding() const {
  const std::string_view coding = Header("content-encoding");
  return EqualsIgnoreCase(coding, "identity") ? std::string_view() : coding;
}

std::string_view Request::Header(std::string_view name) const {
  const auto it =
      std::find_if(headers.begin(), headers.end(), [&](const auto& h) { return EqualsIgnoreCase(h.first, name); });
  return it == headers.end() ? std::string_view() : std::string_view(it->second);
}

// ---------------------------------------------------------------------------------------------------------- requests

struct RequestReader::Impl {
  using RequestParser = Parser<true, Impl>;

  explicit Impl(Limits l) : limits(l) {}

  void OnRequestLine(std::string_view method, std::string_view target, int version) {
    request.method = method;
    http_1_0 = version < 11;
    // The absolute form, as a client writes it that takes us for a proxy: the path is what we want.
    if (const size_t scheme = target.find("://"); !target.starts_with('/') && scheme != std::string_view::npos) {
      const size_t slash = target.find('/', scheme + 3);
      target = slash == std::string_view::npos ? std::string_view("/") : target.substr(slash);
    }
    const size_t mark = target.find('?');
    request.path = target.substr(0, mark);
    if (mark != std::string_view::npos) request.query = target.substr(mark + 1);
  }
  void OnField(std::string_view name, std::string_view value) { request.headers.emplace_back(name, value); }
  bool OnHead() const {
    if (!request.path.starts_with('/') && request.path != "*") return false;
    // Chunking is no part of HTTP/1.0; a server that reads it all the same disagrees with one that does not.
    return !(http_1_0 && parser->chunked());
  }
  void OnBody(uint64_t length) {
    // Room at once for most bodies; a client that only announces gigabytes shall not cost them.
    request.body.reserve(static_cast<size_t>(std::min<uint64_t>(length, 1 << 20)));
  }
  void OnBytes(std::string_view bytes) { request.body += bytes; }
  void OnEnd() {}

  const Limits limits;
  std::optional<RequestParser> parser;
  Feeder feeder;
  Request request;
  size_t head_bytes = 0;
  bool http_1_0 = false;
};

RequestReader::RequestReader(Limits limits) : impl_(std::make_unique<Impl>(limits)) { Reset(); }
RequestReader::~RequestReader() = default;

void RequestReader::Reset() {
  impl_->request = {};
  impl_->head_bytes = 0;
  impl_->http_1_0 = false;
  impl_->parser.emplace(*impl_);
  impl_->feeder.Reset();
  impl_->parser->body_limit(impl_->limits.body_bytes_max);
}

Progress RequestReader::Feed(std::string_view bytes) {
  auto& parser = *impl_->parser;
  size_t used = 0;
  // An empty line before a request is allowed (RFC 9112, 2.2); some clients end a body with one too many.
  while (!parser.got_some() && used < bytes.size() && (bytes[used] == '\r' || bytes[used] == '\n')) ++used;
  while (used < bytes.size() && !parser.is_done()) {
    const bool in_head = !parser.is_header_done();
    error_code error;
    const size_t n = impl_->feeder.Put(parser, bytes.substr(used), error);
    used += n;
    if (error == beast::error::body_limit) return {Wire::kBodyTooLong, used};
    if (error && error != beast::error::need_more) return {Wire::kBad, used};
    if (in_head) {
      impl_->head_bytes += n;
      const size_t waiting = parser.is_header_done() ? 0 : bytes.size() - used;
      if (impl_->head_bytes + waiting > impl_->limits.head_bytes_max) return {Wire::kHeadTooLong, used};
    }
    if (error) break;
  }
  return {parser.is_done() ? Wire::kDone : Wire::kMore, used};
}

bool RequestReader::started() const { return impl_->parser->got_some(); }
bool RequestReader::head_done() const { return impl_->parser->is_header_done(); }
bool RequestReader::keep_alive() const { return !impl_->http_1_0 && impl_->parser->keep_alive(); }
bool RequestReader::http_1_0() const { return impl_->http_1_0; }
bool RequestReader::expects_continue() const {
  return !impl_->http_1_0 && EqualsIgnoreCase(impl_->request.Header("expect"), "100-continue");
}
Request RequestReader::Take() { return std::move(impl_->request); }

// --------------------------------------------------------------------------------------------------------- responses

struct ResponseReader::Impl {
  using ResponseParser = Parser<false, Impl>;

  void OnStatusLine(int code, std::string_view text) {
    status = code;
    reason = text;
  }
  void OnField(std::string_view name, std::string_view value) {
    if (EqualsIgnoreCase(name, "connection")) (connection += connection.empty() ? "" : ",") += value;
    if (IsHopByHop(name) || Names(plan.set, name)) return;
    if (EqualsIgnoreCase(name, "content-length")) {
      // The same length twice, or "5, 5", is no contradiction, but only one may be passed on (RFC 9112, 6.3).
      if (std::exchange(has_length, true)) return;
      value = Trimmed(value.substr(0, value.find(',')));
    }
    if (EqualsIgnoreCase(name, "content-type")) content_type = value;
    if (EqualsIgnoreCase(name, "content-encoding")) encoded = true;
    const size_t begin = fields.size();
    AppendField(name, value, fields);
    lines.push_back({begin, name.size(), fields.size()});
  }
  bool OnHead() {
    if (status < 100 || status == 101) return false;  // No status at all; an upgrade, for which we did not ask.
    if (status / 100 == 1) return true;
    DropFieldsNamedInConnection();
    // need_eof(): the body ends with the connection, which is not the client's connection.
    const bool unknown_length = parser->chunked() || parser->need_eof();
    framing = unknown_length ? (plan.raw_body || plan.body_only ? Framing::kRaw : Framing::kChunked) : Framing::kLength;
    if (plan.to_head) framing = Framing::kLength;
    if (plan.body_only) return true;
    std::string& o = *out;
    o.append("HTTP/1.1 ");
    AppendNumber(static_cast<size_t>(status), 10, o);
    o.append(" ").append(reason).append("\r\n").append(fields);
    for (const auto& [name, value] : plan.set) AppendField(name, value, o);
    if (framing == Framing::kChunked) o += "Transfer-Encoding: chunked\r\n";
    if (plan.close || framing == Framing::kRaw) o += "Connection: close\r\n";
    o += "\r\n";
    return true;
  }
  void OnBody(uint64_t) {}
  void OnBytes(std::string_view bytes) {
    if (bytes.empty()) return;  // An empty chunk would be the last one.
    if (framing == Framing::kChunked) {
      AppendChunk(bytes, *out);
    } else {
      out->append(bytes);
    }
    for (const char c : bytes.substr(bytes.size() - std::min<size_t>(bytes.size(), 4))) {
      newlines = c == '\n' ? newlines + 1 : c == '\r' ? newlines : 0;
      empty = false;
    }
    if (plan.last_event.empty()) return;
    tail.append(bytes.substr(bytes.size() - std::min(bytes.size(), kTailBytes)));
    if (tail.size() > kTailBytes) tail.erase(0, tail.size() - kTailBytes);
  }
  bool EventStream() const {
    const std::string_view type = content_type;
    return !encoded && EqualsIgnoreCase(Trimmed(type.substr(0, type.find(';'))), "text/event-stream");
  }
  void OnEnd() {
    if (framing == Framing::kChunked && status / 100 != 1) *out += kLastChunk;
  }

  void DropFieldsNamedInConnection() {
    if (connection.empty() || EqualsIgnoreCase(connection, "keep-alive") || EqualsIgnoreCase(connection, "close")) {
      return;
    }
    std::string kept;
    for (const Line& line : lines) {
      const std::string_view name(fields.data() + line.begin, line.name_size);
      // The length is part of the framing: nobody can make us lose it.
      if (ListContains(connection, name) && !EqualsIgnoreCase(name, "content-length")) continue;
      kept.append(fields, line.begin, line.end - line.begin);
    }
    fields = std::move(kept);
  }
  void BeginMessage() {
    status = 0;
    fields.clear();
    lines.clear();
    connection.clear();
    content_type.clear();
    encoded = has_length = false;
    framing = Framing::kLength;
    newlines = 0;
    empty = true;
    tail.clear();
    parser.emplace(*this);
    feeder.Reset();
    parser->body_limit(boost::none);
    parser->skip(plan.to_head);
  }

  struct Line {
    size_t begin, name_size, end;
  };
  Plan plan;
  std::optional<ResponseParser> parser;
  Feeder feeder;
  int status = 0;
  std::string reason, fields, connection, content_type;
  std::vector<Line> lines;  // Where each field lies in `fields`.
  bool encoded = false;
  bool has_length = false;
  bool started = false;
  Framing framing = Framing::kLength;
  int newlines = 0;  // At the end of the body so far.
  bool empty = true;
  static constexpr size_t kTailBytes = 32;  // Holds a last event, and blank lines behind it.
  std::string tail;                         // Of the body so far.
  std::string* out = nullptr;               // Set while fed.
};

ResponseReader::ResponseReader() : impl_(std::make_unique<Impl>()) { Reset({}); }
ResponseReader::~ResponseReader() = default;

void ResponseReader::Reset(Plan plan) {
  impl_->plan = std::move(plan);
  impl_->started = false;
  impl_->BeginMessage();
}

Progress ResponseReader::Feed(std::string_view bytes, std::string& out) {
  impl_->out = &out;
  impl_->started |= !bytes.empty();
  size_t used = 0;
  while (used < bytes.size()) {
    auto& parser = *impl_->parser;
    error_code error;
    used += impl_->feeder.Put(parser, bytes.substr(used), error);
    if (impl_->fields.size() > kResponseHeadBytesMax) return {Wire::kBad, used};
    if (error == beast::error::need_more) break;
    if (error) return {Wire::kBad, used};
    if (!parser.is_done()) continue;
    if (impl_->status / 100 != 1) return {Wire::kDone, used};
    impl_->BeginMessage();  // The answer proper is still to come.
  }
  return {Wire::kMore, used};
}

Wire ResponseReader::Eof(std::string& out) {
  impl_->out = &out;
  if (!impl_->parser->got_some()) return Wire::kBad;
  if (!impl_->plan.last_event.empty() && head_done() && impl_->parser->need_eof() && impl_->EventStream()) {
    const std::string_view end(impl_->tail.data(), impl_->tail.find_last_not_of("\r\n") + 1);
    if (!end.ends_with(impl_->plan.last_event)) return Wire::kBad;
  }
  error_code error;
  impl_->parser->put_eof(error);
  return error ? Wire::kBad : Wire::kDone;
}

bool ResponseReader::started() const { return impl_->started; }
bool ResponseReader::head_done() const { return impl_->parser->is_header_done() && impl_->status / 100 != 1; }
int ResponseReader::status() const { return impl_->status; }
std::string_view ResponseReader::content_type() const { return impl_->content_type; }
bool ResponseReader::keep_alive() const { return impl_->parser->keep_alive(); }
bool ResponseReader::cut_shows() const { return impl_->framing != Framing::kRaw; }

bool ResponseReader::EndWithEvent(std::string_view data, std::string& out) {
  if (!impl_->EventStream() || impl_->framing == Framing::kLength) return false;
  // An event that was cut in the middle ends here; the client can't be told to forget it.
  std::string event = impl_->empty || impl_->newlines >= 2 ? "data: " : "\n\ndata: ";
  event.append(data).append("\n\n");
  if (impl_->framing == Framing::kChunked) {
    AppendChunk(event, out);
    out += kLastChunk;
  } else {
    out += event;
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------------- encoders

void AppendChunk(std::string_view bytes, std::string& out) {
  AppendNumber(bytes.size(), 16, out);
  out.append("\r\n").append(bytes).append("\r\n");
}

void AppendResponseHead(int status, const Headers& headers, const HeadOptions& options, std::string& out) {
  out += "HTTP/1.1 ";
  AppendNumber(static_cast<size_t>(status), 10, out);
  out.append(" ").append(View(beast::obsolete_reason(beast::int_to_status(static_cast<unsigned>(status)))));
  out += "\r\n";
  for (const auto& [name, value] : headers) AppendField(name, value, out);
  if (options.framing == Framing::kChunked) out += "Transfer-Encoding: chunked\r\n";
  if (options.framing == Framing::kLength && status != 204 && status != 304) {
    out += "Content-Length: ";
    AppendNumber(options.length, 10, out);
    out += "\r\n";
  }
  if (options.close) out += "Connection: close\r\n";
  out += "\r\n";
}

void AppendRequestHead(const Request& request, std::string_view host, const Headers& set, std::string& out) {
  out.append(request.method).append(" ").append(request.path);
  if (!request.query.empty()) out.append("?").append(request.query);
  out += " HTTP/1.1\r\n";
  AppendField("Host", host, out);
  std::string connection;
  for (const auto& [name, value] : request.headers) {
    if (EqualsIgnoreCase(name, "connection")) (connection += ',') += value;
  }
  for (const auto& [name, value] : request.headers) {
    if (IsHopByHop(name) || EqualsIgnoreCase(name, "host") || EqualsIgnoreCase(name, "content-length")) continue;
    if (Names(set, name) || (!connection.empty() && ListContains(connection, name))) continue;
    AppendField(name, value, out);
  }
  for (const auto& [name, value] : set) AppendField(name, value, out);
  if (!request.body.empty() || request.method == "POST" || request.method == "PUT") {
    out += "Content-Length: ";
    AppendNumber(request.body.size(), 10, out);
    out += "\r\n";
  }
  out += "\r\n";
}

}  // namespace terrace::http
