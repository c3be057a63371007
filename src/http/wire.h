// HTTP/1.1 on the wire, without I/O: bytes in, messages out. No asio or Beast in this header.
//
// A reader is fed what a socket brought, in pieces of any size; the result does not depend on where they were cut. It
// takes what it can and says how much; the rest has to be offered again with more behind it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "http/server.h"

namespace terrace::http {

bool EqualsIgnoreCase(std::string_view a, std::string_view b);
// "close, X-Foo" contains "x-foo".
bool ListContains(std::string_view list, std::string_view token);

enum class Wire {
  kMore,         // Fine so far.
  kDone,         // The message is whole.
  kBad,          // No HTTP, or HTTP that two readers could understand differently.
  kHeadTooLong,  // Requests only, as the next one.
  kBodyTooLong,
};

struct Progress {
  Wire state = Wire::kMore;
  size_t used = 0;
};

// Reads requests, one after the other, each as a whole.
class RequestReader {
 public:
  struct Limits {
    size_t head_bytes_max = 64 << 10;
    size_t body_bytes_max = 64 << 20;
  };
  explicit RequestReader(Limits limits);
  ~RequestReader();

  // Begins the next message.
  void Reset();
  Progress Feed(std::string_view bytes);

  bool started() const;    // Something of the message was taken.
  bool head_done() const;  // What follows is valid from here on.
  bool keep_alive() const;
  bool http_1_0() const;
  bool expects_continue() const;
  Request Take();  // Once, when done.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Reads one response and re-encodes it for another connection, piece by piece. Dropped: what is said hop by hop
// (also by name in Connection), 1xx heads, trailers. Everything else passes byte for byte.
class ResponseReader {
 public:
  struct Plan {
    bool to_head = false;    // The request was HEAD: no body follows.
    bool raw_body = false;   // A body of unknown length goes out bare, not chunked: the client's connection ends it.
    bool body_only = false;  // The output is the body alone, bare.
    bool close = false;      // Tell the client that its connection ends after this message.
    Headers set;             // Take the place of fields of these names.
    // An event stream that only the end of the connection ends is whole if it ends with this. "": always.
    std::string last_event;
  };
  ResponseReader();
  ~ResponseReader();

  void Reset(Plan plan);
  // Appends to `out` what may be sent on.
  Progress Feed(std::string_view bytes, std::string& out);
  // The connection ended. kDone: so did the message.
  Wire Eof(std::string& out);

  bool started() const;    // A byte arrived, be it of a 1xx head.
  bool head_done() const;  // Of the final head. What follows is valid from here on.
  int status() const;
  std::string_view content_type() const;
  bool keep_alive() const;
  // The output has a length of its own, so whoever reads it sees when it was cut short.
  bool cut_shows() const;
  // Ends an event stream that broke off: one more event with `data`, then the end of the message. False: this message
  // is no event stream, or not one that can be continued.
  bool EndWithEvent(std::string_view data, std::string& out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// How a reader knows where the body ends: by its length, by its last chunk, or by the end of the connection.
enum class Framing { kLength, kChunked, kRaw };
struct HeadOptions {
  Framing framing = Framing::kLength;
  size_t length = 0;
  bool close = false;
};
// A whole head of our own.
void AppendResponseHead(int status, const Headers& headers, const HeadOptions& options, std::string& out);
void AppendChunk(std::string_view bytes, std::string& out);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// The head of `request` for another server: its own Host, a length, nothing that is said hop by hop; `set` takes the
// place of fields of the same names. The body goes behind it unchanged.
void AppendRequestHead(const Request& request, std::string_view host, const Headers& set, std::string& out);

}  // namespace terrace::http
