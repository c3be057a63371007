// Would catch: two names on one path, a path that leaves its root, a name that does not come back, a component longer
// than a file system takes.
#include "chunk/name.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

namespace terrace {
namespace {

void ExpectSafe(const std::string& path) {
  ASSERT_FALSE(path.empty());
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string component = path.substr(begin, end - begin);
    EXPECT_FALSE(component.empty()) << path;
    EXPECT_NE(component[0], '.') << path;
    EXPECT_LE(component.size(), 200u) << path;
    begin = end + 1;
  }
}

// D6.
TEST(Name, HardNamesAreDistinctSafeAndComeBack) {
  const std::vector<std::string> names = {"org/m",
                                          "../m",
                                          "m m",
                                          "m@1",
                                          "m%2F",
                                          "m\xC3\xBC",
                                          std::string(300, 'x'),
                                          std::string(300, '/'),
                                          std::string(301, 'x'),
                                          "",
                                          ".",
                                          "..",
                                          "/",
                                          "m",
                                          "M",
                                          "org%2fm",
                                          "%",
                                          "+",
                                          "a+/b",
                                          ".hidden",
                                          "a/.b",
                                          std::string("\0", 1),
                                          std::string("m\0", 2)};
  std::set<std::string> paths;
  for (const std::string& name : names) {
    const std::string path = EncodeName(name);
    ExpectSafe(path);
    paths.insert(path);
    EXPECT_EQ(DecodeName(path), name);
  }
  EXPECT_EQ(paths.size(), names.size());
}

TEST(Name, RandomBytesComeBack) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::string name(random() % 600, '\0');
    for (char& c : name) c = static_cast<char>(random() % 4 ? "./+%aZ"[random() % 6] : random());
    ExpectSafe(EncodeName(name));
    EXPECT_EQ(DecodeName(EncodeName(name)), name);
  }
}

TEST(Name, OtherSpellingsAreRefused) {
  for (const char* path : {"", "A", "a/b", "../m", "%2", "%41%", "%61", "%2F", "a+", "a+/b", "/a", "a/"}) {
    EXPECT_EQ(DecodeName(path), std::nullopt) << path;
  }
}

}  // namespace
}  // namespace terrace
