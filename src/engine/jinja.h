// One chat template, parsed and run by the Jinja engine of llama.cpp's library `common`. What a template does is not
// bounded here: it may loop for ever, take all memory, or go down the stack until the process ends. So only the process
// of template_worker.h calls this, and tests do with templates of their own.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "terrace/result.h"

namespace terrace::engine {

class JinjaTemplate {
 public:
  // The error is one line: what is wrong with the template, and where.
  static Result<std::unique_ptr<JinjaTemplate>> Parse(const std::string& source);
  JinjaTemplate(const JinjaTemplate&) = delete;
  JinjaTemplate& operator=(const JinjaTemplate&) = delete;
  ~JinjaTemplate();

  // `variables` is a JSON object: what the template sees by name. Its `messages` are given in the form that this
  // template reads: content as text or as parts, the arguments of tool calls as text or as an object, and a role
  // `developer` that it does not know as `system`. The error is one line, the template's own words if it raised it.
  Result<std::string> Render(std::string_view variables) const;

 private:
  struct Parsed;
  explicit JinjaTemplate(std::unique_ptr<Parsed> parsed);
  const std::unique_ptr<Parsed> parsed_;
};

}  // namespace terrace::engine
