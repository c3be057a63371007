// Would catch: a body that is accepted with a meaning it does not have, a wrong type that passes or brings the process
// down, an error that does not name the field, and null treated as a value.
#include "openai/parse.h"

#include <gtest/gtest.h>

#include <string>

namespace terrace::openai {
namespace {

Request Good(const std::string& body, Endpoint endpoint) {
  auto parsed = ParseRequest(body, endpoint);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    ADD_FAILURE() << error->message << " for " << body;
    return {};
  }
  return std::get<Request>(parsed);
}

ApiError Bad(const std::string& body, Endpoint endpoint) {
  auto parsed = ParseRequest(body, endpoint);
  if (const auto* error = std::get_if<ApiError>(&parsed)) return *error;
  ADD_FAILURE() << "accepted: " << body;
  return {};
}

std::string Chat(const std::string& more) {
  return R"({"model":"m","messages":[{"role":"user","content":"hi"}])" + (more.empty() ? "" : "," + more) + "}";
}

TEST(OpenAiParse, ReadsEveryFieldOfAChat) {
  const Request r = Good(
      R"({"model":"m","messages":[{"role":"developer","content":"be brief"},{"role":"user","content":"hi"},
          {"role":"assistant","content":null},
          {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
          "max_tokens":5,"temperature":0,"top_p":0.5,"seed":-3,"stop":["x","y"],"stream":true,
          "stream_options":{"include_usage":true},"cache_salt":"s","n":1})",
      Endpoint::kChat);
  EXPECT_TRUE(r.chat);
  EXPECT_EQ(r.model, "m");
  ASSERT_EQ(r.messages.size(), 4u);
  EXPECT_EQ(r.messages[0].role, "developer");
  EXPECT_EQ(r.messages[2].content, "");
  EXPECT_EQ(r.messages[3].content, "a\nb");
  EXPECT_EQ(r.max_tokens, 5u);
  EXPECT_EQ(r.temperature, 0.0);
  EXPECT_EQ(r.top_p, 0.5);
  EXPECT_EQ(r.seed, -3);
  EXPECT_EQ(r.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_TRUE(r.stream);
  EXPECT_TRUE(r.include_usage);
  EXPECT_EQ(r.cache_salt, "s");
}

TEST(OpenAiParse, NullMeansAbsentForEveryOptionalField) {
  const Request r =
      Good(Chat(R"("max_tokens":null,"temperature":null,"top_p":null,"seed":null,"stop":null,"stream":null,
      "stream_options":null,"cache_salt":null,"n":null,"logprobs":null,"tools":null,"response_format":null)"),
           Endpoint::kChat);
  EXPECT_FALSE(r.max_tokens);
  EXPECT_EQ(r.temperature, 1.0);
  EXPECT_EQ(r.top_p, 1.0);
  EXPECT_FALSE(r.seed);
  EXPECT_TRUE(r.stop.empty());
  EXPECT_FALSE(r.stream);
  EXPECT_EQ(r.cache_salt, "");
}

TEST(OpenAiParse, ReadsHowToSample) {
  const Request r = Good(Chat(R"("top_k":40,"min_p":0.05,"presence_penalty":-2,"frequency_penalty":0.5,
      "repetition_penalty":1.1,"logit_bias":{"7":-100,"0":1.5})"),
                         Endpoint::kChat);
  EXPECT_EQ(r.top_k, 40u);
  EXPECT_EQ(r.min_p, 0.05);
  EXPECT_EQ(r.presence_penalty, -2.0);
  EXPECT_EQ(r.frequency_penalty, 0.5);
  EXPECT_EQ(r.repetition_penalty, 1.1);
  ASSERT_EQ(r.logit_bias.size(), 2u);
  EXPECT_EQ(r.logit_bias[0].token, 0);
  EXPECT_EQ(r.logit_bias[0].bias, 1.5f);
  EXPECT_EQ(r.logit_bias[1].token, 7);
  EXPECT_EQ(r.logit_bias[1].bias, -100.0f);
  for (const char* all : {"-1", "0", "null"}) {
    EXPECT_EQ(Good(Chat(R"("top_k":)" + std::string(all)), Endpoint::kChat).top_k, 0u);
  }
}

// What other servers would answer otherwise is never passed over in silence.
TEST(OpenAiParse, RefusesWhatItCannotHonour) {
  for (const char* field : {R"("n":2)",
                            R"("best_of":3)",
                            R"("logprobs":true)",
                            R"("logprobs":0)",
                            R"("top_logprobs":2)",
                            R"("prompt_logprobs":0)",
                            R"("echo":true)",
                            R"("tools":[{"type":"function"}])",
                            R"("functions":[{}])",
                            R"("tool_choice":"required")",
                            R"("tool_choice":{"type":"function"})",
                            R"("function_call":{"name":"f"})",
                            R"("response_format":{"type":"json_object"})",
                            R"("response_format":{})",
                            R"("suffix":"x")",
                            R"("guided_json":{"type":"object"})",
                            R"("guided_choice":["a"])",
                            R"("structured_outputs":{"regex":"a"})",
                            R"("grammar":"root ::= x")",
                            R"("stop_token_ids":[2])",
                            R"("bad_words":["a"])",
                            R"("allowed_token_ids":[1])",
                            R"("ignore_eos":true)",
                            R"("min_tokens":1)",
                            R"("n_predict":5)",
                            R"("typical_p":0.5)",
                            R"("repeat_penalty":1.1)",
                            R"("use_beam_search":true)",
                            R"("include_stop_str_in_output":true)",
                            R"("skip_special_tokens":false)",
                            R"("add_special_tokens":true)",
                            R"("chat_template":"{{x}}")",
                            R"("documents":[{}])",
                            R"("truncate_prompt_tokens":5)",
                            R"("reasoning_effort":"low")",
                            R"("verbosity":"low")",
                            R"("modalities":["text","audio"])",
                            R"("audio":{"voice":"x"})",
                            R"("web_search_options":{"a":1})"}) {
    const std::string text(field);
    const std::string name = text.substr(1, text.find('"', 1) - 1);
    const ApiError error = Bad(Chat(text), Endpoint::kChat);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.param, name) << field;
    EXPECT_EQ(error.code, "unsupported_parameter") << field;
    EXPECT_NE(error.message.find("'" + name + "' is not supported: "), std::string::npos) << error.message;
  }
  EXPECT_EQ(Bad(Chat(R"("stream":true,"stream_options":{"continuous_usage_stats":true})"), Endpoint::kChat).param,
            "stream_options.continuous_usage_stats");
  EXPECT_EQ(Bad(R"({"prompt":"p","add_special_tokens":false})", Endpoint::kCompletion).param, "add_special_tokens");
  EXPECT_EQ(Bad(R"({"messages":[{"role":"assistant","function_call":{"name":"f"}}]})", Endpoint::kChat).param,
            "messages[0].function_call");
}

