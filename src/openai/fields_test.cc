// Would catch: a field that stands in two rules or in none, a value that is let through though it changes the answer,
// and a page of the API that tells another story than the program.
#include "openai/fields.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <variant>

#include "openai/parse.h"

namespace terrace::openai {
namespace {

const std::string kPage = TERRACE_SOURCE_DIR "/docs/reference/api.md";

std::variant<Request, ApiError> With(const std::string& name, const std::string& value) {
  return ParseRequest(R"({"messages":[{"role":"user","content":"hi"}],")" + name + "\":" + value + "}",
                      Endpoint::kChat);
}

TEST(OpenAiFields, EachNameStandsInOneRule) {
  std::set<std::string_view> seen;
  for (const FieldRule& rule : FieldRules()) {
    for (const std::string_view name : rule.names) EXPECT_TRUE(seen.insert(name).second) << name;
  }
}

// A value that no client means: whoever takes it does not look.
TEST(OpenAiFields, OnlyLabelsAndIdleFieldsTakeNonsense) {
  for (const FieldRule& rule : FieldRules()) {
    for (const std::string_view field : rule.names) {
      const std::string name(field);
      if (name == "messages" || name == "prompt") continue;  // One is there already, the other not of a chat.
      const auto parsed = With(name, R"([{"nonsense":[7]}])");
      const bool taken = std::holds_alternative<Request>(parsed);
      EXPECT_EQ(taken, rule.use == FieldUse::kLabel || rule.use == FieldUse::kIdle) << name;
      if (!taken) {
        EXPECT_EQ(std::get<ApiError>(parsed).param, name);
      }
    }
  }
}

TEST(OpenAiFields, WhatSaysWhatHappensAnywayIsTaken) {
  for (const FieldRule& rule : FieldRules()) {
    if (rule.use != FieldUse::kRefused) continue;
    for (const std::string_view name : rule.names) {
      if (name == "add_special_tokens") continue;  // One value for a chat, the other for a completion.
      for (const auto& value : nlohmann::json::parse(rule.neutral)) {
        EXPECT_TRUE(std::holds_alternative<Request>(With(std::string(name), value.dump()))) << name << value;
      }
    }
  }
}

TEST(OpenAiFields, AnIdleFieldAdjustsOneThatIsRefused) {
  for (const FieldRule& rule : FieldRules()) {
    if (rule.use != FieldUse::kIdle) continue;
    const FieldRule* adjusted = FindField(rule.note);
    ASSERT_NE(adjusted, nullptr) << rule.note;
    EXPECT_EQ(adjusted->use, FieldUse::kRefused) << rule.note;
  }
}

TEST(OpenAiFields, ThePageHasTheTable) {
  std::ifstream in(kPage);
  std::string page{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const size_t begin = page.find("**Taken with any value**");
  const size_t end = page.find("\n## Usage");
  ASSERT_TRUE(begin < end && end != std::string::npos) << kPage;
  const std::string table = FieldReference();
  if (std::getenv("TERRACE_WRITE_DOCS") != nullptr) {
    page.replace(begin, end - begin, table);
    std::ofstream(kPage) << page;
    return;
  }
  EXPECT_EQ(page.substr(begin, end - begin), table) << "to write it anew: TERRACE_WRITE_DOCS=1 openai_test";
  for (const FieldRule& rule : FieldRules()) {
    for (const std::string_view name : rule.names) {
      EXPECT_NE(page.find("`" + std::string(name)), std::string::npos) << name;
    }
  }
}

}  // namespace
}  // namespace terrace::openai
