// Would catch: a configuration file that crashes the reader, that yaml-cpp throws at us past the edge, or whose
// accepted values can't be read as the type they were checked for.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace terrace::config;
  static const Schema schema = {.program = "fuzz",
                                .summary = "fuzz",
                                .options = {{.name = "text"},
                                            {.name = "flag", .type = Type::kBool, .default_value = "no"},
                                            {.name = "int", .type = Type::kInt, .default_value = "1"},
                                            {.name = "bytes", .type = Type::kBytes, .default_value = "1MiB"},
                                            {.name = "wait-ms", .type = Type::kDuration, .default_value = "1s"},
                                            {.name = "kind", .type = Type::kChoice, .choices = {"a", "b"}},
                                            {.name = "key", .type = Type::kSecret},
                                            {.name = "list", .type = Type::kTextList}}};
  const int fd = memfd_create("config", 0);
  if (fd < 0 || write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  const auto parsed =
      Load(schema, {"--config=/proc/self/fd/" + std::to_string(fd)}, [](const std::string&) { return std::nullopt; });
  close(fd);
  if (!parsed) {
    if (parsed.error().what.empty()) std::abort();
    return 0;
  }
  const Values& values = parsed->values;
  values.Bool("flag");
  values.Int("int");
  values.Bytes("bytes");
  if (values.DurationMs("wait-ms") < 0) std::abort();
  values.List("list");
  values.Dump();
  return 0;
}
