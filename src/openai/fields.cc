#include "openai/fields.h"

#include <algorithm>
#include <map>

#include "base/config.h"
#include "openai/errors.h"

namespace terrace::openai {

std::span<const FieldRule> FieldRules() {
  // Names of OpenAI, vLLM, llama.cpp's server and, where people send them to any server, of others.
  static const std::vector<FieldRule> rules = {
      {.names = {"model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
                 "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stream",
                 "stream_options", "cache_salt"}},
      {.names = {"messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"},
       .use = FieldUse::kReadInChat},
      {.names = {"prompt"}, .use = FieldUse::kReadInCompletion},

      {.names = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                 "prompt_cache_retention", "request_id", "session_id", "priority"},
       .use = FieldUse::kLabel},

      {.names = {"parallel_tool_calls", "parse_tool_calls"}, .use = FieldUse::kIdle, .note = "tools"},
      {.names = {"mirostat_tau", "mirostat_eta"}, .use = FieldUse::kIdle, .note = "mirostat"},
      {.names = {"dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"},
       .use = FieldUse::kIdle,
       .note = "dry_multiplier"},
      {.names = {"xtc_threshold"}, .use = FieldUse::kIdle, .note = "xtc_probability"},
      {.names = {"dynatemp_exponent"}, .use = FieldUse::kIdle, .note = "dynatemp_range"},
      {.names = {"adaptive_decay"}, .use = FieldUse::kIdle, .note = "adaptive_target"},
      {.names = {"length_penalty"}, .use = FieldUse::kIdle, .note = "use_beam_search"},
      {.names = {"n_discard"}, .use = FieldUse::kIdle, .note = "n_keep"},

      {.names = {"n", "best_of", "n_cmpl"},
       .use = FieldUse::kRefused,
       .neutral = "[1]",
       .note = "leave it out, and send the request several times"},
      {.names = {"logprobs",
                 "prompt_logprobs",
                 "return_token_ids",
                 "return_tokens_as_token_ids",
                 "use_beam_search",
                 "ignore_eos",
                 "echo",
                 "include_stop_str_in_output",
                 "no_stop_trim",
                 "return_tokens",
                 "return_progress",
                 "return_token_offsets",
                 "return_mm_kwargs",
                 "watermarking",
                 "timings_per_token",
                 "post_sampling_probs",
                 "verbose",
                 "reasoning_control",
                 "backend_sampling",
                 "grammar_lazy",
                 "return_prompt_text",
                 "return_assistant_tokens_mask"},
       .use = FieldUse::kRefused,
       .neutral = "[false]",
       .note = "leave it out"},
      {.names = {"cache_prompt"},
       .use = FieldUse::kRefused,
       .neutral = "[true]",
       .note = "leave it out; a cache_salt of its own keeps a request from what others computed"},
      {.names = {"top_logprobs", "n_probs", "min_tokens", "min_keep", "mirostat", "dry_multiplier", "xtc_probability",
                 "dynatemp_range", "n_keep", "n_indent", "n_cache_reuse"},
       .use = FieldUse::kRefused,
       .neutral = "[false, 0]",
       .note = "leave it out"},
      {.names = {"top_n_sigma", "adaptive_target", "t_max_prompt_ms", "t_max_predict_ms", "id_slot",
                 "sse_ping_interval"},
       .use = FieldUse::kRefused,
       .neutral = "[-1]",
       .note = "leave it out"},
      {.names = {"typical_p", "repeat_penalty"},
       .use = FieldUse::kRefused,
       .neutral = "[1]",
       .note = "leave it out; top_p, min_p and repetition_penalty are supported"},
      {.names = {"stream_interval"}, .use = FieldUse::kRefused, .neutral = "[1]", .note = "each token is an event"},
      {.names = {"repeat_last_n"},
       .use = FieldUse::kRefused,
       .neutral = "[-1]",
       .note = "leave it out; penalties count all of the answer"},
      {.names = {"n_predict"}, .use = FieldUse::kRefused, .neutral = "[-1]", .note = "say max_tokens"},
      {.names = {"skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"},
       .use = FieldUse::kRefused,
       .neutral = "[true]",
       .note = "leave it out"},
      // A template writes its special tokens itself, so a chat says false and a completion true.
      {.names = {"add_special_tokens"},
       .use = FieldUse::kRefused,
       .neutral = "[true, false]",
       .note = "leave it out, or send token ids to /v1/completions"},
      {.names = {"tools", "functions"},
       .use = FieldUse::kRefused,
       .neutral = "[[]]",
       .note = "describe them in a message"},
      {.names = {"tool_choice", "function_call"},
       .use = FieldUse::kRefused,
       .neutral = R"(["none", "auto"])",
       .note = "leave it out"},
      {.names = {"response_format"},
       .use = FieldUse::kRefused,
       .neutral = R"([{"type": "text"}])",
       .note = "leave it out, and describe the format in a message"},
      {.names = {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                 "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "grammar", "grammar_type",
                 "grammar_triggers", "json_schema", "regex", "ebnf"},
       .use = FieldUse::kRefused,
       .neutral = R"(["", [], {}])",
       .note = "leave it out, and describe the format in a message"},
      {.names = {"stop_token_ids", "stop_regex", "bad_words", "allowed_token_ids", "logits_processors"},
       .use = FieldUse::kRefused,
       .neutral = R"(["", []])",
       .note = "leave it out; stop and logit_bias are supported"},
      {.names = {"suffix",
                 "prompt_embeds",
                 "documents",
                 "chat_template",
                 "chat_format",
                 "chat_parser",
                 "generation_prompt",
                 "message_delimiters",
                 "preserved_tokens",
                 "vllm_xargs",
                 "kv_transfer_params",
                 "mm_processor_kwargs",
                 "media_io_kwargs",
                 "mm_payload",
                 "ec_transfer_params",
                 "logprob_token_ids",
                 "routed_experts_prompt_start",
                 "audio",
                 "prediction",
                 "web_search_options",
                 "truncate_prompt_tokens",
                 "truncation_side",
                 "thinking",
                 "thinking_token_budget",
                 "thinking_budget_tokens",
                 "reasoning",
                 "reasoning_budget_tokens",
                 "reasoning_budget_message",
                 "reasoning_budget_start_tag",
                 "reasoning_budget_end_tag",
                 "reasoning_budget_end_tags",
                 "repetition_detection",
                 "bootstrap_host",
                 "samplers",
                 "lora",
                 "response_fields",
                 "speculative.type",
                 "speculative.n_max",
                 "speculative.n_min",
                 "speculative.p_min",
                 "speculative.ngram_size_n",
                 "speculative.ngram_size_m",
                 "speculative.ngram_min_hits"},
       .use = FieldUse::kRefused,
       .neutral = R"(["", [], {}])",
       .note = "leave it out"},
      {.names = {"reasoning_effort"},
       .use = FieldUse::kRefused,
       .neutral = R"([""])",
       .note = "say it in chat_template_kwargs, if the model's template has such an argument"},
      {.names = {"reasoning_format"}, .use = FieldUse::kRefused, .neutral = R"(["none"])", .note = "leave it out"},
      {.names = {"verbosity"}, .use = FieldUse::kRefused, .neutral = R"(["medium"])", .note = "leave it out"},
      {.names = {"modalities"}, .use = FieldUse::kRefused, .neutral = R"([["text"]])", .note = "only text is made"},
  };
  return rules;
}