TEST(OpenAiParse, ReadsWhatTemplatesRead) {
  const Request r = Good(
      R"({"messages":[{"role":"user","content":"hi","name":"Ann"},
          {"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[
              {"id":"c1","type":"function","index":0,"function":{"arguments":"{\"z\": 1}","name":"f"}}]},
          {"role":"tool","content":"4","tool_call_id":"c1"},{"role":"assistant","content":"It is","tool_calls":[]}],
          "chat_template_kwargs":{"enable_thinking":false,"a":[1,{"b":null}]},"continue_final_message":true})",
      Endpoint::kChat);
  EXPECT_EQ(r.messages[0].more, R"({"name":"Ann"})");
  EXPECT_EQ(r.messages[1].content, "");
  EXPECT_EQ(r.messages[1].more,
            R"({"reasoning_content":"hm","tool_calls":[{"function":{"arguments":"{\"z\": 1}","name":"f"},)"
            R"("id":"c1","type":"function"}]})");
  EXPECT_EQ(r.messages[2].more, R"({"tool_call_id":"c1"})");
  EXPECT_EQ(r.messages[3].more, "");
  EXPECT_EQ(r.chat_template_kwargs, R"({"a":[1,{"b":null}],"enable_thinking":false})");
  EXPECT_TRUE(r.continue_final_message);
  EXPECT_FALSE(r.add_generation_prompt);
}

TEST(OpenAiParse, TemplateArgumentsHaveDefaults) {
  const Request r = Good(Chat(R"("chat_template_kwargs":null,"continue_final_message":null)"), Endpoint::kChat);
  EXPECT_EQ(r.chat_template_kwargs, "");
  EXPECT_TRUE(r.add_generation_prompt);
  EXPECT_FALSE(r.continue_final_message);
  EXPECT_FALSE(Good(Chat(R"("add_generation_prompt":false)"), Endpoint::kChat).add_generation_prompt);
}

