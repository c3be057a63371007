// Would catch: answers that are cut, mixed up or lost over pipelining, chunked uploads and slow readers; a client that
// leaves unnoticed, so that an engine computes for nobody; limits that do not limit; a drain that cuts running answers
// or never ends; a responder used after its client, its session or its server is gone.
#include "http/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <optional>

#include "http/test_socket.h"
#include "tests/support/refused_call.h"

namespace terrace::http {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const Headers kText = {{"Content-Type", "text/plain"}};

std::unique_ptr<Server> StartOrDie(Options options, Handler handler) {
  auto server = Server::Start(std::move(options), std::move(handler));
  if (!server) {
    ADD_FAILURE() << server.error().what;
    std::abort();
  }
  return std::move(*server);
}

// Echoes what arrived: method, path, query, body.
void Echo(Request request, std::shared_ptr<Responder> responder) {
  responder->Send(200, kText, request.method + " " + request.path + "?" + request.query + " " + request.body);
}

// A responder that a test takes out of a handler.
class Caught {
 public:
  Handler handler() {
    return [this](Request, std::shared_ptr<Responder> responder) {
      std::lock_guard lock(mutex_);
      responder_ = std::move(responder);
      caught_.Set();
    };
  }
  std::shared_ptr<Responder> Take() {
    if (!caught_.Wait()) return nullptr;
    std::lock_guard lock(mutex_);
    return std::move(responder_);
  }

 private:
  std::mutex mutex_;
  TestFlag caught_;
  std::shared_ptr<Responder> responder_;
};

const std::string kGet = "GET /x HTTP/1.1\r\nHost: t\r\n\r\n";

TEST(HttpServer, AnswersOneRequestAfterTheOtherOnOneConnection) {
  const auto server = StartOrDie({}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  for (int i = 0; i < 3; ++i) {
    client.SendAll("POST /a/b?c=d HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nxyz");
    const TestAnswer answer = client.ReadAnswer();
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, "POST /a/b?c=d xyz");
    EXPECT_TRUE(answer.Has("content-type: text/plain"));
  }
}

TEST(HttpServer, AnswersPipelinedRequestsInOrder) {
  const auto server = StartOrDie({}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  std::string all;
  for (int i = 0; i < 20; ++i) {
    all +=
        "POST /" + std::to_string(i) + " HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\n\r\nx\r\n";  // One line too many.
  }
  client.SendAll(all);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.ReadAnswer().body, "POST /" + std::to_string(i) + "? x");
}

TEST(HttpServer, ReadsChunkedBodies) {
  const auto server = StartOrDie({}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n");
  client.SendAll("2;ext=1\r\nde\r\n0\r\nTrailer: x\r\n\r\n");
  EXPECT_EQ(client.ReadAnswer().body, "POST /? abcde");
}

TEST(HttpServer, SaysContinueOnlyToThoseWhoWaitForIt) {
  const auto server = StartOrDie({}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll("POST / HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(client.ReadAnswer().status, 100);
  client.SendAll("hi");
  EXPECT_EQ(client.ReadAnswer().body, "POST /? hi");
}

TEST(HttpServer, AnswersHeadWithoutABody) {
  const auto server = StartOrDie({}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll("HEAD /x HTTP/1.1\r\nHost: t\r\n\r\n");
  const TestAnswer answer = client.ReadAnswer(true);
  EXPECT_TRUE(answer.Has("content-length: 9"));
  client.SendAll(kGet);
  EXPECT_EQ(client.ReadAnswer().body, "GET /x? ");
}

TEST(HttpServer, GivesOldClientsAnAnswerThatEndsWithTheConnection) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  const auto responder = caught.Take();
  responder->Begin(200, kText);
  responder->Write("one ");
  responder->Write("two");
  responder->End();
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_TRUE(answer.Has("connection: close"));
  EXPECT_EQ(answer.body, "one two");
}

TEST(HttpServer, SendsEachPieceBeforeTheNextIsThere) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  responder->Begin(200, {{"Content-Type", "text/event-stream"}});
  EXPECT_THAT(client.Until("\r\n\r\n"), HasSubstr("Transfer-Encoding: chunked"));
  for (int i = 0; i < 5; ++i) {
    const std::string event = "data: " + std::to_string(i) + "\n\n";
    EXPECT_TRUE(responder->Write(event));
    EXPECT_EQ(client.ReadChunk(), event);  // Arrives although nothing follows yet.
  }
  responder->End();
  EXPECT_EQ(client.Until("\r\n\r\n"), "0\r\n\r\n");
}

TEST(HttpServer, TellsTheHandlerThatTheClientLeft) {
  for (const bool streaming : {false, true}) {
    Caught caught;
    const auto server = StartOrDie({}, caught.handler());
    auto client = std::make_optional(TestSocket::Dial(server->port()));
    client->SendAll(kGet);
    const auto responder = caught.Take();
    TestFlag gone;
    responder->OnGone([&] { gone.Set(); });
    if (streaming) {
      responder->Begin(200, kText);
      responder->Write("x");
      client->Until("\r\nx\r\n");
    }
    client.reset();
    EXPECT_TRUE(gone.Wait());
    EXPECT_TRUE(responder->gone());
    TestFlag again;
    responder->OnGone([&] { again.Set(); });
    EXPECT_TRUE(again.Wait(std::chrono::milliseconds(0))) << "a client that left before is told at once";
    if (streaming) {
      EXPECT_FALSE(responder->Write("y"));
    } else {
      responder->Send(200, kText, "too late");
    }
    EXPECT_TRUE(Eventually([&] { return server->stats().connections == 0 && server->stats().watchers == 0; }));
  }
}

TEST(HttpServer, DoesNotCallAPipelinedRequestLeaving) {
  Caught caught;
  std::atomic<int> handled = 0;
  const auto server = StartOrDie({}, [&](Request request, std::shared_ptr<Responder> responder) {
    if (handled++ == 0) return caught.handler()(std::move(request), std::move(responder));
    Echo(std::move(request), std::move(responder));
  });
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  std::atomic<bool> gone = false;
  responder->OnGone([&] { gone = true; });
  client.SendAll(kGet);
  EXPECT_TRUE(Eventually([&] { return server->stats().watchers == 0; }));  // It has seen the bytes.
  responder->Send(200, kText, "first");
  EXPECT_EQ(client.ReadAnswer().body, "first");
  EXPECT_EQ(client.ReadAnswer().body, "GET /x? ");
  EXPECT_FALSE(gone);
}

TEST(HttpServer, AnswersForAHandlerThatDropsItsResponder) {
  const auto server = StartOrDie({}, [](Request, std::shared_ptr<Responder>) {});
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 500);
  EXPECT_THAT(answer.body, HasSubstr(R"("code":"no_answer")"));
}

TEST(HttpServer, CutsAStreamWhoseResponderIsDropped) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  auto responder = caught.Take();
  responder->Begin(200, kText);
  responder->Write("half");
  responder.reset();
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.body, "half");
  EXPECT_FALSE(answer.whole) << "half an answer must not look like a whole one";
}

