// A model's chat template: messages to the text that the model was trained on. Runs in processes of its own
// (template_worker.h), which stay for the next request.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/template_worker.h"
#include "openai/types.h"
#include "terrace/result.h"

namespace terrace::engine {

struct ChatTemplateOptions {
  std::string source;  // Jinja.
  // What the template sees as `bos_token` and `eos_token`.
  std::string bos, eos;
  // The tokenizer puts `bos` before any text, so one that the template puts there is left out.
  bool bos_is_added = false;
  std::vector<std::string> worker = {"/proc/self/exe", "template-worker"};
  TemplateBounds bounds;
};

class ChatTemplate {
 public:
  // Fails if the template can't be read: one line that says what is wrong with it, and where.
  static Result<std::unique_ptr<ChatTemplate>> Open(ChatTemplateOptions options);

  // The prompt for the assistant's next message, to be tokenized with special tokens recognised. Any thread; depends on
  // nothing but the request, except that a template may ask for the date. Waits for the template, by TemplateBounds.
  // kInvalid: the template refuses the request, in one line for its sender. kTimeout, kFull: it passed a bound. Else:
  // there was no process for it; try again.
  Result<std::string> Render(const openai::Request& request) const;

 private:
  explicit ChatTemplate(ChatTemplateOptions options) : options_(std::move(options)) {}
  Result<std::string> Run(const std::string& variables) const;
  Result<std::unique_ptr<TemplateWorker>> NewWorker() const;
  std::unique_ptr<TemplateWorker> IdleWorker() const;  // Or null.

  const ChatTemplateOptions options_;
  mutable std::mutex mutex_;
  // Guarded by mutex_. With those in use, there are as many as calls were ever under way at once.
  mutable std::vector<std::unique_ptr<TemplateWorker>> idle_;
};

}  // namespace terrace::engine