TEST(OpenAiParse, RefusesTemplateArgumentsThatMakeNoSense) {
  const auto param = [](const std::string& messages, const std::string& more) {
    return Bad(R"({"messages":[)" + messages + "]" + more + "}", Endpoint::kChat).param;
  };
  const std::string user = R"({"role":"user","content":"q"})", last = R"({"role":"assistant","content":"a"})";
  EXPECT_EQ(param(user, R"(,"continue_final_message":true)"), "continue_final_message");
  EXPECT_EQ(param(user + R"(,{"role":"assistant","content":" \n"})", R"(,"continue_final_message":true)"),
            "continue_final_message");
  EXPECT_EQ(param(user + "," + last, R"(,"continue_final_message":true,"add_generation_prompt":true)"),
            "continue_final_message");
  EXPECT_EQ(param(user, R"(,"add_generation_prompt":1)"), "add_generation_prompt");
  EXPECT_EQ(param(user, R"(,"chat_template_kwargs":[])"), "chat_template_kwargs");
  for (const std::string name : {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"}) {
    EXPECT_EQ(param(user, R"(,"chat_template_kwargs":{")" + name + R"(":1})"), "chat_template_kwargs." + name);
  }
  EXPECT_EQ(param(R"({"role":"user","content":"q","name":1})", ""), "messages[0].name");
  const auto calls = [&](const std::string& text) {
    return param(user + R"(,{"role":"assistant","tool_calls":)" + text + "}", "");
  };
  EXPECT_EQ(calls("{\"a\":1}"), "messages[1].tool_calls");
  EXPECT_EQ(calls("[1]"), "messages[1].tool_calls[0]");
  EXPECT_EQ(calls(R"([{"id":"1"}])"), "messages[1].tool_calls[0].function");
  EXPECT_EQ(calls(R"([{"id":1,"function":{"name":"f","arguments":""}}])"), "messages[1].tool_calls[0].id");
  EXPECT_EQ(calls(R"([{"type":"x","function":{"name":"f","arguments":""}}])"), "messages[1].tool_calls[0].type");
  EXPECT_EQ(calls(R"([{"function":{"name":"f","arguments":{}}}])"), "messages[1].tool_calls[0].function.arguments");
}

TEST(OpenAiParse, ACompletionHasNoTemplate) {
  for (const char* field : {R"("chat_template_kwargs":{"a":1})", R"("continue_final_message":true)"}) {
    EXPECT_EQ(Bad(std::string(R"({"prompt":"p",)") + field + "}", Endpoint::kCompletion).code, "unsupported_parameter");
  }
  Good(R"({"prompt":"p","chat_template_kwargs":null,"messages":null})", Endpoint::kCompletion);
  EXPECT_EQ(Bad(Chat(R"("prompt":"p")"), Endpoint::kChat).param, "prompt");
}

TEST(OpenAiParse, TakesWhatChangesNothing) {
  Good(Chat(R"("n":1,"best_of":1.0,"logprobs":false,"top_logprobs":0,"echo":false,"tools":[],"tool_choice":"auto",
      "parallel_tool_calls":true,"response_format":{"type":"text"},"suffix":"","guided_json":null,"stop_token_ids":[],
      "ignore_eos":false,"min_tokens":0,"n_predict":-1,"typical_p":1,"repeat_penalty":1.0,"skip_special_tokens":true,
      "add_generation_prompt":true,"add_special_tokens":false,"chat_template_kwargs":{},"modalities":["text"],
      "verbosity":"medium","user":"u","metadata":{"a":"b"},"store":true,"service_tier":"auto","priority":3,
      "prompt_cache_key":"k","safety_identifier":"s","request_id":"r","length_penalty":2,"top_n_sigma":-1,
      "samplers":[],"lora":[],"cache_prompt":true,"id_slot":-1,"xtc_threshold":0.1,"include_reasoning":true,
      "presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1,"min_p":0,"logit_bias":{})"),
       Endpoint::kChat);
  Good(R"({"prompt":"p","add_special_tokens":true})", Endpoint::kCompletion);
}

TEST(OpenAiParse, NewerNameOfTheTokenLimitWins) {
  EXPECT_EQ(Good(Chat(R"("max_tokens":5,"max_completion_tokens":7)"), Endpoint::kChat).max_tokens, 7u);
}

TEST(OpenAiParse, HugeTokenLimitIsCutNotWrapped) {
  EXPECT_EQ(Good(Chat(R"("max_tokens":18446744073709551615)"), Endpoint::kChat).max_tokens, 4294967295u);
}

TEST(OpenAiParse, CompletionTakesTextOneTextOrTokens) {
  EXPECT_EQ(Good(R"({"prompt":"p"})", Endpoint::kCompletion).prompt, "p");
  EXPECT_EQ(Good(R"({"prompt":["p"]})", Endpoint::kCompletion).prompt, "p");
  EXPECT_EQ(Good(R"({"prompt":[1,2]})", Endpoint::kCompletion).prompt_tokens, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(Good(R"({"prompt":[7]})", Endpoint::kCompletion).prompt_tokens, (std::vector<int32_t>{7}));
  EXPECT_EQ(Good(R"({"prompt":[[1,2]]})", Endpoint::kCompletion).prompt_tokens, (std::vector<int32_t>{1, 2}));
}

TEST(OpenAiParse, LookupTakesEitherBody) {
  EXPECT_TRUE(Good(Chat(""), Endpoint::kEither).chat);
  EXPECT_FALSE(Good(R"({"prompt":"p"})", Endpoint::kEither).chat);
  EXPECT_FALSE(Good(R"({"prompt":"p","messages":null})", Endpoint::kEither).chat);
}

TEST(OpenAiParse, ANameThatNobodyKnowsIsRefusedWithTheNearest) {
  const ApiError error = Bad(Chat(R"("max_tokns":5)"), Endpoint::kChat);
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.param, "max_tokns");
  EXPECT_EQ(error.code, "unknown_parameter");
  EXPECT_NE(error.message.find("did you mean 'max_tokens'?"), std::string::npos) << error.message;
  EXPECT_EQ(Bad(Chat(R"("some_later_field":[1])"), Endpoint::kChat).param, "some_later_field");
  EXPECT_EQ(Bad(Chat(R"("some_later_field":null)"), Endpoint::kChat).param, "some_later_field");
  const ApiError nested = Bad(Chat(R"("stream":true,"stream_options":{"include_usge":true})"), Endpoint::kChat);
  EXPECT_EQ(nested.param, "stream_options.include_usge");
}

TEST(OpenAiParse, ANameOfAMegabyteIsNotRepeated) {
  const ApiError error = Bad(R"({"prompt":"p",")" + std::string(1 << 20, 'x') + R"(":1})", Endpoint::kCompletion);
  EXPECT_LT(error.message.size() + error.param.size(), 500u);
}

TEST(OpenAiParse, ANameGivenTwiceIsRefused) {
  const ApiError error = Bad(R"({"model":"a","prompt":"p","model":"a"})", Endpoint::kCompletion);
  EXPECT_EQ(error.param, "model");
  EXPECT_NE(error.message.find("twice"), std::string::npos) << error.message;
  Good(R"({"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]})", Endpoint::kChat);
}

