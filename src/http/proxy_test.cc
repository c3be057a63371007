// Would catch: a stream held back instead of passed on as it comes; a client that leaves while its backend computes on;
// a request sent twice although an answer had begun; half an answer that looks whole; a key or a Host that does not
// reach the backend; a counter that never falls again.
#include "http/proxy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "http/test_socket.h"

namespace terrace::http {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Tries the backends in the order given and remembers how each attempt ended.
struct Log {
  std::mutex mutex;
  std::vector<Ended> ended;
  TestFlag reported;
  std::vector<Ended> All() {
    std::lock_guard lock(mutex);
    return ended;
  }
};
class InOrder final : public Route {
 public:
  InOrder(std::vector<std::shared_ptr<Backend>> backends, Log& log) : backends_(std::move(backends)), log_(log) {}
  std::shared_ptr<Backend> Next() override { return next_ < backends_.size() ? backends_[next_++] : nullptr; }
  void Report(Backend&, Ended ended, int, const std::string&) override {
    std::lock_guard lock(log_.mutex);
    log_.ended.push_back(ended);
    log_.reported.Set();
  }

 private:
  std::vector<std::shared_ptr<Backend>> backends_;
  size_t next_ = 0;
  Log& log_;
};

// A proxy in front of the given ports.
class Proxied {
 public:
  explicit Proxied(const std::vector<uint16_t>& ports, ProxyOptions options = {}, const std::string& last_event = "") {
    for (const uint16_t port : ports) backends.push_back(std::make_shared<Backend>("127.0.0.1", port));
    auto started =
        Server::Start({}, [this, options, last_event](Request request, std::shared_ptr<Responder> responder) {
          Forward(std::move(responder), {std::move(request), {{"X-Up", "1"}}, {{"X-Down", "2"}}, last_event},
                  std::make_unique<InOrder>(backends, log), options);
        });
    if (!started) std::abort();
    server = std::move(*started);
  }
  ~Proxied() {
    server->Stop();
    for (const auto& backend : backends) EXPECT_EQ(backend->in_flight(), 0);
    const ServerStats stats = server->stats();
    EXPECT_EQ(stats.connections, 0);
    EXPECT_EQ(stats.watchers, 0);
    EXPECT_EQ(stats.upstreams, 0);
  }
  TestSocket Client() { return TestSocket::Dial(server->port()); }

