// Would catch: an answer that clients of OpenAI's API can't read, usage that does not add up, a stream without its end,
// and bytes that are no UTF-8 reaching a client.
#include "openai/format.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace terrace::openai {
namespace {

using Json = nlohmann::json;

const AnswerHead kChat{.chat = true, .id = "chatcmpl-1", .created = 7, .model = "m"};
const AnswerHead kCompletion{.chat = false, .id = "cmpl-1", .created = 7, .model = "m"};

Usage SomeUsage() {
  Usage usage{.prompt_tokens = 700, .completion_tokens = 5, .cached = {}};
  usage.cached.Add("engine", 256);
  usage.cached.Add("shared_fs", 256);
  usage.cached.miss_reason = "not_found";
  return usage;
}

std::vector<std::string> Events(const std::string& stream) {
  std::vector<std::string> events;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = stream.find("\n\n", at);
    EXPECT_NE(end, std::string::npos);
    EXPECT_EQ(stream.substr(at, 6), "data: ");
    events.push_back(stream.substr(at + 6, end - at - 6));
    at = end + 2;
  }
  return events;
}

TEST(OpenAiFormat, UsageSumsTheTiersAndNamesThemAll) {
  const Json body = Json::parse(AnswerBody(kChat, "hi", "stop", SomeUsage()));
  const Json& usage = body["usage"];
  EXPECT_EQ(usage["prompt_tokens"], 700);
  EXPECT_EQ(usage["total_tokens"], 705);
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 512);
  EXPECT_EQ(usage["terrace"]["cached_by_tier"],
            Json({{"engine", 256}, {"ram", 0}, {"disk", 0}, {"shared_fs", 256}, {"s3", 0}}));
  EXPECT_EQ(usage["terrace"]["miss_reason"], "not_found");
}

TEST(OpenAiFormat, WholeAnswersHaveTheShapeOfTheirEndpoint) {
  const Json chat = Json::parse(AnswerBody(kChat, "hi", "stop", {}));
  EXPECT_EQ(chat["object"], "chat.completion");
  EXPECT_EQ(chat["choices"][0]["message"], Json({{"role", "assistant"}, {"content", "hi"}}));
  EXPECT_EQ(chat["choices"][0]["finish_reason"], "stop");
  const Json completion = Json::parse(AnswerBody(kCompletion, "hi", "length", {}));
  EXPECT_EQ(completion["object"], "text_completion");
  EXPECT_EQ(completion["choices"][0]["text"], "hi");
  EXPECT_EQ(completion["choices"][0]["finish_reason"], "length");
}

TEST(OpenAiFormat, ChatStreamIsRoleTextFinishUsageDone) {
  const Usage usage = SomeUsage();
  const auto events =
      Events(StreamStart(kChat, true) + StreamText(kChat, "hi", true) + StreamEnd(kChat, "stop", &usage));
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(Json::parse(events[0])["choices"][0]["delta"]["role"], "assistant");
  const Json text = Json::parse(events[1]);
  EXPECT_EQ(text["object"], "chat.completion.chunk");
  EXPECT_EQ(text["choices"][0]["delta"]["content"], "hi");
  EXPECT_TRUE(text["choices"][0]["finish_reason"].is_null());
  EXPECT_TRUE(text.contains("usage") && text["usage"].is_null());
  EXPECT_EQ(Json::parse(events[2])["choices"][0]["finish_reason"], "stop");
  const Json last = Json::parse(events[3]);
  EXPECT_TRUE(last["choices"].is_array() && last["choices"].empty());
  EXPECT_EQ(last["usage"]["prompt_tokens_details"]["cached_tokens"], 512);
  EXPECT_EQ(events[4], "[DONE]");
}

TEST(OpenAiFormat, StreamWithoutUsageHasNoUsageField) {
  const auto events = Events(StreamStart(kCompletion, false) + StreamText(kCompletion, "a", false) +
                             StreamEnd(kCompletion, "length", nullptr));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(Json::parse(events[0])["choices"][0]["text"], "a");
  EXPECT_FALSE(Json::parse(events[0]).contains("usage"));
  EXPECT_EQ(Json::parse(events[1])["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(events[2], "[DONE]");
}

TEST(OpenAiFormat, BytesThatAreNoUtf8AreReplaced) {
  const Json body = Json::parse(AnswerBody(kChat,
                                           "a\xff"
                                           "b",
                                           "stop", {}));
  EXPECT_EQ(body["choices"][0]["message"]["content"],
            "a\xef\xbf\xbd"
            "b");
}

TEST(OpenAiFormat, ErrorsHaveNullsForWhatIsNotKnown) {
  const Json body = Json::parse(ErrorBody({.status = 400, .message = "m", .param = "p"}));
  EXPECT_EQ(body["error"]["message"], "m");
  EXPECT_EQ(body["error"]["type"], "invalid_request_error");
  EXPECT_EQ(body["error"]["param"], "p");
  EXPECT_TRUE(body["error"]["code"].is_null());
  const auto events = Events(StreamError({.status = 500, .message = "m"}));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(Json::parse(events[0]).contains("error"));
}

TEST(OpenAiFormat, IdsDiffer) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(NewAnswerId(true));
  EXPECT_EQ(ids.size(), 1000u);
  EXPECT_EQ(NewAnswerId(false).substr(0, 5), "cmpl-");
}

TEST(OpenAiFormat, ModelsHealthAndLookup) {
  EXPECT_EQ(Json::parse(ModelsBody("m", 7, 8192))["data"][0],
            Json({{"id", "m"}, {"object", "model"}, {"created", 7}, {"owned_by", "terrace"}, {"max_model_len", 8192}}));
  EXPECT_EQ(Json::parse(HealthBody(false, "")), Json({{"status", "ok"}}));
  EXPECT_EQ(Json::parse(HealthBody(true, "w")), Json({{"status", "degraded"}, {"why", "w"}}));
  LookupAnswer answer{.prompt_tokens = 700, .cached = SomeUsage().cached, .chunk_tokens = 256, .pending_saves = 3};
  const Json lookup = Json::parse(LookupBody(answer));
  EXPECT_EQ(lookup["tokens"], 512);
  EXPECT_EQ(lookup["chunk"], 256);
  EXPECT_EQ(lookup["pending_saves"], 3);
  EXPECT_EQ(lookup["miss_reason"], "not_found");
}

}  // namespace
}  // namespace terrace::openai
