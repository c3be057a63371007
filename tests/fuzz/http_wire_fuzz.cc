// Would catch: bytes of a client or backend that crash a reader or trip one of its assertions; a message that reads
// differently when it is cut elsewhere; an answer whose re-encoding is no answer of the same body.
//
// Input: one byte of choices, one byte that seeds the cuts, then the message.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "http/wire.h"

namespace {

using namespace terrace::http;

struct Outcome {
  bool whole = false;
  std::string text;
};

// Feeds `bytes` in pieces of up to `step` bytes, growing and shrinking with `seed`.
template <class Feed>
bool FeedAll(std::string_view bytes, unsigned seed, Feed feed) {
  std::string waiting;
  while (!bytes.empty()) {
    seed = seed * 1103515245 + 12345;
    const size_t n = seed % 4096 < 8 ? bytes.size() : 1 + (seed >> 16) % 7;
    waiting.append(bytes.substr(0, n));
    bytes.remove_prefix(std::min(n, bytes.size()));
    for (Progress p{Wire::kMore, 1}; p.used > 0 && !waiting.empty();) {
      p = feed(std::string_view(waiting));
      if (p.used > waiting.size()) std::abort();
      waiting.erase(0, p.used);
      if (p.state != Wire::kMore) return p.state == Wire::kDone;
    }
  }
  return false;
}

Outcome ReadRequest(std::string_view bytes, bool at_once, unsigned seed) {
  RequestReader reader({.head_bytes_max = 1 << 20, .body_bytes_max = 1 << 20});
  Outcome outcome;
  outcome.whole = at_once ? reader.Feed(bytes).state == Wire::kDone
                          : FeedAll(bytes, seed, [&](std::string_view piece) { return reader.Feed(piece); });
  if (!outcome.whole) return outcome;
  const Request request = reader.Take();
  AppendRequestHead(request, "host", {}, outcome.text);
  outcome.text += request.body;
  return outcome;
}

Outcome ReadResponse(std::string_view bytes, const ResponseReader::Plan& plan, bool at_once, unsigned seed) {
  ResponseReader reader;
  reader.Reset(plan);
  Outcome outcome;
  outcome.whole = at_once
                      ? reader.Feed(bytes, outcome.text).state == Wire::kDone
                      : FeedAll(bytes, seed, [&](std::string_view piece) { return reader.Feed(piece, outcome.text); });
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const unsigned choices = data[0], seed = data[1];
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  if (choices & 1) {
    const Outcome whole = ReadRequest(bytes, true, seed), cut = ReadRequest(bytes, false, seed);
    if (whole.whole != cut.whole || whole.text != cut.text) std::abort();
    // What we write for the next server is a request that reads the same.
    if (whole.whole) {
      const Outcome again = ReadRequest(whole.text, true, seed);
      if (!again.whole || again.text != whole.text) std::abort();
    }
    return 0;
  }
  const ResponseReader::Plan body_only{.to_head = (choices & 2) != 0, .body_only = true};
  const Outcome whole = ReadResponse(bytes, body_only, true, seed), cut = ReadResponse(bytes, body_only, false, seed);
  if (whole.whole != cut.whole || (whole.whole && whole.text != cut.text)) std::abort();
  ResponseReader::Plan message = body_only;
  message.body_only = false;
  message.close = (choices & 4) != 0;
  const Outcome passed = ReadResponse(bytes, message, false, seed);
  if (passed.whole != whole.whole) std::abort();
  if (passed.whole) {
    const Outcome body = ReadResponse(passed.text, body_only, true, seed);
    if (!body.whole || body.text != whole.text) std::abort();
  }
  ResponseReader reader;  // An upstream that dies here, wherever that is.
  std::string out;
  const Progress progress = reader.Feed(bytes, out);
  if (progress.state == Wire::kMore) (void)reader.Eof(out);
  (void)reader.EndWithEvent("{}", out);
  return 0;
}