  Log log;
  std::vector<std::shared_ptr<Backend>> backends;
  std::unique_ptr<Server> server;
};

const std::string kPost =
    "POST /v1/x?q HTTP/1.1\r\nHost: router\r\nAuthorization: Bearer k\r\nContent-Length: 4\r\n\r\nbody";
const std::string kSseHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

std::string ReadWholeRequest(TestSocket& socket) {
  std::string head = socket.Until("\r\n\r\n");
  return head.empty() ? head : head + socket.Exactly(4);
}
std::string Answer(const std::string& body) {
  return "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}
std::string Chunk(const std::string& bytes) {
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  return size + bytes + "\r\n";
}
void Serve(TestSocket& socket, const std::string& answer) {
  while (!ReadWholeRequest(socket).empty() && socket.SendAll(answer)) {
  }
}

// Nobody listens on it, and nobody else gets it as long as this process lives: it stays bound.
uint16_t DeadPort() {
  const int bound = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  const bool good = ::bind(bound, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                    ::getsockname(bound, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  TERRACE_ASSERT(good);
  return ntohs(address.sin_port);
}

TEST(HttpProxy, PassesRequestAndAnswerOn) {
  std::string seen;
  TestFlag done;
  TestBackend backend([&](TestSocket& socket) {
    seen = ReadWholeRequest(socket);
    socket.SendAll("HTTP/1.1 418 Teapot\r\nx-Their: h\r\nContent-Length: 3\r\n\r\nyes");
    done.Set();
  });
  Proxied proxy({backend.port()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 418);
  EXPECT_EQ(answer.body, "yes");
  EXPECT_TRUE(answer.Has("x-their: h"));
  EXPECT_TRUE(answer.Has("x-down: 2"));
  ASSERT_TRUE(done.Wait());
  EXPECT_THAT(seen, HasSubstr("POST /v1/x?q HTTP/1.1\r\nHost: 127.0.0.1:" + std::to_string(backend.port()) + "\r\n"));
  EXPECT_THAT(seen, HasSubstr("Authorization: Bearer k\r\n"));
  EXPECT_THAT(seen, HasSubstr("X-Up: 1\r\n"));
  EXPECT_THAT(seen, testing::EndsWith("\r\n\r\nbody"));
}

TEST(HttpProxy, PassesEachEventOnBeforeTheNextIsMade) {
  TestFlag may_go_on[3];
  TestBackend backend([&](TestSocket& socket) {
    ReadWholeRequest(socket);
    socket.SendAll(kSseHead);
    for (auto& flag : may_go_on) {
      socket.SendAll(Chunk("data: x\n\n"));
      if (!flag.Wait()) return;
    }
    socket.SendAll("0\r\n\r\n");
  });
  Proxied proxy({backend.port()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  EXPECT_NE(client.Until("\r\n\r\n"), "");
  for (auto& flag : may_go_on) {
    EXPECT_EQ(client.ReadChunk(), "data: x\n\n");
    flag.Set();
  }
  EXPECT_EQ(client.Until("\r\n\r\n"), "0\r\n\r\n");
}

// A backend that is asked once, maybe sends the first event, and then waits for its connection to be closed.
auto NeverEnds(bool begins, TestFlag& busy, TestFlag& closed) {
  return [begins, &busy, &closed](TestSocket& socket) {
    ReadWholeRequest(socket);
    if (begins) socket.SendAll(kSseHead + Chunk("data: x\n\n"));
    busy.Set();
    if (socket.PeerCloses()) closed.Set();
  };
}

TEST(HttpProxy, ClosesTheBackendsConnectionWhenTheClientLeaves) {
  for (const bool streaming : {false, true}) {
    TestFlag busy, closed;
    TestBackend backend(NeverEnds(streaming, busy, closed));
    Proxied proxy({backend.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    ASSERT_TRUE(busy.Wait());
    if (streaming) client.Until("data: x\n\n\r\n");
    client.Close();
    EXPECT_TRUE(closed.Wait(std::chrono::seconds(2))) << "streaming: " << streaming;
    ASSERT_TRUE(proxy.log.reported.Wait());
    EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kClientLeft));
  }
}

TEST(HttpProxy, TriesAnotherBackendIfTheFirstRefuses) {
  TestBackend good([](TestSocket& socket) { Serve(socket, Answer("good")); });
  Proxied proxy({DeadPort(), good.port()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  EXPECT_EQ(client.ReadAnswer().body, "good");
  EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 2; }));
  EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kUnreachable, Ended::kAnswered));
}

// D25.
TEST(HttpProxy, SendsARequestToAnotherBackendIfTheFirstDiesBeforeTheFirstByte) {
  for (const bool reset : {false, true}) {
    std::atomic<int> asked = 0;
    TestBackend dies([&](TestSocket& socket) {
      ReadWholeRequest(socket);
      ++asked;
      if (reset) socket.Reset();
    });
    TestBackend good([&](TestSocket& socket) { Serve(socket, Answer("good")); });
    Proxied proxy({dies.port(), good.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "good");
    EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 2; }));
    EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kDied, Ended::kAnswered));
    EXPECT_EQ(asked, 1);
  }
}

// What kills one backend may kill all of them: it gets two.
TEST(HttpProxy, SendsARequestThatKillsToTwoBackendsAtMost) {
  std::atomic<int> asked = 0;
  TestBackend dies([&](TestSocket& socket) {
    ReadWholeRequest(socket);
    ++asked;
    socket.Reset();
  });
  Proxied proxy({dies.port(), dies.port(), dies.port()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 502);
  EXPECT_THAT(answer.body, HasSubstr("upstream_failed"));
  EXPECT_THAT(answer.body, HasSubstr("the last of 2 tried"));
  EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 2; }));
  EXPECT_EQ(asked, 2);
}

TEST(HttpProxy, SendsARequestTwiceAtMostHoweverManyConnectionsProveDead) {
  std::atomic<int> connections = 0, requests = 0;
  TestBackend dies([&](TestSocket& socket) {
    const bool first = ++connections == 1;
    ReadWholeRequest(socket);
    ++requests;
    if (first) {
      socket.SendAll(Answer("a"));
      ReadWholeRequest(socket);
      ++requests;
    }
    socket.Reset();
  });
  for (const bool alone : {true, false}) {
    connections = 0;
    Proxied proxy(alone ? std::vector{dies.port()} : std::vector{dies.port(), dies.port(), dies.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "a");
    requests = 0;
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().status, 502);
    EXPECT_EQ(requests, 2);
  }
}

