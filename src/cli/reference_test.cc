// Would catch: an option that docs/reference/config.md lacks or describes otherwise than the program has it; a sample
// file there that the program refuses.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/config.h"
#include "doctor/doctor.h"
#include "node/node.h"
#include "router/options.h"
#include "settings/instance.h"

namespace terrace {
namespace {

const std::string kPath = TERRACE_SOURCE_DIR "/docs/reference/config.md";

std::string Page() {
  std::ifstream in(kPath);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

config::Schema Serve() { return {.program = "terrace serve", .options = settings::InstanceOptions()}; }

TEST(Reference, ThePageHasEveryOptionOfEveryProgram) {
  std::string page = Page();
  const config::Schema schemas[] = {Serve(), node::Schema(), router::Schema(), doctor::Schema()};
  const size_t begin = page.find("\n## ");
  ASSERT_NE(begin, std::string::npos) << kPath;
  std::string tables;
  for (const config::Schema& schema : schemas) {
    tables += "\n## " + schema.program + "\n\n" + config::Reference(schema);
  }
  if (std::getenv("TERRACE_WRITE_DOCS") != nullptr) {
    page.replace(begin, std::string::npos, tables);
    std::ofstream(kPath) << page;
  }
  EXPECT_EQ(page.substr(begin), tables) << "to write it anew: TERRACE_WRITE_DOCS=1 reference_test";
}

TEST(Reference, TheSampleFileIsTaken) {
  const std::string page = Page();
  const std::string fence = "```yaml\n";
  const size_t begin = page.find(fence) + fence.size();
  std::string file = testing::TempDir() + "terrace-reference-XXXXXX";
  close(mkstemp(file.data()));
  std::ofstream(file) << page.substr(begin, page.find("```", begin) - begin);
  const auto parsed = config::Load(Serve(), {"--config", file}, [](const std::string&) { return std::nullopt; });
  std::filesystem::remove(file);
  ASSERT_TRUE(parsed) << parsed.error().what;
  EXPECT_EQ(parsed->values.Bytes("shared-size"), 2ull << 40);
}

}  // namespace
}  // namespace terrace
