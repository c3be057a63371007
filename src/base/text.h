// Small things with text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace terrace {

std::string Lower(std::string_view text);                   // ASCII.
std::string_view Trimmed(std::string_view text);            // Without blanks at either end.
std::string_view TrimmedEnd(std::string_view text);         // Without those behind it.
std::vector<std::string> SplitList(std::string_view text);  // By commas, trimmed, without empty items.
std::string Quoted(std::string_view text);                  // "text".
std::string Replaced(std::string_view text, char from, char to);
// "https://key:secret@host" and "key:secret@host" as "https://***@host" and "***@host": what somebody may have written
// into a URL is not shown. Secrets have slashes in them, so all up to the last @ of an item goes; and of a URL all that
// follows a ?, where signed ones have theirs.
std::string WithoutUserInfo(std::string_view text);

}  // namespace terrace