// It has closed an idle connection, and the other is down: the first is well, and asked anew.
TEST(HttpProxy, AsksABackendAnewIfItsConnectionProvesDeadAndNoOtherCanBeReached) {
  std::atomic<int> connections = 0;
  TestBackend backend([&](TestSocket& socket) {
    ++connections;
    ReadWholeRequest(socket);
    socket.SendAll(Answer("a"));
    ReadWholeRequest(socket);
  });
  Proxied proxy({backend.port(), DeadPort(), DeadPort()});
  TestSocket client = proxy.Client();
  for (int i = 0; i < 2; ++i) {
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "a");
  }
  EXPECT_EQ(connections, 2);
  EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 4; }));
  EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kAnswered, Ended::kDied, Ended::kUnreachable, Ended::kAnswered));
}

TEST(HttpProxy, DoesNotAskTwiceOnceAnAnswerBegan) {
  std::atomic<int> asked = 0;
  TestBackend half([&](TestSocket& socket) {
    ++asked;
    ReadWholeRequest(socket);
    socket.SendAll("HTTP/1.1 200 O");
  });
  Proxied proxy({half.port(), half.port()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 502);
  EXPECT_THAT(answer.body, HasSubstr("upstream_failed"));
  EXPECT_TRUE(answer.Has("x-down: 2"));
  EXPECT_EQ(asked, 1);
}

TEST(HttpProxy, GivesUpAfterTwoBackends) {
  Proxied proxy({DeadPort(), DeadPort(), DeadPort()});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 503);
  EXPECT_THAT(answer.body, HasSubstr("upstream_unreachable"));
  EXPECT_THAT(answer.body, HasSubstr("the last of 2 tried"));
  client.SendAll(kPost);
  EXPECT_EQ(client.ReadAnswer().status, 503) << "the connection goes on";
}

TEST(HttpProxy, SaysSoIfThereIsNoBackend) {
  Proxied proxy({});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 503);
  EXPECT_THAT(answer.body, HasSubstr("no_backend"));
}

TEST(HttpProxy, UsesAConnectionAgainAndANewOneIfThatProvesDead) {
  std::atomic<int> connections = 0;
  TestFlag closed;
  TestBackend backend([&](TestSocket& socket) {
    const int mine = ++connections;
    ReadWholeRequest(socket);
    socket.SendAll(Answer("a"));
    ReadWholeRequest(socket);
    if (mine == 1) {
      socket.SendAll(Answer("b"));
      ReadWholeRequest(socket);  // And dies with the third request in its hands.
      socket.Reset();
    } else {
      closed.Set();
    }
  });
  {
    Proxied proxy({backend.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "a");
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "b");
    EXPECT_EQ(connections, 1);
    client.SendAll(kPost);
    EXPECT_EQ(client.ReadAnswer().body, "a") << "the third goes out again on a second connection";
    EXPECT_EQ(connections, 2);
    EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 4; }));
    EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kAnswered, Ended::kAnswered, Ended::kDied, Ended::kAnswered));
  }
  EXPECT_TRUE(closed.Wait());
}

