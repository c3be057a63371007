// Would catch: a run that is taken for shorter than it is, which would end the process when it is tokenized.
#include "engine/model.h"

#include <gtest/gtest.h>

#include <string>

namespace terrace::engine {
namespace {

TEST(LongestRun, IsOfBlanksAloneOrOfNone) {
  EXPECT_EQ(LongestRun(""), 0u);
  EXPECT_EQ(LongestRun("a"), 1u);
  EXPECT_EQ(LongestRun("abc de"), 3u);
  EXPECT_EQ(LongestRun("de abc"), 3u);
  EXPECT_EQ(LongestRun("abc de \t\r\n f"), 5u);
  EXPECT_EQ(LongestRun("\xc3\xa9\xc3\xa9 e"), 4u);
  EXPECT_EQ(LongestRun(std::string("a\0b c", 5)), 3u);
}

}  // namespace
}  // namespace terrace::engine