TEST(OpenAiParse, TokenIdsBelowZeroAndFractionsAreNoPrompts) {
  EXPECT_NE(Bad(R"({"prompt":[5,-1]})", Endpoint::kCompletion).message.find("below 0"), std::string::npos);
  EXPECT_NE(Bad(R"({"prompt":[5,1.5]})", Endpoint::kCompletion).message.find("integers"), std::string::npos);
  EXPECT_NE(Bad(R"({"prompt":["a","b"]})", Endpoint::kCompletion).message.find("several"), std::string::npos);
}

TEST(OpenAiParse, BadJsonIsA400WithoutParam) {
  for (const char* body : {"", "{", "[]", "3", "\"x\"", "{\"a\":1}}"}) {
    const ApiError error = Bad(body, Endpoint::kCompletion);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.type, "invalid_request_error");
    EXPECT_FALSE(error.message.empty());
  }
}

TEST(OpenAiParse, WrongTypesNameTheField) {
  struct Case {
    const char* field;
    const char* param;
  };
  for (const Case& c : {Case{R"("model":3)", "model"},
                        {R"("max_tokens":"5")", "max_tokens"},
                        {R"("max_tokens":0)", "max_tokens"},
                        {R"("max_tokens":-1)", "max_tokens"},
                        {R"("max_tokens":1.5)", "max_tokens"},
                        {R"("temperature":"hot")", "temperature"},
                        {R"("temperature":2.1)", "temperature"},
                        {R"("temperature":-0.1)", "temperature"},
                        {R"("top_p":1.01)", "top_p"},
                        {R"("seed":1.5)", "seed"},
                        {R"("stop":5)", "stop"},
                        {R"("stop":["a",5])", "stop"},
                        {R"("stop":["a","b","c","d","e"])", "stop"},
                        {R"("stream":"yes")", "stream"},
                        {R"("stream_options":{})", "stream_options"},
                        {R"("stream":true,"stream_options":[])", "stream_options"},
                        {R"("stream":true,"stream_options":{"include_usage":1})", "stream_options.include_usage"},
                        {R"("cache_salt":1)", "cache_salt"},
                        {R"("n":2)", "n"},
                        {R"("logprobs":true)", "logprobs"},
                        {R"("tools":[{"type":"function"}])", "tools"},
                        {R"("response_format":"json")", "response_format"},
                        {R"("min_p":1.1)", "min_p"},
                        {R"("top_k":-2)", "top_k"},
                        {R"("top_k":2.5)", "top_k"},
                        {R"("presence_penalty":2.1)", "presence_penalty"},
                        {R"("frequency_penalty":"2")", "frequency_penalty"},
                        {R"("repetition_penalty":0)", "repetition_penalty"},
                        {R"("logit_bias":[5])", "logit_bias"},
                        {R"("logit_bias":{"five":1})", "logit_bias"},
                        {R"("logit_bias":{"05":1})", "logit_bias"},
                        {R"("logit_bias":{"-5":1})", "logit_bias"},
                        {R"("logit_bias":{"4294967296":1})", "logit_bias"},
                        {R"("logit_bias":{"5":101})", "logit_bias"},
                        {R"("logit_bias":{"5":"1"})", "logit_bias"}}) {
    const ApiError error =
        Bad(R"({"messages":[{"role":"user","content":"hi"}],)" + std::string(c.field) + "}", Endpoint::kChat);
    EXPECT_EQ(error.param, c.param) << c.field;
    EXPECT_NE(error.message.find(c.param), std::string::npos) << error.message;
  }
}

