// Would catch: a code point cut in two events, part of a stop string shown, text after a stop, a stop missed because it
// came in pieces, text lost that only looked like the beginning of a stop.
#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace terrace::engine {
namespace {

struct Shown {
  std::vector<std::string> events;
  std::string all;
  bool stopped = false;
};

Shown Stream(const std::vector<std::string>& pieces, std::vector<std::string> stops) {
  TextStream stream(std::move(stops));
  Shown shown;
  for (const std::string& piece : pieces) {
    shown.events.push_back(stream.Push(piece));
    shown.all += shown.events.back();
    if (stream.stopped()) break;
  }
  shown.stopped = stream.stopped();
  shown.all += stream.Finish();
  return shown;
}

TEST(TextStream, WithoutStopsTextGoesOutAtOnce) {
  const Shown shown = Stream({"a", "b c"}, {});
  EXPECT_EQ(shown.events, (std::vector<std::string>{"a", "b c"}));
}

TEST(TextStream, CodePointsAreNeverCut) {
  // U+1F600 and U+00E4, byte by byte.
  const Shown shown = Stream({"x\xf0", "\x9f", "\x98", "\x80", "\xc3", "\xa4"}, {});
  EXPECT_EQ(shown.events, (std::vector<std::string>{"x", "", "", "\xf0\x9f\x98\x80", "", "\xc3\xa4"}));
}

TEST(TextStream, BytesThatCanNeverBeACodePointAreNotHeldForever) {
  EXPECT_EQ(UnfinishedUtf8("a\x80"), 0u);
  EXPECT_EQ(UnfinishedUtf8("\x80\x80\x80\x80"), 0u);
  EXPECT_EQ(UnfinishedUtf8("\xff"), 0u);
  EXPECT_EQ(UnfinishedUtf8("\xf8\x80"), 0u);
  EXPECT_EQ(UnfinishedUtf8(""), 0u);
}

TEST(TextStream, UnfinishedCodePointComesOutAtTheEnd) { EXPECT_EQ(Stream({"a\xe2\x82"}, {}).all, "a\xe2\x82"); }

TEST(TextStream, StopInPiecesIsWithheldAndEndsTheText) {
  const Shown shown = Stream({"one ", "EN", "D", " two"}, {"END"});
  EXPECT_TRUE(shown.stopped);
  EXPECT_EQ(shown.all, "one ");
  EXPECT_EQ(shown.events, (std::vector<std::string>{"one ", "", ""}));
}

TEST(TextStream, WhatOnlyBeganLikeAStopIsShown) {
  const Shown shown = Stream({"one EN", "T"}, {"END"});
  EXPECT_FALSE(shown.stopped);
  EXPECT_EQ(shown.events, (std::vector<std::string>{"one ", "ENT"}));
}

TEST(TextStream, HeldTextComesOutAtTheEnd) { EXPECT_EQ(Stream({"one EN"}, {"END"}).all, "one EN"); }

TEST(TextStream, FirstOfSeveralStopsWins) {
  EXPECT_EQ(Stream({"a b c"}, {"c", "b"}).all, "a ");
  EXPECT_EQ(Stream({"xab"}, {"b", "ab"}).all, "x");
}

TEST(TextStream, StopThatOverlapsItselfIsFound) { EXPECT_EQ(Stream({"aa", "b", "rest"}, {"aab"}).all, ""); }

TEST(TextStream, AnyCutOfTheTextShowsTheSame) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const std::vector<std::string> stops = {"aba", "bb\xc3\xa4"};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 20; ++i) {
      constexpr const char* kParts[] = {"a", "b", "\xc3\xa4", "\xf0\x9f\x98\x80"};
      text += kParts[random() % 4];
    }
    size_t end = text.size();
    for (const std::string& stop : stops) end = std::min(end, text.find(stop));
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t length = std::min<size_t>(1 + random() % 4, text.size() - at);
      pieces.push_back(text.substr(at, length));
      at += length;
    }
    const Shown shown = Stream(pieces, stops);
    ASSERT_EQ(shown.all, text.substr(0, end)) << text;
    ASSERT_EQ(shown.stopped, end < text.size());
    for (const std::string& event : shown.events) ASSERT_EQ(UnfinishedUtf8(event), 0u);
  }
}

}  // namespace
}  // namespace terrace::engine