TEST(HttpServer, StopsAHandlerWhoseClientDoesNotRead) {
  Caught caught;
  const auto server = StartOrDie({.unsent_bytes_max = 1 << 20}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  responder->Begin(200, kText);
  size_t written = 0;
  while (written < (256 << 20) && responder->Write(std::string(64 << 10, 'x'))) written += 64 << 10;
  EXPECT_LT(written, 256 << 20) << "nothing stopped it";
  EXPECT_TRUE(responder->gone());
}

TEST(HttpServer, PassesLargeAnswersToASlowReader) {
  const std::string body(8 << 20, 'b');
  const auto server =
      StartOrDie({}, [&](Request, std::shared_ptr<Responder> responder) { responder->Send(200, kText, body); });
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  client.Until("\r\n\r\n");
  EXPECT_EQ(client.Exactly(body.size()), body);
}

struct Refusal {
  std::string name, bytes;
  int status;
};
class HttpServerRefuses : public testing::TestWithParam<Refusal> {};
TEST_P(HttpServerRefuses, WithAnErrorInOpenAisShape) {
  const auto server = StartOrDie({.header_bytes_max = 2000, .body_bytes_max = 1000}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(GetParam().bytes);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, GetParam().status) << answer.head;
  EXPECT_THAT(answer.body, StartsWith(R"({"error":{"message":")"));
  EXPECT_TRUE(answer.Has("connection: close"));
  client.CloseSending();
  EXPECT_EQ(client.Rest(), "") << "nothing follows a refusal";
}
INSTANTIATE_TEST_SUITE_P(
    Bad, HttpServerRefuses,
    testing::Values(
        Refusal{"NoHttp", "hello there\r\n\r\n", 400}, Refusal{"NoVersion", "GET /\r\n\r\n", 400},
        Refusal{"Http2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400},
        Refusal{"LongHead", "GET / HTTP/1.1\r\nX: " + std::string(3000, 'x') + "\r\n\r\n", 431},
        Refusal{"ManyFields",
                [] {
                  std::string head = "GET / HTTP/1.1\r\n";
                  for (int i = 0; i < 300; ++i) head += "X-" + std::to_string(i) + ": y\r\n";
                  return head + "\r\n";
                }(),
                431},
        Refusal{"LongBody", "POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413},
        Refusal{"LongBodyExpected", "POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1001\r\n\r\n", 413},
        Refusal{"LongChunks", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", 413},
        Refusal{"TwoLengths", "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400},
        Refusal{"LengthAndChunks",
                "POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
        Refusal{"ChunksAndLength",
                "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n", 400},
        Refusal{"OtherCoding", "POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400},
        Refusal{"ChunkedNotLast", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400},
        Refusal{"OldAndChunked", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
        Refusal{"NegativeLength", "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400},
        Refusal{"SpaceBeforeColon", "POST / HTTP/1.1\r\nContent-Length : 1\r\n\r\nx", 400},
        Refusal{"BadChunkSize", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400},
        Refusal{"HugeChunkSize", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400},
        Refusal{"LongChunkLine", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + std::string(40000, 'e'),
                400}),
    [](const auto& test) { return test.param.name; });

TEST(HttpServer, HoldsOnlySoManyBytesOfBodies) {
  Caught caught;
  const auto server = StartOrDie({.body_bytes_max = 100'000, .bodies_bytes_max = 150'000},
                                 [&](Request request, std::shared_ptr<Responder> responder) {
                                   const bool keep = request.path == "/kept";
                                   (keep ? caught.handler() : Handler(Echo))(std::move(request), std::move(responder));
                                 });
  const auto post = [&](const std::string& path) {
    TestSocket client = TestSocket::Dial(server->port());
    client.SendAll("POST " + path + " HTTP/1.1\r\nHost: t\r\nContent-Length: 100000\r\n\r\n" +
                   std::string(100'000, 'x'));
    return client;
  };
  {
    TestSocket first = post("/kept");
    const std::shared_ptr<Responder> responder = caught.Take();
    ASSERT_TRUE(responder);
    EXPECT_EQ(post("/").ReadAnswer().status, 503);
    responder->Send(200, kText, "");
    EXPECT_EQ(first.ReadAnswer().status, 200);
  }
  EXPECT_TRUE(Eventually([&] { return server->stats().connections == 0; }));
  EXPECT_EQ(post("/").ReadAnswer().status, 200) << "what was held is given back";
}

TEST(HttpServer, TellsASlowSenderThatTimeIsUp) {
  const auto server = StartOrDie({.read_timeout = std::chrono::milliseconds(100)}, Echo);
  for (const std::string bytes : {"GET / HT", "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab"}) {
    TestSocket client = TestSocket::Dial(server->port());
    client.SendAll(bytes);
    EXPECT_EQ(client.ReadAnswer().status, 408);
  }
}

TEST(HttpServer, ClosesIdleConnectionsWithoutAWord) {
  const auto server = StartOrDie({.idle_timeout = std::chrono::milliseconds(100)}, Echo);
  TestSocket client = TestSocket::Dial(server->port());
  EXPECT_EQ(client.Rest(), "");
  EXPECT_TRUE(Eventually([&] { return server->stats().connections == 0; }));
}

TEST(HttpServer, CutsAClientThatDoesNotReadInTime) {
  Caught caught;
  const auto server = StartOrDie({.write_timeout = std::chrono::milliseconds(100)}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  TestFlag gone;
  responder->Begin(200, kText);
  responder->OnGone([&] { gone.Set(); });
  responder->Write(std::string(64 << 20, 'x'));  // One piece is taken whatever its size.
  EXPECT_TRUE(gone.Wait());
}

TEST(HttpServer, TurnsConnectionsAwayAboveItsLimit) {
  const auto server = StartOrDie({.connections_max = 1}, Echo);
  TestSocket first = TestSocket::Dial(server->port());
  first.SendAll(kGet);
  EXPECT_EQ(first.ReadAnswer().status, 200);
  TestSocket second = TestSocket::Dial(server->port());
  EXPECT_EQ(second.ReadAnswer().status, 503);
  first.Close();
  EXPECT_TRUE(Eventually([&] {
    TestSocket third = TestSocket::Dial(server->port());
    return third.SendAll(kGet) && third.ReadAnswer().status == 200;
  }));
}

TEST(HttpServer, NamesThePortThatIsTaken) {
  const auto server = StartOrDie({}, Echo);
  const auto second = Server::Start({.port = server->port()}, Echo);
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().what, HasSubstr("127.0.0.1:" + std::to_string(server->port())));
  EXPECT_THAT(second.error().what, HasSubstr("taken"));
  const auto nowhere = Server::Start({.host = "no.such.host.invalid"}, Echo);
  ASSERT_FALSE(nowhere);
  EXPECT_THAT(nowhere.error().what, HasSubstr("no.such.host.invalid"));
}

TEST(HttpServer, DrainsWithoutCuttingWhatRuns) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket idle = TestSocket::Dial(server->port());
  TestSocket busy = TestSocket::Dial(server->port());
  busy.SendAll(kGet);
  const auto responder = caught.Take();
  std::thread answer([&] {
    EXPECT_EQ(idle.Rest(), "") << "an idle connection is closed at once";  // So the drain has begun.
    EXPECT_FALSE(TestSocket::Dial(server->port()).connected()) << "nobody is let in any more";
    responder->Send(200, kText, "whole");
  });
  EXPECT_TRUE(server->Drain(std::chrono::seconds(20)));
  answer.join();
  EXPECT_EQ(busy.ReadAnswer().body, "whole");
}

TEST(HttpServer, CutsWhatDoesNotEndByTheDeadlineOfTheDrain) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  TestFlag gone;
  responder->OnGone([&] { gone.Set(); });
  EXPECT_FALSE(server->Drain(std::chrono::milliseconds(50)));
  EXPECT_TRUE(gone.Wait());
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 503);
  EXPECT_THAT(answer.body, HasSubstr("\"shutting_down\""));
  EXPECT_EQ(server->stats().connections, 0);
}

TEST(HttpServer, CutsAStreamThatDoesNotEndByTheDeadlineOfTheDrain) {
  Caught caught;
  const auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  responder->Begin(200, kText);
  ASSERT_TRUE(responder->Write("half"));
  TestFlag gone;
  responder->OnGone([&] { gone.Set(); });
  EXPECT_FALSE(server->Drain(std::chrono::milliseconds(50)));
  EXPECT_TRUE(gone.Wait());
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.body, "half");
  EXPECT_FALSE(answer.whole);
}

TEST(HttpServer, LetsAResponderOutliveIt) {
  Caught caught;
  auto server = StartOrDie({}, caught.handler());
  TestSocket client = TestSocket::Dial(server->port());
  client.SendAll(kGet);
  const auto responder = caught.Take();
  server.reset();
  EXPECT_TRUE(responder->gone());
  responder->Send(200, kText, "to nobody");
}

TEST(HttpServer, ServesManyConnectionsOnSeveralThreads) {
  const auto server = StartOrDie({.threads = 3}, Echo);
  std::vector<std::thread> clients;
  std::atomic<int> right = 0;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([&, c] {
      TestSocket client = TestSocket::Dial(server->port());
      for (int i = 0; i < 100; ++i) {
        const std::string path = "/" + std::to_string(c) + "/" + std::to_string(i);
        client.SendAll("GET " + path + " HTTP/1.1\r\nHost: t\r\n\r\n");
        right += client.ReadAnswer().body == "GET " + path + "? ";
      }
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(right, 800);
}

bool HasIpv6() {
  const int fd = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  const bool has = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return has;
}

// Many containers and some hosts have no IPv6.
TEST(HttpServer, WithoutIpv6SaysSoAndListensOnTheOther) {
  EXPECT_EQ(ResultWithout({.number = SYS_socket, .error = EAFNOSUPPORT, .first_argument = AF_INET6},
                          [] {
                            const auto six = Server::Start({.host = "::1"}, Echo);
                            if (six || six.error().what.find("[::1]") == std::string::npos) return 1;
                            for (const char* host : {"127.0.0.1", "localhost", "0.0.0.0"}) {
                              if (!Server::Start({.host = host}, Echo)) return 2;
                            }
                            return 0;
                          }),
            0);
}

TEST(HttpServer, ListensOnIpv6) {
  const auto server = Server::Start({.host = "::1"}, Echo);
  ASSERT_EQ(server.has_value(), HasIpv6());
  if (!server) return;  // See the test above.
  const int fd = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons((*server)->port());
  address.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  TestSocket client(fd);
  client.SendAll(kGet);
  EXPECT_EQ(client.ReadAnswer().status, 200);
}

}  // namespace
}  // namespace terrace::http
