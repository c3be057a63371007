#include "engine/jinja.h"

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

// Found by this file alone (CMakeLists.txt): headers of an internal library, which may change with each llama.cpp.
#include "jinja/caps.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "jinja/value.h"
#include "json.h"

namespace terrace::engine {
namespace {

// The engine's errors are a drawing of the place: "While executing If at line 3, column 5 in source:", some lines of
// template, "Error: what". What and where is kept.
std::string WhatAndWhere(std::string text) {
  constexpr std::string_view kWhere = " at line ", kIn = " in source:", kWhat = "Error: ";
  const size_t where = text.find(kWhere), in = text.find(kIn), what = text.rfind(kWhat);
  if (where < in && in < what && what != std::string::npos) {
    text = text.substr(what + kWhat.size()) + " (" + text.substr(where + 4, in - where - 4) + ")";
  }
  return text.substr(0, text.find("\n..."));
}

void AdaptToolCalls(const jinja::caps& caps, common_json& message) {
  if (!caps.supports_object_arguments || !message.contains("tool_calls")) return;
  common_json& calls = message["tool_calls"];
  if (!calls.is_array()) return;
  for (common_json& call : calls) {
    if (!call.is_object() || !call.contains("function")) continue;
    common_json& function = call["function"];
    if (!function.is_object() || !function.contains("arguments") || !function["arguments"].is_string()) continue;
    try {
      common_json arguments = common_json::parse(function["arguments"].get<std::string>());
      if (arguments.is_object()) function["arguments"] = std::move(arguments);
    } catch (const std::exception&) {  // No JSON: a template that wants an object says so itself.
      continue;
    }
  }
}

}  // namespace

struct JinjaTemplate::Parsed {
  std::string source;
  jinja::program program;
  jinja::caps caps;
  bool knows_developer = false;
};

JinjaTemplate::JinjaTemplate(std::unique_ptr<Parsed> parsed) : parsed_(std::move(parsed)) {}
JinjaTemplate::~JinjaTemplate() = default;

Result<std::unique_ptr<JinjaTemplate>> JinjaTemplate::Parse(const std::string& source) {
  try {
    auto parsed = std::make_unique<Parsed>();
    jinja::lexer lexer;
    const jinja::lexer_result tokens = lexer.tokenize(source);
    parsed->source = source;
    parsed->program = jinja::parse_from_tokens(tokens);
    parsed->caps = jinja::caps_get(parsed->program);
    parsed->knows_developer = source.find("developer") != std::string::npos;
    return std::unique_ptr<JinjaTemplate>(new JinjaTemplate(std::move(parsed)));
  } catch (const std::exception& e) {
    return Fail(Code::kInvalid, WhatAndWhere(e.what()));
  }
}

Result<std::string> JinjaTemplate::Render(std::string_view variables) const {
  const jinja::caps& caps = parsed_->caps;
  std::string raised;  // The template's own words, if it refuses its input.
  try {
    common_json json = common_json::parse(std::string(variables));
    if (json.contains("messages") && json["messages"].is_array()) {
      for (common_json& message : json["messages"]) {
        if (!message.is_object()) continue;
        if (!caps.supports_string_content && caps.supports_typed_content && message.contains("content") &&
            message["content"].is_string()) {
          const common_json part = {{"type", "text"}, {"text", message["content"].get<std::string>()}};
          message["content"] = common_json::array({part});
        }
        if (!parsed_->knows_developer && message.contains("role") && message["role"] == "developer") {
          message["role"] = "system";
        }
        AdaptToolCalls(caps, message);
      }
    }
    jinja::context context(parsed_->source);
    jinja::global_from_json(context, json, /*mark_input=*/false);
    context.set_val("raise_exception", jinja::mk_val<jinja::value_func>(
                                           "raise_exception", [&raised](const jinja::func_args& args) -> jinja::value {
                                             raised = args.get_pos(0)->as_string().str();
                                             throw jinja::raised_exception(raised);
                                           }));
    jinja::runtime runtime(context);
    return jinja::runtime::gather_string_parts(runtime.execute(parsed_->program))->as_string().str();
  } catch (const std::exception& e) {
    return Fail(Code::kInvalid, raised.empty() ? WhatAndWhere(e.what()) : raised);
  }
}

}  // namespace terrace::engine
