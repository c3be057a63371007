#include "engine/chat_template.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/text.h"

namespace terrace::engine {
namespace {

using Json = nlohmann::ordered_json;

Json MessageJson(const openai::Message& message) {
  Json json = {{"role", message.role}, {"content", message.content}};
  if (!message.more.empty()) json.update(Json::parse(message.more));
  // A message that only calls tools has no content, however it says so.
  if (message.content.empty() && json.contains("tool_calls")) json["content"] = nullptr;
  return json;
}

// Named as transformers names them, so that a template finds what its author saw.
Json Variables(const openai::Request& request, const ChatTemplateOptions& options) {
  Json json = {{"messages", Json::array()}, {"tools", nullptr},
               {"documents", nullptr},      {"add_generation_prompt", request.add_generation_prompt},
               {"bos_token", options.bos},  {"eos_token", options.eos}};
  for (const openai::Message& message : request.messages) json["messages"].push_back(MessageJson(message));
  if (!request.chat_template_kwargs.empty()) json.update(Json::parse(request.chat_template_kwargs));
  return json;
}

// Cuts what the template puts behind the last message, so that the model goes on with it. False if the message can't be
// found: templates may leave out or change what an assistant said. Blanks at the end of the message stay if the
// template keeps them.
bool CutAfter(std::string_view message, std::string* text) {
  const std::string_view words = Trimmed(message);
  const size_t at = text->rfind(words);
  if (words.empty() || at == text->npos) return false;
  const std::string_view to_the_end = message.substr(static_cast<size_t>(words.data() - message.data()));
  const bool keeps_blanks = std::string_view(*text).substr(at).starts_with(to_the_end);
  text->resize(at + (keeps_blanks ? to_the_end : words).size());
  return true;
}

}  // namespace

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::Open(ChatTemplateOptions options) {
  std::unique_ptr<ChatTemplate> opened(new ChatTemplate(std::move(options)));
  auto worker = opened->NewWorker();
  if (!worker) return tl::unexpected(worker.error());
  opened->idle_.push_back(*std::move(worker));
  return opened;
}

Result<std::string> ChatTemplate::Render(const openai::Request& request) const {
  Result<std::string> text = Run(Variables(request, options_).dump());
  if (!text) return text;
  if (request.continue_final_message && !CutAfter(request.messages.back().content, &*text)) {
    return Fail(Code::kInvalid, "the last message is not in the text that it makes, so it can't be continued");
  }
  if (options_.bos_is_added && !options_.bos.empty() && text->starts_with(options_.bos)) {
    text->erase(0, options_.bos.size());
  }
  return text;
}

Result<std::unique_ptr<TemplateWorker>> ChatTemplate::NewWorker() const {
  return TemplateWorker::Start(options_.worker, options_.source, options_.bounds);
}

std::unique_ptr<TemplateWorker> ChatTemplate::IdleWorker() const {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return nullptr;
  auto worker = std::move(idle_.back());
  idle_.pop_back();
  return worker;
}

Result<std::string> ChatTemplate::Run(const std::string& variables) const {
  for (bool fresh = false;; fresh = true) {
    std::unique_ptr<TemplateWorker> worker = fresh ? nullptr : IdleWorker();
    const bool reused = worker != nullptr;
    if (!reused) {
      auto started = NewWorker();
      if (!started) return tl::unexpected(started.error());
      worker = *std::move(started);
    }
    Result<std::string> text = worker->Render(variables);
    if (text || text.error().code == Code::kInvalid) {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(worker));
      return text;
    }
    // A worker may have died while it was idle, or of memory that templates with cycles of references leave behind.
    const bool maybe_before = text.error().code == Code::kInternal || text.error().code == Code::kFull;
    if (!reused || !maybe_before) return text;
  }
}

}  // namespace terrace::engine
