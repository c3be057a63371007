// Would catch: memory of a session or backend connection used after its end, data shared between reactor threads, a
// coroutine or counter that is left behind, an answer that is short, wrong or another client's, when clients vanish at
// any moment and a backend fails in every way it can. Meant for the address and thread sanitizers.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "http/proxy.h"
#include "http/server.h"
#include "http/test_socket.h"

namespace terrace::http {
namespace {

constexpr int kClients = 32;
constexpr int kEvents = 20;
constexpr std::chrono::seconds kPhase{5};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int Below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  bool OneIn(int n) { return Below(n) == 0; }

 private:
  std::mt19937 engine_;
};

// Up to `ms`, or until the peer leaves: how both sides here take their time.
void Linger(TestSocket& socket, int ms) {
  pollfd watched{socket.fd(), POLLRDHUP, 0};
  ::poll(&watched, 1, ms);
}

// True once something can be read.
bool HasMore(TestSocket& socket, int ms) {
  pollfd watched{socket.fd(), POLLIN, 0};
  return ::poll(&watched, 1, ms) > 0;
}

std::string Chunk(const std::string& bytes) {
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  return size + bytes + "\r\n";
}

// What a request with this path is answered by a good backend: each of its events names the request.
std::string EventsOf(const std::string& path) {
  std::string all;
  for (int i = 0; i < kEvents; ++i) all += "data: " + path + " " + std::to_string(i) + "\n\n";
  return all;
}

struct BackendRequest {
  std::string path, body;
  bool whole = false;
};
BackendRequest ReadRequest(TestSocket& socket) {
  BackendRequest request;
  const std::string head = socket.Until("\r\n\r\n");
  const size_t length = head.find("Content-Length: ");
  if (length == std::string::npos) return request;
  request.path = head.substr(5, head.find(' ', 5) - 5);
  const size_t size = std::strtoull(head.c_str() + length + 16, nullptr, 10);
  request.body = socket.Exactly(size);
  request.whole = request.body.size() == size;
  return request;
}

std::atomic<unsigned> connection_seed{1};

// Answers every request rightly: a stream of events, or the body in one piece.
void ServeWell(TestSocket& socket) {
  Random random(connection_seed++);
  for (;;) {
    const BackendRequest request = ReadRequest(socket);
    if (!request.whole) return;
    if (request.path.ends_with("/whole")) {
      const std::string answer = request.path + request.body;
      if (!socket.SendAll("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(answer.size()) + "\r\n\r\n" +
                          answer)) {
        return;
      }
      continue;
    }
    socket.SendAll("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < kEvents; ++i) {
      if (random.OneIn(4)) Linger(socket, random.Below(4));
      if (!socket.SendAll(Chunk("data: " + request.path + " " + std::to_string(i) + "\n\n"))) return;
    }
    if (!socket.SendAll("0\r\n\r\n")) return;
  }
}

// Fails in every way it knows, and now and then does not.
void ServeBadly(TestSocket& socket) {
  Random random(connection_seed++);
  for (;;) {
    if (random.OneIn(30)) return random.OneIn(2) ? socket.Reset() : socket.Close();
    const BackendRequest request = ReadRequest(socket);
    if (!request.whole) return;
    const std::string head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
    switch (random.Below(12)) {
      case 0: socket.SendAll("HTTP/1.1 999 garbage\r\nContent-Length: x\r\n\r\n"); return;
      case 1: socket.SendAll("garbage\r\n\r\n"); return;
      case 2: return socket.Reset();
      case 3:
        Linger(socket, random.Below(300));  // Also longer than the proxy waits.
        break;
      case 4: socket.SendAll("HTTP/1.1 100 Continue\r\n\r\n"); break;
      case 5: socket.SendAll("HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end"); return;
      case 6: socket.SendAll(head + "Connection: close\r\nContent-Length: 3\r\n\r\nabc"); return;
      case 7: socket.SendAll("HTTP/1.1 200 O"); return;
      case 8: socket.SendAll("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"); return;
      case 9: socket.SendAll(head + "Transfer-Encoding: chunked\r\n\r\n" + Chunk("data: x\n\n") + "zz\r\n"); return;
      default: break;
    }
    const int cut = random.OneIn(3) ? random.Below(kEvents) : kEvents;
    socket.SendAll(head + "Transfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < cut; ++i) {
      if (random.OneIn(4)) Linger(socket, random.Below(4));
      if (!socket.SendAll(Chunk("data: x\n\n"))) return;
    }
    if (cut < kEvents) {
      socket.SendAll("20\r\nhalf a chunk");
      return random.OneIn(2) ? socket.Reset() : socket.Close();
    }
    if (!socket.SendAll("0\r\n\r\nHTTP/1.1 200 surplus\r\n\r\n")) return;
  }
}

struct Tally {
  std::atomic<int> whole{0}, vanished{0}, wrong{0}, failed{0};
};

std::string RequestBytes(const std::string& path, const std::string& body, Random& random) {
  std::string bytes = "POST " + path + " HTTP/1.1\r\nHost: t\r\n";
  if (!random.OneIn(3)) return bytes + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  bytes += "Transfer-Encoding: chunked\r\n\r\n";
  for (size_t at = 0; at < body.size();) {
    const size_t n = std::min(body.size() - at, static_cast<size_t>(1 + random.Below(40000)));
    bytes += Chunk(body.substr(at, n));
    at += n;
  }
  return bytes + "0\r\n\r\n";
}

// Leaves at some moment of the answer, in one of the ways one can leave.
void Vanish(TestSocket& socket, Random& random) {
  for (int i = random.Below(6); i > 0; --i) {
    if (HasMore(socket, random.Below(15)) && !socket.More()) break;
  }
  if (random.OneIn(4)) {
    socket.CloseSending();
    Linger(socket, random.Below(20));
  }
  if (random.OneIn(2)) socket.Reset();
}

// One client: connection after connection until `end`.
void RunClient(uint16_t port, unsigned seed, std::chrono::steady_clock::time_point end, Tally& tally) {
  Random random(seed);
  for (int connection = 0; std::chrono::steady_clock::now() < end; ++connection) {
    TestSocket socket = TestSocket::Dial(port);
    if (!socket.connected()) {
      ++tally.wrong;
      return;
    }
    for (int i = 0, n = 1 + random.Below(5); i < n; ++i) {
      const bool whole = random.OneIn(4);
      const std::string path = "/" + std::to_string(seed) + "/" + std::to_string(connection) + "/" + std::to_string(i) +
                               (whole ? "/whole" : "/events");
      const std::string body(static_cast<size_t>(random.OneIn(20) ? 300000 : random.Below(3000)), 'x');
      std::string bytes = RequestBytes(path, body, random);
      if (random.OneIn(8)) {  // In the upload.
        socket.SendAll(bytes.substr(0, static_cast<size_t>(random.Below(static_cast<int>(bytes.size())))));
        Vanish(socket, random);
        ++tally.vanished;
        break;
      }
      const bool pipelined = random.OneIn(10);
      if (pipelined) bytes += RequestBytes("/again/whole", "y", random);
      if (!socket.SendAll(bytes)) {
        ++tally.failed;
        break;
      }
      if (random.OneIn(2)) {
        Vanish(socket, random);
        ++tally.vanished;
        break;
      }
      const TestAnswer answer = socket.ReadAnswer();
      bool right = answer.whole && answer.status == 200 && answer.body == (whole ? path + body : EventsOf(path));
      if (pipelined && answer.whole) right &= socket.ReadAnswer().body == "/again/wholey";
      ++(right ? tally.whole : tally.failed);
      if (!answer.whole) break;
    }
  }
}

// Sends each request to all backends in turn.
class Spread final : public Route {
 public:
  Spread(const std::vector<std::shared_ptr<Backend>>& backends, size_t first) : backends_(backends), next_(first) {}
  std::shared_ptr<Backend> Next() override { return backends_[next_++ % backends_.size()]; }
  void Report(Backend&, Ended, int, const std::string&) override {}