TEST(OpenAiParse, BadMessagesNameTheSpot) {
  struct Case {
    const char* messages;
    const char* param;
  };
  for (const Case& c : {Case{R"("hi")", "messages"},
                        {R"([])", "messages"},
                        {R"(["hi"])", "messages[0]"},
                        {R"([{"content":"hi"}])", "messages[0].role"},
                        {R"([{"role":"king","content":"hi"}])", "messages[0].role"},
                        {R"([{"role":"user"}])", "messages[0].content"},
                        {R"([{"role":"user","content":"hi"},{"role":"user","content":3}])", "messages[1].content"},
                        {R"([{"role":"user","content":["hi"]}])", "messages[0].content[0]"},
                        {R"([{"role":"user","content":[{"type":"image_url"}]}])", "messages[0].content[0].type"},
                        {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0].text"}}) {
    EXPECT_EQ(Bad(R"({"messages":)" + std::string(c.messages) + "}", Endpoint::kChat).param, c.param) << c.messages;
  }
  EXPECT_EQ(Bad("{}", Endpoint::kChat).param, "messages");
}

TEST(OpenAiParse, SeveralPromptsAreRefused) {
  for (const char* prompt : {R"(["a","b"])", "[[1],[2]]", "[]", "3", "{}", "[-1]", "[1,\"a\"]", "[4294967296]"}) {
    EXPECT_EQ(Bad(R"({"prompt":)" + std::string(prompt) + "}", Endpoint::kCompletion).param, "prompt") << prompt;
  }
}

TEST(ParseRequest, DeepNestingIsRefusedAndNotCopied) {
  for (const std::string field : {"stop", "response_format", "prompt"}) {
    const std::string body = R"({"model": "m", ")" + field + R"(": {"type": )" + std::string(1'000'000, '[') +
                             std::string(1'000'000, ']') + "}}";
    const auto parsed = ParseRequest(body, Endpoint::kCompletion);
    ASSERT_TRUE(std::holds_alternative<ApiError>(parsed)) << field;
    EXPECT_EQ(std::get<ApiError>(parsed).status, 400) << field;
    EXPECT_NE(std::get<ApiError>(parsed).message.find("levels deep"), std::string::npos) << field;
  }
  const std::string brackets = R"({"prompt": "\"[[)" + std::string(1000, '[') + R"(\\"})";
  EXPECT_TRUE(std::holds_alternative<Request>(ParseRequest(brackets, Endpoint::kCompletion))) << "text is no nesting";
}

// 64 MiB of them would take gigabytes.
TEST(ParseRequest, RefusesMoreValuesThanAPromptHasTokens) {
  std::string ids = R"({"prompt":[1)";
  for (int i = 0; i < 2 << 20; ++i) ids += ",1";
  const auto parsed = ParseRequest(ids + "]}", Endpoint::kCompletion);
  ASSERT_TRUE(std::holds_alternative<ApiError>(parsed));
  EXPECT_EQ(std::get<ApiError>(parsed).status, 400);
  EXPECT_NE(std::get<ApiError>(parsed).message.find("values"), std::string::npos);
  const std::string commas = R"({"prompt":")" + std::string(3 << 20, ',') + R"("})";
  EXPECT_TRUE(std::holds_alternative<Request>(ParseRequest(commas, Endpoint::kCompletion))) << "text is no values";
}

}  // namespace
}  // namespace terrace::openai
