// Every field that a body may have at its top, and what becomes of it: one table, so that none is passed over by
// accident. A field that the table does not have is refused. Pure; any thread.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "openai/types.h"

namespace terrace::openai {

enum class FieldUse {
  kRead,              // Parsed, and it changes the answer.
  kReadInChat,        // The same, in a chat; refused elsewhere.
  kReadInCompletion,  // The same, in a completion; refused elsewhere.
  kLabel,             // Any value: it says who asks or for whose books, and no server's answer depends on it.
  kIdle,              // Any value: it adjusts another field, which is refused.
  kRefused,           // Would change the answer, and can't: refused unless it says what happens anyway.
};

struct FieldRule {
  std::vector<std::string_view> names;
  FieldUse use = FieldUse::kRead;
  const char* neutral = "[]";  // With kRefused: a JSON array of the values that are taken, besides null.
  const char* note = "";       // With kRefused: what to do instead. With kIdle: what it adjusts.
};

std::span<const FieldRule> FieldRules();
const FieldRule* FindField(std::string_view name);  // Null: nobody knows it.

// The refusal of a name that the table does not have; it names the nearest one that it has.
ApiError UnknownField(std::string_view name);

// The table as docs/reference/api.md has it.
std::string FieldReference();

}  // namespace terrace::openai