 private:
  const std::vector<std::shared_ptr<Backend>>& backends_;
  size_t next_;
};

class HttpStress : public testing::Test {
 protected:
  // Runs all clients against a proxy over these backends, and stops everything.
  void Run(const std::vector<uint16_t>& ports) {
    std::vector<std::shared_ptr<Backend>> backends;
    for (const uint16_t port : ports) backends.push_back(std::make_shared<Backend>("127.0.0.1", port));
    std::atomic<size_t> turn = 0;
    const ProxyOptions options{.first_byte_timeout = std::chrono::milliseconds(ports.size() > 1 ? 100 : 20000)};
    auto server = Server::Start({.threads = 2}, [&](Request request, std::shared_ptr<Responder> responder) {
      Forward(std::move(responder), {.request = std::move(request)}, std::make_unique<Spread>(backends, turn++),
              options);
    });
    ASSERT_TRUE(server) << server.error().what;
    const unsigned seed = std::random_device{}();
    RecordProperty("seed", std::to_string(seed));
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto end = std::chrono::steady_clock::now() + kPhase;
    std::vector<std::thread> clients;
    for (unsigned i = 0; i < kClients; ++i) {
      clients.emplace_back(RunClient, (*server)->port(), seed + i, end, std::ref(tally));
    }
    for (std::thread& client : clients) client.join();

    // Nothing is left of the clients, and nothing but idle connections of the backends.
    EXPECT_TRUE(Eventually([&] {
      const ServerStats stats = (*server)->stats();
      const bool in_flight =
          std::any_of(backends.begin(), backends.end(), [](const auto& b) { return b->in_flight() != 0; });
      return stats.connections == 0 && stats.watchers == 0 && !in_flight;
    })) << (*server)->stats().connections
        << " connections, " << (*server)->stats().watchers << " watchers";
    EXPECT_TRUE((*server)->Drain(std::chrono::seconds(10)));
    EXPECT_EQ((*server)->stats().upstreams, 0);
    std::printf("%d whole, %d vanished, %d failed\n", tally.whole.load(), tally.vanished.load(), tally.failed.load());
    EXPECT_EQ(tally.wrong, 0);
    EXPECT_GT(tally.whole, kClients);
    EXPECT_GT(tally.vanished, kClients);
  }

  Tally tally;
};

TEST_F(HttpStress, GivesEveryClientThatStaysItsOwnWholeAnswer) {
  TestBackend good(ServeWell);
  Run({good.port()});
  EXPECT_EQ(tally.failed, 0) << "a short or wrong answer, although the backend is good";
}

TEST_F(HttpStress, OutlivesBackendsThatFailInAnyWay) {
  TestBackend good(ServeWell), bad(ServeBadly), worse(ServeBadly);
  Run({good.port(), bad.port(), worse.port()});
  EXPECT_GT(tally.failed, 0) << "the backends were meant to fail";
}

}  // namespace
}  // namespace terrace::http