const FieldRule* FindField(std::string_view name) {
  static const std::map<std::string_view, const FieldRule*> by_name = [] {
    std::map<std::string_view, const FieldRule*> all;
    for (const FieldRule& rule : FieldRules()) {
      for (const std::string_view each : rule.names) all.emplace(each, &rule);
    }
    return all;
  }();
  const auto it = by_name.find(name);
  return it == by_name.end() ? nullptr : it->second;
}

ApiError UnknownField(std::string_view name) {
  const std::string shown = Echo(name);  // Comparing a megabyte with all names would take long, too.
  std::vector<std::string> known;
  for (const FieldRule& rule : FieldRules()) known.insert(known.end(), rule.names.begin(), rule.names.end());
  const auto nearest = config::Nearest(shown, known);
  return {.message = "'" + shown + "' is not a field of this API" +
                     (nearest ? "; did you mean '" + *nearest + "'?" : "; leave it out"),
          .param = shown,
          .code = "unknown_parameter"};
}

std::string FieldReference() {
  const auto names_of = [](const FieldRule& rule) {
    std::string text;
    for (const std::string_view name : rule.names) text += (text.empty() ? "`" : ", `") + std::string(name) + "`";
    return text;
  };
  std::string labels;
  std::string idle;
  std::string refused;
  for (const FieldRule& rule : FieldRules()) {
    switch (rule.use) {
      case FieldUse::kRead:
      case FieldUse::kReadInChat:
      case FieldUse::kReadInCompletion: break;
      case FieldUse::kLabel: labels += names_of(rule); break;
      case FieldUse::kIdle: idle += names_of(rule) + " | `" + rule.note + "`\n"; break;
      case FieldUse::kRefused: refused += names_of(rule) + " | `" + rule.neutral + "` | " + rule.note + "\n"; break;
    }
  }
  return "**Taken with any value**, since no answer depends on them: " + labels +
         ".\n\n**Taken with any value**, since what they adjust is refused:\n\nfields | adjust\n--- | ---\n" + idle +
         "\n**Refused** with a 400, `\"code\": \"unsupported_parameter\"`, unless they have one of the values that say "
         "what happens anyway:\n\nfields | values taken | instead\n--- | --- | ---\n" +
         refused;
}

}  // namespace terrace::openai
