// Human names (models, hosts, tenants) as paths under a root: any bytes in, a safe relative path out, and back.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace terrace {

// Distinct names give distinct paths, also where the file system ignores case. Only [a-z0-9._-], '%' before two hex
// digits, '+' at the end of a component that goes on in the next one; never "", ".", "..", a leading '.', or a
// component above 200 bytes.
std::string EncodeName(std::string_view name);

// The name, or nothing if `path` is not exactly what EncodeName gives.
std::optional<std::string> DecodeName(std::string_view path);

}  // namespace terrace