TEST(HttpProxy, EndsAnEventStreamThatBreaksOffWithAnErrorEvent) {
  for (const bool reset : {false, true}) {
    TestFlag seen;
    TestBackend backend([&](TestSocket& socket) {
      ReadWholeRequest(socket);
      socket.SendAll(kSseHead + Chunk("data: x\n\n"));
      seen.Wait();
      if (reset) socket.Reset();
    });
    Proxied proxy({backend.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    client.Until("data: x\n\n\r\n");
    seen.Set();
    const std::string last = client.ReadChunk();
    EXPECT_THAT(last, HasSubstr("data: {\"error\":{\"message\":\"the answer of 127.0.0.1:"));
    EXPECT_THAT(last, testing::EndsWith("}}\n\n"));
    EXPECT_EQ(client.Until("\r\n\r\n"), "0\r\n\r\n");
    client.SendAll(kPost);  // The connection is whole.
    client.Until("data: x\n\n\r\n");
    EXPECT_TRUE(Eventually([&] { return !proxy.log.All().empty(); }));
    EXPECT_EQ(proxy.log.All()[0], Ended::kCut);
  }
}

// Servers of HTTP/1.0 and others that send neither length nor chunks: the end of the connection may be a crash.
TEST(HttpProxy, EndsAnEventStreamWithoutItsLastEventWithAnErrorEvent) {
  for (const char* version : {"1.0", "1.1"}) {
    for (const bool finished : {true, false}) {
      TestBackend backend([&](TestSocket& socket) {
        ReadWholeRequest(socket);
        socket.SendAll("HTTP/" + std::string(version) +
                       " 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\ndata: x\n\n" +
                       (finished ? "data: [DONE]\n\n" : ""));
      });
      Proxied proxy({backend.port()}, {}, "data: [DONE]");
      TestSocket client = proxy.Client();
      client.SendAll(kPost);
      const TestAnswer answer = client.ReadAnswer();
      EXPECT_TRUE(answer.whole);
      EXPECT_THAT(answer.body, testing::StartsWith("data: x\n\ndata: "));
      if (finished) {
        EXPECT_THAT(answer.body, testing::EndsWith("data: [DONE]\n\n"));
      } else {
        EXPECT_THAT(answer.body, HasSubstr("data: {\"error\":{\"message\":\"the answer of 127.0.0.1:"));
      }
      EXPECT_TRUE(Eventually([&] { return !proxy.log.All().empty(); }));
      EXPECT_EQ(proxy.log.All()[0], finished ? Ended::kAnswered : Ended::kCut);
    }
  }
}

TEST(HttpProxy, TellsClientsWhoseAnswersTheStopCuts) {
  for (const bool began : {false, true}) {
    TestFlag busy, closed;
    TestBackend backend(NeverEnds(began, busy, closed));
    Proxied proxy({backend.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    ASSERT_TRUE(busy.Wait());
    if (began) {
      EXPECT_NE(client.Until("\r\n\r\n"), "");
      EXPECT_EQ(client.ReadChunk(), "data: x\n\n");
    }
    EXPECT_FALSE(proxy.server->Drain(std::chrono::milliseconds(0)));
    EXPECT_TRUE(closed.Wait());
    if (began) {
      EXPECT_THAT(client.ReadChunk(), testing::AllOf(testing::StartsWith("data: {\"error\":"),
                                                     HasSubstr("\"shutting_down\""), testing::EndsWith("\n\n")));
      EXPECT_EQ(client.Rest(), "0\r\n\r\n");
    } else {
      const TestAnswer answer = client.ReadAnswer();
      EXPECT_EQ(answer.status, 503);
      EXPECT_TRUE(answer.Has("retry-after: 1"));
      EXPECT_THAT(answer.body, HasSubstr("\"shutting_down\""));
    }
    EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kStopped)) << "it was not the client that left";
  }
}

TEST(HttpProxy, CutsAnyOtherAnswerThatBreaksOff) {
  for (const std::string head :
       {"Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"}) {
    TestBackend backend([&](TestSocket& socket) {
      ReadWholeRequest(socket);
      socket.SendAll("HTTP/1.1 200 OK\r\n" + head);
    });
    Proxied proxy({backend.port()});
    TestSocket client = proxy.Client();
    client.SendAll(kPost);
    EXPECT_FALSE(client.ReadAnswer().whole);
  }
}

TEST(HttpProxy, CutsASilentBackendAfterItsTimeout) {
  std::atomic<int> asked = 0;
  TestBackend silent([&](TestSocket& socket) {
    ++asked;
    socket.PeerCloses();
  });
  Proxied proxy({silent.port(), silent.port()}, {.first_byte_timeout = std::chrono::milliseconds(100)});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 504);
  EXPECT_THAT(answer.body, HasSubstr("upstream_timeout"));
  EXPECT_EQ(asked, 1) << "a backend that is slow is not helped by asking the next one";
}

TEST(HttpProxy, CutsABackendThatFallsSilentInTheMiddle) {
  TestBackend backend([&](TestSocket& socket) {
    ReadWholeRequest(socket);
    socket.SendAll(kSseHead + Chunk("data: x\n\n"));
    socket.PeerCloses();
  });
  Proxied proxy({backend.port()}, {.idle_timeout = std::chrono::milliseconds(100)});
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_TRUE(answer.whole);
  EXPECT_THAT(answer.body, HasSubstr("it sent nothing in time"));
}

TEST(HttpProxy, PassesOnWhatABackendAnswersBeforeItReadTheRequest) {
  TestBackend backend([&](TestSocket& socket) {
    socket.Until("\r\n\r\n");
    socket.SendAll("HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig");
    socket.CloseSending();
    socket.Rest();
  });
  Proxied proxy({backend.port()});
  TestSocket client = proxy.Client();
  client.SendAll("POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 8000000\r\n\r\n" + std::string(8000000, 'x'));
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_EQ(answer.status, 413);
  EXPECT_EQ(answer.body, "big");
}

TEST(HttpProxy, PassesBigBodiesBothWays) {
  const std::string up(20 << 20, 'u'), down(20 << 20, 'd');
  std::atomic<bool> arrived = false;
  TestBackend backend([&](TestSocket& socket) {
    socket.Until("\r\n\r\n");
    arrived = socket.Exactly(up.size()) == up;
    socket.SendAll(Answer(down));
  });
  Proxied proxy({backend.port()});
  TestSocket client = proxy.Client();
  client.SendAll("POST / HTTP/1.1\r\nHost: r\r\nContent-Length: " + std::to_string(up.size()) + "\r\n\r\n" + up);
  EXPECT_EQ(client.ReadAnswer().body, down);
  EXPECT_TRUE(arrived);
}

TEST(HttpProxy, PassesAnswersToOldClientsWithoutChunks) {
  TestBackend backend([&](TestSocket& socket) {
    ReadWholeRequest(socket);
    socket.SendAll(kSseHead + Chunk("data: x\n\n") + "0\r\n\r\n");
  });
  Proxied proxy({backend.port()});
  TestSocket client = proxy.Client();
  client.SendAll("POST / HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody");
  const TestAnswer answer = client.ReadAnswer();
  EXPECT_THAT(answer.head, Not(HasSubstr("chunked")));
  EXPECT_EQ(answer.body, "data: x\n\n");
}

TEST(HttpProxy, LooksNamesUpAndSaysWhenThereIsNone) {
  TestBackend good([](TestSocket& socket) { Serve(socket, Answer("good")); });
  Proxied proxy({});
  proxy.backends = {std::make_shared<Backend>("no-such-host.invalid", 80),
                    std::make_shared<Backend>("localhost", good.port())};
  TestSocket client = proxy.Client();
  client.SendAll(kPost);
  EXPECT_EQ(client.ReadAnswer().body, "good");
  EXPECT_TRUE(Eventually([&] { return proxy.log.All().size() == 2; }));
  EXPECT_THAT(proxy.log.All(), ElementsAre(Ended::kUnreachable, Ended::kAnswered));
  EXPECT_EQ(Backend("::1", 8000).authority(), "[::1]:8000");
}

TEST(HttpProxy, FetchesFromAllBackendsAtOnce) {
  TestBackend one([](TestSocket& socket) {
    socket.Until("\r\n\r\n");
    socket.SendAll("HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n" + Chunk("on") +
                   Chunk("e") + "0\r\n\r\n");
  });
  TestBackend silent([](TestSocket& socket) { socket.PeerCloses(); });
  const std::vector<std::shared_ptr<Backend>> backends = {std::make_shared<Backend>("127.0.0.1", one.port()),
                                                          std::make_shared<Backend>("127.0.0.1", silent.port()),
                                                          std::make_shared<Backend>("127.0.0.1", DeadPort())};
  auto server = Server::Start({}, [&](Request request, std::shared_ptr<Responder> responder) {
    Responder& its = *responder;
    Fetch(its, request, backends, {.timeout = std::chrono::milliseconds(300)},
          [responder = std::move(responder)](std::vector<FetchResult> results) {
            std::string text;
            for (const FetchResult& r : results)
              text += std::to_string(r.status) + " " + r.content_type + " " + r.body + "\n";
            responder->Send(200, {}, text);
          });
  });
  TestSocket client = TestSocket::Dial((*server)->port());
  client.SendAll("GET / HTTP/1.1\r\n\r\n");
  EXPECT_EQ(client.ReadAnswer().body, "200 a/b one\n0  it sent nothing in time\n0  Connection refused\n");
}

}  // namespace
}  // namespace terrace::http
