// Would catch: a flag of the guide that is not understood; a URL that is skipped in silence and shifts all models by
// one; an unfair turn; a dead backend that is asked again and again, or never again.
#include "router/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "router/body.h"
#include "router/fleet.h"
#include "router/options.h"

namespace terrace::router {
namespace {

using http::Ended;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

Result<Options> Parse(std::vector<std::string> args) {
  const auto parsed = config::Load(Schema(), args, [](const std::string&) { return std::nullopt; });
  if (!parsed) return tl::unexpected(parsed.error());
  return ReadOptions(parsed->values);
}

TEST(RouterOptions, TakeTheGuidesCommandAsItIs) {
  const auto options = Parse({"--port", "8000", "--service-discovery", "static", "--static-backends",
                              "http://localhost:8001,http://localhost:8002", "--static-models",
                              "Qwen/Qwen3-8B,Qwen/Qwen3-8B", "--routing-logic", "roundrobin"});
  ASSERT_TRUE(options) << options.error().what;
  EXPECT_EQ(options->http.port, 8000);
  EXPECT_EQ(options->http.host, "0.0.0.0");
  ASSERT_EQ(options->backends.size(), 2);
  EXPECT_EQ(options->backends[1].host, "localhost");
  EXPECT_EQ(options->backends[1].port, 8002);
  EXPECT_EQ(options->backends[1].model, "Qwen/Qwen3-8B");
}

TEST(RouterOptions, ListenOn8001IfNothingIsSaid) {
  const auto options = Parse({"--static-backends", "http://a", "--static-models", "m"});
  ASSERT_TRUE(options) << options.error().what;
  EXPECT_EQ(options->http.port, 8001);
}

TEST(RouterOptions, RefuseChecksWithoutAPause) {
  for (const char* name : {"--health-check-interval", "--health-check-timeout"}) {
    const auto options = Parse({"--static-backends", "http://a", "--static-models", "m", name, "0"});
    ASSERT_FALSE(options);
    EXPECT_THAT(options.error().what, HasSubstr(name));
  }
}

TEST(RouterOptions, TakeUrlsThatOthersSkip) {
  const auto is = [](std::string_view url, const std::string& host, uint16_t port) {
    const auto address = ParseBackendUrl(url);
    ASSERT_TRUE(address) << address.error().what;
    EXPECT_EQ(address->host, host) << url;
    EXPECT_EQ(address->port, port) << url;
  };
  is("http://vllm:8000", "vllm", 8000);
  is("http://vllm", "vllm", 80);
  is("http://my_engine-0.svc.cluster.local:1/", "my_engine-0.svc.cluster.local", 1);
  is("http://10.0.0.7:65535", "10.0.0.7", 65535);
  is("http://[::1]:8000", "::1", 8000);
  is("http://[2001:db8::1]", "2001:db8::1", 80);
}

TEST(RouterOptions, NameTheUrlThatIsWrong) {
  for (const char* url : {"vllm:8000", "https://vllm", "http://", "http://:8000", "http://vllm:", "http://vllm:0",
                          "http://vllm:65536", "http://vllm:80x", "http://vllm/v1", "http://a b", "http://[::1",
                          "http://[vllm]", "http://[::1]8000", "http://::1:8000", "ftp://vllm"}) {
    const auto options = Parse({"--static-backends", std::string("http://good,") + url, "--static-models", "m,m"});
    ASSERT_FALSE(options) << url;
    EXPECT_THAT(options.error().what, HasSubstr(std::string("\"") + url + "\"")) << url;
  }
}

TEST(RouterOptions, ShowNoSecretOfAUrl) {
  for (const auto& [url, why] : {std::pair("http://user:sesame@vllm", "it has credentials in it"),
                                 std::pair("http://user:ses/ame@vllm:80", "it has credentials in it"),
                                 std::pair("user:sesame@vllm", "it has credentials in it"),
                                 std::pair("http://vllm?key=sesame", "it has a query"),
                                 std::pair("http://vllm:80/?key=sesame", "it has a query")}) {
    const auto options = Parse({"--static-backends", url, "--static-models", "m"});
    ASSERT_FALSE(options) << url;
    EXPECT_THAT(options.error().what, HasSubstr(why)) << url;
    EXPECT_THAT(options.error().what, Not(HasSubstr("ses"))) << url;
  }
}

TEST(RouterOptions, WantTimeForAnAnswer) {
  for (const char* name : {"first-byte-timeout", "idle-timeout"}) {
    const auto options =
        Parse({"--static-backends", "http://a", "--static-models", "m", std::string("--") + name + "=0"});
    ASSERT_FALSE(options);
    EXPECT_THAT(options.error().what, HasSubstr(name));
  }
}

TEST(RouterOptions, SayBothCountsIfTheyDiffer) {
  const auto options = Parse({"--static-backends", "http://a,http://b", "--static-models", "m"});
  ASSERT_FALSE(options);
  EXPECT_THAT(options.error().what, HasSubstr("2 URLs in --static-backends, but 1 name in --static-models"));
  EXPECT_FALSE(Parse({"--static-backends", ",", "--static-models", ","}));
}

TEST(RouterBody, MergesListsByIdAndKeepsAllFields) {
  EXPECT_EQ(MergeModelLists({R"({"object":"list","data":[{"id":"a","max_model_len":7},{"id":"b"}]})", "not json",
                             R"({"data":[{"id":"b","later":1},{"id":"c"},{"noid":1},5]})", R"({"data":{}})"}),
            R"({"object":"list","data":[{"id":"a","max_model_len":7},{"id":"b"},{"id":"c"}]})");
  EXPECT_EQ(MergeModelLists({}), R"({"object":"list","data":[]})");
}

// A backend gone mad is no reason to end.
TEST(RouterBody, SurvivesAListThatIsNestedWithoutEnd) {
  const size_t deep = 1 << 20;
  EXPECT_THAT(MergeModelLists({R"({"data":[{"id":"a","x":)" + std::string(deep, '[') + std::string(deep, ']') + "}]}",
                               R"({"data":[{"id":"b"}]})"}),
              HasSubstr(R"({"id":"b"})"));
}

class RouterFleet : public testing::Test {
 protected:
  Fleet& Make(std::vector<StaticBackend> backends) {
    fleet_ = std::make_unique<Fleet>(backends, clock_, metrics_);
    return *fleet_;
  }
  // The backend that one request for `model` goes to first, which then ends like this.
  std::string One(const std::string& model, Ended ended = Ended::kAnswered) {
    const auto route = fleet_->RouteFor(model);
    const auto backend = route->Next();
    route->Report(*backend, ended, 0, "why");
    return backend->authority();
  }

