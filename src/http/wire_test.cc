// Would catch: a message that reads differently when the network cuts it elsewhere; fields of one hop that leak to the
// next; a body that is re-framed wrongly, so that a client waits for ever or takes half an answer for a whole one.
#include "http/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "http/error.h"

namespace terrace::http {
namespace {

using testing::HasSubstr;
using testing::Not;

// Feeds `bytes` in pieces that `cut` chooses, as a connection does: what was not taken is offered again.
template <class Feed>
Wire FeedInPieces(std::string_view bytes, Feed feed, const std::function<size_t(size_t left)>& cut) {
  std::string waiting;
  Wire state = Wire::kMore;
  while (!bytes.empty() && state == Wire::kMore) {
    const size_t n = cut(bytes.size());
    waiting.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    for (Progress p{Wire::kMore, 1}; p.used > 0 && p.state == Wire::kMore && !waiting.empty();) {
      p = feed(std::string_view(waiting));
      waiting.erase(0, p.used);
      state = p.state;
    }
  }
  return state;
}

struct ReadRequest {
  Wire state;
  std::string text;
  bool operator==(const ReadRequest&) const = default;
};

ReadRequest AsRequest(std::string_view bytes, const std::function<size_t(size_t)>& cut) {
  RequestReader reader({});
  const Wire state = FeedInPieces(bytes, [&](std::string_view piece) { return reader.Feed(piece); }, cut);
  // Some nonsense is recognised only once a head seems whole, and then depends on how much is there at once.
  if (state != Wire::kDone) return {Wire::kBad, ""};
  const bool keep = reader.keep_alive();
  const Request request = reader.Take();
  std::string text = request.method + "|" + request.path + "|" + request.query + "|";
  for (const auto& [name, value] : request.headers) text += name + "=" + value + ";";
  return {state, text + "|" + request.body + "|" + (keep ? "keep" : "close")};
}

ReadRequest AsResponse(std::string_view bytes, const ResponseReader::Plan& plan,
                       const std::function<size_t(size_t)>& cut) {
  ResponseReader reader;
  reader.Reset(plan);
  std::string out;
  Wire state = FeedInPieces(bytes, [&](std::string_view piece) { return reader.Feed(piece, out); }, cut);
  if (state == Wire::kMore) state = reader.Eof(out);
  return {state, out};
}

size_t Whole(size_t left) { return left; }

std::string Passed(std::string_view bytes, const ResponseReader::Plan& plan = {}) {
  const ReadRequest read = AsResponse(bytes, plan, Whole);
  EXPECT_EQ(read.state, Wire::kDone);
  return read.text;
}

// The bytes of a chunked message's body, put together again.
std::string Dechunked(std::string_view message) {
  const size_t head = message.find("\r\n\r\n");
  std::string text(message.substr(0, head + 4));
  message.remove_prefix(head + 4);
  while (!message.empty()) {
    const size_t line = message.find("\r\n");
    const size_t size = std::strtoull(std::string(message.substr(0, line)).c_str(), nullptr, 16);
    text.append(message.substr(line + 2, size));
    message.remove_prefix(line + 2 + size + 2);
  }
  return text;
}

const std::vector<std::string> kRequests = {
    "GET / HTTP/1.1\r\n\r\n",
    "\r\n\r\nGET /a?b=c&d HTTP/1.1\r\nHost: x\r\nA:  b  \r\n\r\n",
    "GET http://elsewhere:80/p?q HTTP/1.1\r\nHost: x\r\n\r\n",
    "POST /v1/x HTTP/1.1\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello world",
    "POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nok",
    "POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n6;a;b=\"c\"\r\n world\r\n0\r\nT: y\r\n\r\n",
    "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST / HTTP/1.1\r\nFolded: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "GET / HTTP/1.1\r\nbad header\r\n\r\n",
    "GET / HTTP/1.1\nHost: x\n\n",
    "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
};
const std::vector<std::string> kResponses = {
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: t\r\n\r\n",
    "HTTP/1.1 200 Fine By Me\r\n\r\nuntil the end",
    "HTTP/1.0 404 Not Found\r\nContent-Type: application/json\r\n\r\n{}",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 H\r\nX: x\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nab",
    "HTTP/1.1 204 No Content\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "garbage\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
};

TEST(Wire, ReadsTheSameWhereverTheInputIsCut) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto byte_by_byte = [](size_t) { return size_t{1}; };
  const auto at_random = [&](size_t left) { return 1 + random() % std::min<size_t>(left, 20); };
  for (const std::string& bytes : kRequests) {
    const ReadRequest whole = AsRequest(bytes, Whole);
    EXPECT_EQ(AsRequest(bytes, byte_by_byte), whole) << bytes;
    for (int i = 0; i < 50; ++i) EXPECT_EQ(AsRequest(bytes, at_random), whole) << bytes;
  }
  for (const std::string& bytes : kResponses) {
    for (const bool raw : {true, false}) {
      const auto read = [&](const std::function<size_t(size_t)>& cut) {
        ReadRequest r = AsResponse(bytes, {.raw_body = raw}, cut);
        // Chunks may be cut anywhere; the bytes in them may not differ. Broken messages are compared up to the break.
        if (r.text.find("Transfer-Encoding") != std::string::npos && r.state == Wire::kDone) r.text = Dechunked(r.text);
        if (r.state != Wire::kDone) r.text.clear();
        return r;
      };
      const ReadRequest whole = read(Whole);
      EXPECT_EQ(read(byte_by_byte), whole) << bytes;
      for (int i = 0; i < 50; ++i) EXPECT_EQ(read(at_random), whole) << bytes;
    }
  }
}

TEST(Wire, ReadsRequests) {
  EXPECT_EQ(AsRequest(kRequests[1], Whole).text, "GET|/a|b=c&d|Host=x;A=b;||keep");
  EXPECT_EQ(AsRequest(kRequests[2], Whole).text, "GET|/p|q|Host=x;||keep");
  EXPECT_EQ(AsRequest(kRequests[3], Whole).text, "POST|/v1/x||Content-Length=11;Connection=close;|hello world|close");
  EXPECT_THAT(AsRequest(kRequests[5], Whole).text, HasSubstr("|hello world|"));
  EXPECT_THAT(AsRequest(kRequests[5], Whole).text, Not(HasSubstr("T=y"))) << "a trailer is no header";
  EXPECT_EQ(AsRequest(kRequests[8], Whole).state, Wire::kBad);
  EXPECT_EQ(AsRequest(kRequests[10], Whole).state, Wire::kBad);
}

TEST(Wire, LeavesTheNextRequestAlone) {
  RequestReader reader({});
  const std::string first = "POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx";
  const Progress progress = reader.Feed(first + "GET /next HTTP/1.1\r\n\r\n");
  EXPECT_EQ(progress.state, Wire::kDone);
  EXPECT_EQ(progress.used, first.size());
}

TEST(Wire, PassesResponsesByteForByteButForTheHop) {
  EXPECT_EQ(Passed("HTTP/1.1 200 Fine By Me\r\nx-UPPER: V\r\nKeep-Alive: 5\r\nConnection: keep-alive, X-Hop\r\n"
                   "X-Hop: 1\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nok"),
            "HTTP/1.1 200 Fine By Me\r\nx-UPPER: V\r\nContent-Length: 2\r\n\r\nok");
  EXPECT_THAT(Passed("HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\nok"),
              HasSubstr("Content-Length: 2"))
      << "nobody may name the framing away";
  EXPECT_EQ(Passed(kResponses[4]), "HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nab");
}

// Some clients take two for a way to smuggle.
TEST(Wire, PassesOneLengthOnOfOneThatIsSaidTwice) {
  for (const char* lengths : {"Content-Length: 2\r\ncontent-length: 2\r\n", "Content-Length: 2, 2\r\n"}) {
    EXPECT_EQ(Passed(std::string("HTTP/1.1 200 OK\r\n") + lengths + "X: 2, 2\r\n\r\nok"),
              "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: 2, 2\r\n\r\nok");
  }
}

TEST(Wire, GivesABodyOfUnknownLengthAnEndOfItsOwn) {
  EXPECT_EQ(Passed("HTTP/1.1 200 OK\r\n\r\nabc"),
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
  EXPECT_EQ(Passed("HTTP/1.1 200 OK\r\n\r\nabc", {.raw_body = true}),
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc");
  EXPECT_EQ(Passed("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", {.body_only = true}),
            "abc");
  EXPECT_EQ(Passed("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", {.to_head = true}),
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n");
  EXPECT_EQ(Passed("HTTP/1.1 204 No Content\r\n\r\n"), "HTTP/1.1 204 No Content\r\n\r\n");
}

TEST(Wire, SetsFieldsInPlaceOfTheUpstreams) {
  EXPECT_EQ(Passed("HTTP/1.1 200 OK\r\nx-request-id: theirs\r\nContent-Length: 0\r\n\r\n",
                   {.close = true, .set = {{"X-Request-Id", "ours"}}}),
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Request-Id: ours\r\nConnection: close\r\n\r\n");
}

TEST(Wire, KnowsWhetherAConnectionMayBeUsedAgain) {
  const auto keeps = [](std::string_view bytes) {
    ResponseReader reader;
    std::string out;
    EXPECT_EQ(reader.Feed(bytes, out).state, Wire::kDone);
    return reader.keep_alive();
  };
  EXPECT_TRUE(keeps("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"));
}

TEST(Wire, EndsAnEventStreamThatBrokeOff) {
  const std::string head = "HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n";
  const auto ended = [&](const std::string& rest, bool raw = false) -> std::string {
    ResponseReader reader;
    reader.Reset({.raw_body = raw});
    std::string out;
    reader.Feed(head + rest, out);
    out.clear();
    return reader.EndWithEvent("{}", out) ? out : "no";
  };
  const std::string chunked = "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(ended(chunked), "a\r\ndata: {}\n\n\r\n0\r\n\r\n");
  EXPECT_EQ(ended(chunked + "9\r\ndata: x\n\n\r\n"), "a\r\ndata: {}\n\n\r\n0\r\n\r\n");
  EXPECT_EQ(ended(chunked + "b\r\ndata: x\r\n\r\n\r\n"), "a\r\ndata: {}\n\n\r\n0\r\n\r\n");
  EXPECT_EQ(ended(chunked + "9\r\ndat"), "c\r\n\n\ndata: {}\n\n\r\n0\r\n\r\n") << "half an event is closed first";
  EXPECT_EQ(ended(chunked + "9\r\ndat", true), "\n\ndata: {}\n\n");
  EXPECT_EQ(ended("Content-Length: 100\r\n\r\ndata: x\n\n"), "no") << "a length can't be taken back";
  EXPECT_EQ(ended("Content-Encoding: gzip\r\n" + chunked + "9\r\ndat"), "no");
}

TEST(Wire, RefusesAHeadWithoutEndFromABackend) {
  ResponseReader reader;
  std::string out, waiting = "HTTP/1.1 200 OK\r\nX";
  Progress progress;
  for (int i = 0; i < 100 && progress.state == Wire::kMore; ++i) {
    // Cut so that the reader can take each field at once and never waits for the whole head.
    waiting += "-" + std::to_string(i) + ": " + std::string(10000, 'x') + "\r\nX";
    progress = reader.Feed(waiting, out);
    waiting.erase(0, progress.used);
  }
  EXPECT_EQ(progress.state, Wire::kBad);
}

TEST(Wire, WritesRequestsForAnotherServer) {
  Request request{.method = "POST", .path = "/v1/x", .query = "a=b", .body = "{}"};
  request.headers = {{"Host", "router"},
                     {"Authorization", "Bearer k"},
                     {"Connection", "close, X-Hop"},
                     {"X-Hop", "1"},
                     {"Content-Length", "99"},
                     {"Expect", "100-continue"},
                     {"Transfer-Encoding", "chunked"},
                     {"x-request-id", "theirs"}};
  std::string head;
  AppendRequestHead(request, "vllm:8000", {{"X-Request-Id", "ours"}}, head);
  EXPECT_EQ(head,
            "POST /v1/x?a=b HTTP/1.1\r\nHost: vllm:8000\r\nAuthorization: Bearer k\r\nX-Request-Id: ours\r\n"
            "Content-Length: 2\r\n\r\n");
}

TEST(Wire, WritesErrorsThatAreJsonWhateverStandsInThem) {
  EXPECT_EQ(ErrorBody("a \"b\" \\ \n\x01 \xff \xc3\xa9 \xed\xa0\x80", "t", ""),
            "{\"error\":{\"message\":\"a \\\"b\\\" \\\\ \\u000a\\u0001 \xEF\xBF\xBD \xc3\xa9 "
            "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\",\"type\":\"t\",\"param\":null,\"code\":null}}");
  EXPECT_THAT(ErrorBody("m", "t", "c"), HasSubstr(R"("code":"c")"));
}

}  // namespace
}  // namespace terrace::http
