// What could go wrong: a prefix reported too long or too short, more than 3 rounds or 40 questions for one look.
#include "tier/s3_search.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace terrace {
namespace {

struct Found {
  size_t known = 0, rounds = 0, questions = 0;
};

// Answers in random order, as a network does.
template <class Present>
Found Search(size_t chunks, const Present& present, std::mt19937_64& random) {
  S3Search search(chunks);
  Found run;
  for (std::vector<size_t> round = search.Round(); !round.empty(); round = search.Round()) {
    ++run.rounds;
    run.questions += round.size();
    EXPECT_TRUE(std::is_sorted(round.begin(), round.end()));
    EXPECT_LT(round.back(), chunks);
    std::shuffle(round.begin(), round.end(), random);
    bool over = false;
    for (const size_t position : round) {
      if (over) break;
      over = search.Answer(position, present(position));
    }
    EXPECT_TRUE(over);
  }
  run.known = search.known();
  return run;
}

TEST(S3Search, FindsEveryEndOf512ChunksIn3RoundsAnd40Questions) {
  std::mt19937_64 random(1);
  for (const size_t chunks :
       {size_t{1}, size_t{2}, size_t{8}, size_t{9}, size_t{24}, size_t{100}, size_t{511}, size_t{512}}) {
    for (size_t stored = 0; stored <= chunks; ++stored) {
      const Found run = Search(chunks, [&](size_t i) { return i < stored; }, random);
      EXPECT_EQ(run.known, stored) << "of " << chunks;
      EXPECT_LE(run.rounds, 3u);
      EXPECT_LE(run.questions, 30u);
    }
  }
}

TEST(S3Search, FewChunksAndNothingThereTakeOneRound) {
  std::mt19937_64 random(2);
  EXPECT_EQ(Search(8, [](size_t i) { return i < 5; }, random).rounds, 1u);
  EXPECT_EQ(Search(512, [](size_t) { return false; }, random).rounds, 1u);
  EXPECT_EQ(Search(0, [](size_t) { return true; }, random).rounds, 0u);
}

TEST(S3Search, TheFirstAbsentOneEndsARoundEarly) {
  S3Search search(512);
  const std::vector<size_t> round = search.Round();
  EXPECT_EQ(round[0], 0u);
  EXPECT_TRUE(search.Answer(0, false)) << "the others do not matter";
  EXPECT_TRUE(search.Round().empty());
  EXPECT_EQ(search.known(), 0u);
}

TEST(S3Search, AnyNumberOfChunksStaysWithinTheQuestionsAndNeverReportsMoreThanWasSeen) {
  std::mt19937_64 random(3);
  for (const size_t chunks : {size_t{729}, size_t{2196}, size_t{5000}}) {
    for (int i = 0; i < 200; ++i) {
      const size_t stored = random() % (chunks + 1);
      const Found run = Search(chunks, [&](size_t at) { return at < stored; }, random);
      EXPECT_LE(run.known, stored);
      EXPECT_LE(run.rounds, 3u);
      EXPECT_LE(run.questions, 40u);
      if (chunks <= 2196) {
        EXPECT_EQ(run.known, stored) << "of " << chunks;
      }
    }
  }
}

// Holes may be stepped over: a load finds them. Where a hole is asked for, it ends the prefix.
TEST(S3Search, WithHolesThePrefixEndsAtOneThatWasSeenOrBehindThem) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 500; ++i) {
    const size_t chunks = 1 + random() % 600;
    std::set<size_t> there;
    for (size_t at = 0; at < chunks; ++at) {
      if (random() % 8 != 0) there.insert(at);
    }
    const Found run = Search(chunks, [&](size_t at) { return there.contains(at); }, random);
    EXPECT_LE(run.rounds, 3u);
    if (run.known > 0) {
      EXPECT_TRUE(there.contains(run.known - 1)) << "the last of the prefix was seen";
    }
  }
}

}  // namespace
}  // namespace terrace
