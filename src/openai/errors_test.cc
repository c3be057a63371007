// Would catch: a body whose only fault is its encoding called no JSON, an error that does not find the spot, a router
// and a server that differ about the model of a body, and an error that sends a client's megabytes back.
#include "openai/errors.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>

#include "openai/format.h"
#include "openai/parse.h"

namespace terrace::openai {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

ApiError ErrorOf(const std::string& body) {
  auto parsed = ParseRequest(body, Endpoint::kChat);
  if (const auto* error = std::get_if<ApiError>(&parsed)) return *error;
  ADD_FAILURE() << "accepted: " << body;
  return {};
}

TEST(OpenAiErrors, HalfASurrogatePairIsNamedWithItsField) {
  const ApiError error = ErrorOf(R"({"messages":[{"role":"user","content":"a"},{"role":"user","content":"\ud83d"}]})");
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.param, "messages[1].content");
  EXPECT_TRUE(Has(error.message, "surrogate")) << error.message;
  EXPECT_FALSE(Has(error.message, "not valid JSON")) << error.message;
  EXPECT_EQ(ErrorOf(R"({"stop":["x","\udc00"]})").param, "stop[1]");
  EXPECT_EQ(ErrorOf(R"({"metadata":{"a":{"b":[[],{}]},"c":"\ud83dx"}})").param, "metadata.c");
}

TEST(OpenAiErrors, Latin1IsNamedWithItsByteAndField) {
  const ApiError error = ErrorOf("{\"messages\":[{\"role\":\"user\",\"content\":\"caf\xe9\"}]}");
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.param, "messages[0].content");
  EXPECT_TRUE(Has(error.message, "not UTF-8")) << error.message;
  EXPECT_TRUE(Has(error.message, "at byte")) << error.message;
}

TEST(OpenAiErrors, TheByteThatIsNoUtf8IsNamedAndNotTheNext) {
  const auto said = [](const std::string& text) { return ErrorOf(R"({"stop":")" + text + "\"}").message; };
  // The text begins at byte 10.
  EXPECT_TRUE(Has(said("caf\xe9"), "0xE9 at byte 13,")) << said("caf\xe9");
  EXPECT_TRUE(Has(said("\xe9t\xe9"), "0xE9 at byte 10,")) << said("\xe9t\xe9");
  EXPECT_TRUE(Has(said("\xc3\xa9\xff"), "0xFF at byte 12,")) << said("\xc3\xa9\xff");
  EXPECT_TRUE(Has(said("a\x80"), "0x80 at byte 11,")) << said("a\x80");
  EXPECT_TRUE(Has(said("\xf0\x9f\x98"), "0xF0 at byte 10,")) << said("\xf0\x9f\x98");
}

TEST(OpenAiErrors, OtherBadJsonSaysWhereAndWhy) {
  const ApiError error = ErrorOf(R"({"messages":[{"role":"user","content":}]})");
  EXPECT_TRUE(Has(error.message, "not valid JSON at byte 39, in 'messages[0].content'")) << error.message;
  EXPECT_TRUE(Has(ErrorOf("").message, "not valid JSON at byte 1: ")) << ErrorOf("").message;
}

// What the router reads of a body, and what the server behind it reads.
TEST(OpenAiErrors, RouterAndServerAgreeAboutTheModel) {
  const std::string rest = R"("messages":[{"role":"user","content":"hi"}]})";
  for (const char* model : {"", R"("model":null,)", R"("model":"",)", R"("model":"m",)", R"("model":7,)",
                            R"("model":["m"],)", R"("model":{"a":"m"},)", R"("model":"m","model":"m",)",
                            R"("model":"m","model":null,)", R"("model":null,"model":"n",)"}) {
    const std::string body = std::string("{") + model + rest;
    const auto found = FindModel(body);
    const auto parsed = ParseRequest(body, Endpoint::kChat);
    if (const auto* error = std::get_if<ApiError>(&parsed)) {
      ASSERT_TRUE(std::holds_alternative<ApiError>(found)) << body;
      EXPECT_EQ(std::get<ApiError>(found).message, error->message);
      EXPECT_EQ(std::get<ApiError>(found).param, "model");
    } else {
      ASSERT_TRUE(std::holds_alternative<std::string>(found)) << body;
      EXPECT_EQ(std::get<std::string>(found), std::get<Request>(parsed).model);
    }
  }
}

TEST(OpenAiErrors, TheModelIsFoundWhereverItStands) {
  const auto model_of = [](const std::string& body) {
    const auto found = FindModel(body);
    const auto* model = std::get_if<std::string>(&found);
    return model != nullptr ? *model : "error: " + std::get<ApiError>(found).message;
  };
  EXPECT_EQ(model_of(R"({"model":"m"})"), "m");
  EXPECT_EQ(
      model_of(R"({"messages":[{"model":"inner","content":[{"model":1}]}],"x":{"model":"inner"},"model":"m\u00e9"})"),
      "m\xc3\xa9");
  EXPECT_EQ(model_of(R"({"model":"m", what comes behind is the backend's to judge)"), "m");
  EXPECT_EQ(model_of("{}"), "");
  EXPECT_EQ(model_of("[{\"model\":\"m\"}]"), "error: the body must be a JSON object");
  EXPECT_EQ(model_of(std::string(1 << 20, '[')), "error: the body must be a JSON object");
  EXPECT_TRUE(Has(model_of("{\"a\":" + std::string(1 << 20, '[')), "not valid JSON"));
  EXPECT_TRUE(Has(model_of("{\"a\":\"\xff\"}"), "not UTF-8"));
  EXPECT_TRUE(Has(model_of(""), "not valid JSON"));
}

TEST(OpenAiErrors, NothingSendsAMegabyteBack) {
  const std::string huge(1 << 20, 'x');
  EXPECT_LT(ErrorBody(ModelNotFound(huge, "this server has 'm'")).size(), 500u);
  EXPECT_TRUE(Has(ModelNotFound(huge, "this server has 'm'").message, "this server has 'm'"));
  EXPECT_LT(ErrorBody(ErrorOf("{\"" + huge + "\":\"\xff\"}")).size(), 2000u);
  EXPECT_LT(ErrorBody({.message = huge, .param = huge}).size(), 2000u);
  EXPECT_EQ(Echo(std::string(99, 'a') + "\xc3\xa9"), std::string(99, 'a') + "...") << "cut within a character";
}

}  // namespace
}  // namespace terrace::openai