  SystemClock clock_;
  Metrics metrics_;
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(RouterFleet, TakesTurnsForEachModel) {
  Make({{"a", 1, "x"}, {"b", 1, "x"}, {"c", 1, "y"}});
  std::vector<std::string> went;
  for (int i = 0; i < 4; ++i) {
    went.push_back(One("x"));
    EXPECT_EQ(One("y"), "c:1") << "one model's turns do not move another's";
  }
  EXPECT_THAT(went, ElementsAre("a:1", "b:1", "a:1", "b:1"));
  EXPECT_EQ(fleet_->RouteFor("z"), nullptr);
}

TEST_F(RouterFleet, SharesTheTurnsOfOneThatIsLeftOutAmongTheOthers) {
  Make({{"a", 1, "x"}, {"b", 1, "x"}, {"c", 1, "x"}});
  fleet_->NoteCheck(*fleet_->backends()[0], "it hangs");
  EXPECT_EQ(fleet_->answering().size(), 2);
  std::map<std::string, int> went;
  for (int i = 0; i < 6; ++i) ++went[One("x")];
  EXPECT_THAT(went, ElementsAre(testing::Pair("b:1", 3), testing::Pair("c:1", 3)));
}

TEST_F(RouterFleet, TriesEachBackendOnceForARequest) {
  Make({{"a", 1, "x"}, {"b", 1, "x"}});
  const auto route = fleet_->RouteFor("x");
  EXPECT_EQ(route->Next()->authority(), "a:1");
  EXPECT_EQ(route->Next()->authority(), "b:1");
  EXPECT_EQ(route->Next(), nullptr);
}

TEST_F(RouterFleet, TakesAUrlWithTwoModelsForOneBackend) {
  Make({{"a", 1, "x"}, {"a", 1, "y"}, {"a", 1, "x"}});
  EXPECT_EQ(fleet_->backends().size(), 1);
  EXPECT_THAT(fleet_->health()[0].models, ElementsAre("x", "y"));
}

TEST_F(RouterFleet, LeavesAnUnreachableBackendOutUntilACheckFindsItWell) {
  Make({{"a", 1, "x"}, {"b", 1, "x"}});
  EXPECT_EQ(One("x", Ended::kUnreachable), "a:1");
  EXPECT_EQ(fleet_->health()[0].state, BackendState::kLeftOut);
  EXPECT_EQ(fleet_->health()[0].why, "why");
  for (int i = 0; i < 4; ++i) EXPECT_EQ(One("x"), "b:1");
  fleet_->NoteCheck(*fleet_->backends()[0], "");
  EXPECT_EQ(fleet_->health()[0].state, BackendState::kInUse);
  EXPECT_NE(One("x"), One("x"));
}

TEST_F(RouterFleet, TriesBackendsThatAreLeftOutIfThereAreNoOthers) {
  Make({{"a", 1, "x"}, {"b", 1, "x"}});
  for (const auto& backend : fleet_->backends()) fleet_->NoteCheck(*backend, "it hangs");
  EXPECT_NE(One("x"), "");
  EXPECT_EQ(fleet_->answering().size(), 2);
  EXPECT_EQ(fleet_->health()[0].state, BackendState::kLeftOut) << "only a check brings it back";
}

TEST_F(RouterFleet, DoesNotBlameABackendForClientsThatLeaveOrAnswersThatFail) {
  Make({{"a", 1, "x"}});
  for (const Ended ended : {Ended::kClientLeft, Ended::kDied, Ended::kTimedOut, Ended::kBadAnswer, Ended::kCut}) {
    One("x", ended);
    EXPECT_NE(fleet_->health()[0].state, BackendState::kLeftOut);
  }
  EXPECT_THAT(metrics_.Text(), HasSubstr("terrace_router_attempts_total{backend=\"http://a:1\",outcome=\"cut\"} 1"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("terrace_router_backend_in_use{backend=\"http://a:1\"} 1"));
}

TEST(RunRouter, RefusesWhatTheUserMustMend) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(RunRouter({"--static-backends", "http://a", "--static-models", "m,n"}), 2);
  EXPECT_EQ(RunRouter({"--static-backend", "http://a"}), 2);
  EXPECT_EQ(RunRouter({}), 2);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("did you mean --static-backends?"));
}

}  // namespace
}  // namespace terrace::router
