// Would catch: a backend that hangs, or says that it is ill, and goes on getting requests; one that never comes back; a
// router that calls itself healthy while nothing behind it works.
#include "router/checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "http/test_socket.h"
#include "router/routes.h"

namespace terrace::router {
namespace {

using http::Eventually;
using http::TestBackend;
using http::TestSocket;
using testing::HasSubstr;

constexpr std::chrono::milliseconds kTimeout{300};

// Answers each request with the status that is set; 0: with nothing, for as long as the client waits.
class Backend {
 public:
  std::atomic<int> status{200};
  std::atomic<int> asked{0};
  uint16_t port() const { return backend_.port(); }

 private:
  void Serve(TestSocket& socket) {
    while (!socket.Until("\r\n\r\n").empty()) {
      ++asked;
      const int now = status;
      if (now == 0) {
        socket.PeerCloses();
        return;
      }
      if (!socket.SendAll("HTTP/1.1 " + std::to_string(now) + " X\r\nContent-Length: 0\r\n\r\n")) return;
    }
  }
  TestBackend backend_{[this](TestSocket& socket) { Serve(socket); }};
};

// A router over these ports, model "m" each.
class Router {
 public:
  explicit Router(const std::vector<uint16_t>& ports) {
    std::vector<StaticBackend> backends;
    for (const uint16_t port : ports) backends.push_back({"127.0.0.1", port, "m"});
    fleet_ = std::make_unique<Fleet>(backends, clock_, metrics_);
    routes_ = std::make_unique<Routes>(*fleet_, metrics_, http::ProxyOptions{});
    auto server = http::Server::Start({}, [this](http::Request request, std::shared_ptr<http::Responder> responder) {
      routes_->Handle(std::move(request), std::move(responder));
    });
    if (!server) std::abort();
    server_ = std::move(*server);
    checks_ = std::make_unique<Checks>(*server_, *fleet_, kTimeout);
  }
  // Checks until backend i is in this state.
  bool Becomes(size_t i, BackendState state) {
    return Eventually([&] {
      checks_->Begin();
      return fleet_->health()[i].state == state;
    });
  }
  http::TestAnswer Health() {
    TestSocket client = TestSocket::Dial(server_->port());
    client.SendAll("GET /health HTTP/1.1\r\nHost: r\r\n\r\n");
    return client.ReadAnswer();
  }
  std::string why(size_t i) { return fleet_->health()[i].why; }
  // Where the next request goes first.
  uint16_t Next() { return fleet_->RouteFor("m")->Next()->port(); }

 private:
  SystemClock clock_;
  Metrics metrics_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Routes> routes_;
  std::unique_ptr<http::Server> server_;
  std::unique_ptr<Checks> checks_;
};

TEST(RouterChecks, BackendThatHangsIsLeftOutAndComesBackByItself) {
  Backend good, hangs;
  Router router({good.port(), hangs.port()});
  ASSERT_TRUE(router.Becomes(0, BackendState::kInUse));
  ASSERT_TRUE(router.Becomes(1, BackendState::kInUse));
  hangs.status = 0;
  ASSERT_TRUE(router.Becomes(1, BackendState::kLeftOut));
  EXPECT_EQ(router.why(1), "it sent nothing in time");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(router.Next(), good.port());
  hangs.status = 200;
  ASSERT_TRUE(router.Becomes(1, BackendState::kInUse));
  EXPECT_NE(router.Next(), router.Next());
}

TEST(RouterChecks, BackendIsLeftOutIfItSaysThatItIsIllAndForNothingElse) {
  Backend backend;
  Router router({backend.port()});
  backend.status = 503;
  ASSERT_TRUE(router.Becomes(0, BackendState::kLeftOut));
  EXPECT_EQ(router.why(0), "GET /health: 503");
  backend.status = 404;
  EXPECT_TRUE(router.Becomes(0, BackendState::kInUse)) << "it knows no such page, but it answers";
}

TEST(RouterChecks, HealthIs503WithWhyAsLongAsNoBackendAnswers) {
  Backend backend;
  uint16_t dead = 0;
  {
    TestBackend gone([](TestSocket&) {});
    dead = gone.port();
  }
  Router router({backend.port(), dead});
  http::TestAnswer health = router.Health();
  EXPECT_EQ(health.status, 503);
  EXPECT_THAT(health.body, HasSubstr("not asked yet"));

  backend.status = 500;
  ASSERT_TRUE(router.Becomes(0, BackendState::kLeftOut));
  ASSERT_TRUE(router.Becomes(1, BackendState::kLeftOut));
  health = router.Health();
  EXPECT_EQ(health.status, 503);
  EXPECT_THAT(health.body, HasSubstr(R"("status":"unavailable","why":"http://127.0.0.1:)"));
  EXPECT_THAT(health.body, HasSubstr("GET /health: 500; http://127.0.0.1:"));
  EXPECT_THAT(health.body, HasSubstr("Connection refused"));

  backend.status = 200;
  ASSERT_TRUE(router.Becomes(0, BackendState::kInUse));
  health = router.Health();
  EXPECT_EQ(health.status, 200);
  EXPECT_THAT(health.body, HasSubstr(R"("status":"degraded")"));
}

TEST(RouterChecks, BackendThatIsBeingAskedIsNotAskedAgain) {
  Backend backend;
  backend.status = 0;
  Router router({backend.port()});
  ASSERT_TRUE(router.Becomes(0, BackendState::kLeftOut));  // Begin() was called a few hundred times meanwhile.
  EXPECT_LE(backend.asked, 2);
}

}  // namespace
}  // namespace terrace::router
