// What could go wrong here: a torn, damaged or half-visible record taken for news; a record handed out twice or never
// because a read stopped within it, a journal was rotated, removed or begun anew; a failed append that leaves rubbish
// in front of later records; journals that grow or pile up without bound.
#include "tier/shared_fs_journal.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "base/hash.h"
#include "tests/support/faulty_file_io.h"

namespace terrace {
namespace {

JournalRecord Record(uint64_t n) {
  JournalRecord record{.kind = n % 5 == 4 ? JournalRecord::Kind::kRemoved : JournalRecord::Kind::kPublished,
                       .space = Sha256Of("space"),
                       .key = Sha256Of("key " + std::to_string(n)),
                       .parent = Sha256Of("key " + std::to_string(n - 1)),
                       .payload_bytes = 1000 + n};
  if (record.kind == JournalRecord::Kind::kPublished) {
    record.first_token = static_cast<uint32_t>(256 * n);
    record.token_count = 256;
  } else {
    record.time_ns = static_cast<int64_t>(n) << 40;
  }
  return record;
}
std::vector<JournalRecord> Records(uint64_t begin, uint64_t end) {
  std::vector<JournalRecord> records;
  for (uint64_t n = begin; n < end; ++n) records.push_back(Record(n));
  return records;
}

class SharedFsJournal : public testing::Test {
 protected:
  ~SharedFsJournal() override { std::filesystem::remove_all(dir_); }

  JournalWriter Writer(const std::string& node, uint64_t bytes_max = 4 << 20, uint64_t files_max = 4) {
    return JournalWriter({.directory = dir_, .node = node, .bytes_max = bytes_max, .files_max = files_max}, io_);
  }
  std::vector<JournalRecord> Poll(JournalReader& reader) {
    std::vector<JournalRecord> seen;
    const auto polled = reader.Poll([&](const JournalRecord& record) { seen.push_back(record); });
    EXPECT_TRUE(polled) << polled.error().what;
    return seen;
  }
  void WriteFile(const std::string& name, const std::vector<std::byte>& bytes) {
    std::filesystem::remove(dir_ + "/" + name);  // Written over, ext4 would wait for the disk.
    std::ofstream(dir_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  static std::vector<std::byte> Encode(const std::vector<JournalRecord>& records) {
    std::vector<std::byte> bytes;
    for (const JournalRecord& record : records) {
      const EncodedRecord encoded = EncodeJournalRecord(record);
      bytes.insert(bytes.end(), encoded.begin(), encoded.end());
    }
    return bytes;
  }
  size_t Files() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(dir_), std::filesystem::directory_iterator()));
  }

  static std::string MakeDirectory() {
    std::string pattern = testing::TempDir() + "/journal_XXXXXX";
    return mkdtemp(pattern.data());
  }

  const std::string dir_ = MakeDirectory();
  FaultyFileIo io_;
  JournalReader reader_{dir_, "me", io_};
};

TEST_F(SharedFsJournal, ARecordSurvivesAndAnyFlippedBitMakesItNone) {
  const EncodedRecord good = EncodeJournalRecord(Record(7));
  ASSERT_EQ(DecodeJournalRecord(good), Record(7));
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    EncodedRecord bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(DecodeJournalRecord(bad)) << "bit " << bit;
  }
  EXPECT_FALSE(DecodeJournalRecord(EncodedRecord{}));
}

TEST_F(SharedFsJournal, NamesAreParsedStrictly) {
  const auto parsed = ParseJournalName(FormatJournalName({"host-12-ab", 3}));
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->node, "host-12-ab");
  EXPECT_EQ(parsed->number, 3u);
  for (const char* name : {"", ".log", "a.log", "-000001.log", "a-1.log", "a-0000x1.log", "a-000001.log.tmp",
                           "a-99999999999999999999.log", "a-+00001.log"}) {
    EXPECT_FALSE(ParseJournalName(name)) << name;
  }
}

TEST_F(SharedFsJournal, OthersSeeEachRecordOnceAndInOrder) {
  JournalWriter writer = Writer("other");
  ASSERT_TRUE(writer.Append(Records(0, 3)));
  EXPECT_EQ(Poll(reader_), Records(0, 3));
  EXPECT_TRUE(Poll(reader_).empty());
  ASSERT_TRUE(writer.Append(Records(3, 4)));
  ASSERT_TRUE(writer.Append(Records(4, 3000)));  // More than one read.
  EXPECT_EQ(Poll(reader_), Records(3, 3000));
  EXPECT_TRUE(Poll(reader_).empty());
  reader_.Reset();
  EXPECT_EQ(Poll(reader_), Records(0, 3000));
}

TEST_F(SharedFsJournal, OwnJournalsAndForeignFilesAreLeftAlone) {
  JournalWriter own = Writer("me");
  ASSERT_TRUE(own.Append(Records(0, 3)));
  WriteFile("notes.txt", Encode(Records(0, 3)));
  std::filesystem::create_directory(dir_ + "/other-000000.log");
  EXPECT_TRUE(Poll(reader_).empty());
}

// A reader may come at any moment of an append, and NFS may show any part of it.
TEST_F(SharedFsJournal, AJournalTornAtAnyByteGivesItsWholeRecordsAndTheRestLater) {
  const auto bytes = Encode(Records(0, 3));
  for (size_t n = 0; n <= bytes.size(); ++n) {
    reader_.Reset();
    WriteFile("other-000000.log", {bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n)});
    ASSERT_EQ(Poll(reader_), Records(0, n / kJournalRecordBytes)) << n << " bytes";
    WriteFile("other-000000.log", bytes);
    ASSERT_EQ(Poll(reader_), Records(n / kJournalRecordBytes, 3)) << n << " bytes";
    // The length is there and the bytes are not.
    reader_.Reset();
    std::vector<std::byte> late = bytes;
    std::fill(late.begin() + static_cast<ptrdiff_t>(n), late.end(), std::byte{0});
    WriteFile("other-000000.log", late);
    const size_t whole = Poll(reader_).size();
    ASSERT_EQ(whole, n / kJournalRecordBytes) << n << " bytes";
    WriteFile("other-000000.log", bytes);
    ASSERT_EQ(Poll(reader_), Records(whole, 3)) << n << " bytes";
  }
}

TEST_F(SharedFsJournal, ADamagedRecordCostsItselfOnly) {
  auto bytes = Encode(Records(0, 5));
  bytes[2 * kJournalRecordBytes + 60] ^= std::byte{1};
  WriteFile("other-000000.log", bytes);
  EXPECT_EQ(Poll(reader_), Records(0, 2));
  EXPECT_FALSE(reader_.heard_all()) << "there may be a claim behind it";
  std::vector<JournalRecord> rest;
  for (int poll = 0; poll < 20; ++poll) {
    for (const JournalRecord& record : Poll(reader_)) rest.push_back(record);
  }
  EXPECT_EQ(rest, Records(3, 5));
  EXPECT_TRUE(reader_.heard_all());
}

TEST_F(SharedFsJournal, AFailedAppendIsNeverFollowedByARecordInItsFile) {
  for (const uint64_t keep : {0, 1, 64, 127, 128, 129, 300}) {
    const std::string node = "other" + std::to_string(keep);
    JournalWriter writer = Writer(node);
    ASSERT_TRUE(writer.Append(Records(0, 1)));
    EXPECT_EQ(Poll(reader_), Records(0, 1));
    int failures = 2;  // Append tries twice.
    io_.SetRule([&](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict {
      if (call.op == FaultyFileIo::kWrite && failures-- > 0) return {ENOSPC, keep};
      return {};
    });
    const auto failed = writer.Append(Records(1, 4));
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Code::kFull);
    io_.SetRule(nullptr);
    // What got through is right, if incomplete, and may come again. The new journal of the second try is gone.
    const size_t early = Poll(reader_).size();
    EXPECT_EQ(early, keep / kJournalRecordBytes);
    ASSERT_TRUE(writer.Append(Records(1, 4)));
    EXPECT_EQ(Poll(reader_), Records(1, 4)) << keep;
    EXPECT_TRUE(Poll(reader_).empty());
  }
}

TEST_F(SharedFsJournal, ASyncOrCloseThatFailsFailsTheAppend) {
  for (const auto op : {FaultyFileIo::kSync, FaultyFileIo::kClose, FaultyFileIo::kOpen, FaultyFileIo::kFileStat}) {
    JournalWriter writer = Writer("other" + std::to_string(op));
    io_.SetRule(
        [&](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict { return {.os_error = call.op == op ? EIO : 0}; });
    EXPECT_FALSE(writer.Append(Records(0, 1))) << op;
    io_.SetRule(nullptr);
    EXPECT_TRUE(writer.Append(Records(0, 1)));
  }
}

TEST_F(SharedFsJournal, JournalsRotateAndAReaderMissesNothing) {
  JournalWriter writer = Writer("other", 10 * kJournalRecordBytes, 3);
  std::vector<JournalRecord> seen;
  for (uint64_t n = 0; n < 100; n += 4) {
    ASSERT_TRUE(writer.Append(Records(n, n + 4)));
    for (const JournalRecord& record : Poll(reader_)) seen.push_back(record);
    EXPECT_LE(Files(), 3u);
  }
  EXPECT_EQ(seen, Records(0, 100));
  ASSERT_TRUE(writer.Append(Records(100, 150))) << "more than a journal at once";
  EXPECT_EQ(Poll(reader_), Records(100, 150));
}

TEST_F(SharedFsJournal, ARotatedJournalIsNotReadForEver) {
  JournalWriter writer = Writer("other", 2 * kJournalRecordBytes, 100);
  for (uint64_t n = 0; n < 40; ++n) ASSERT_TRUE(writer.Append(Records(n, n + 1)));
  EXPECT_EQ(Poll(reader_), Records(0, 40));
  Poll(reader_);
  const int before = io_.calls(FaultyFileIo::kOpen);
  Poll(reader_);
  EXPECT_EQ(io_.calls(FaultyFileIo::kOpen) - before, 1) << "only the current one";
}

TEST_F(SharedFsJournal, AJournalThatSomebodyRemovedIsBegunAnewUnderAnotherName) {
  JournalWriter writer = Writer("other");
  ASSERT_TRUE(writer.Append(Records(0, 2)));
  EXPECT_EQ(Poll(reader_), Records(0, 2));
  std::filesystem::remove(dir_ + "/" + FormatJournalName({"other", 0}));
  ASSERT_TRUE(writer.Append(Records(2, 4)));
  EXPECT_EQ(Poll(reader_), Records(2, 4));
}

TEST_F(SharedFsJournal, AJournalThatCannotBeReadNowIsReadLater) {
  JournalWriter a = Writer("a");
  JournalWriter b = Writer("b");
  ASSERT_TRUE(a.Append(Records(0, 2)));
  ASSERT_TRUE(b.Append(Records(10, 12)));
  io_.SetRule([](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict {
    return {.os_error = call.op == FaultyFileIo::kRead && call.path.find("/a-") != std::string::npos ? ESTALE : 0};
  });
  EXPECT_EQ(Poll(reader_), Records(10, 12));
  io_.SetRule(nullptr);
  EXPECT_EQ(Poll(reader_), Records(0, 2));
}

TEST_F(SharedFsJournal, ANodesRecordTellsItsClaimAndTheTimeOfWhatFollows) {
  const auto node = [](uint64_t claimed_bytes, int64_t time_ns) {
    return JournalRecord{.kind = JournalRecord::Kind::kNode, .payload_bytes = claimed_bytes, .time_ns = time_ns};
  };
  JournalWriter writer = Writer("other");
  const JournalRecord first[] = {node(300, 7000), Record(1), Record(4)};
  ASSERT_TRUE(writer.Append(first));
  const std::vector<JournalRecord> seen = Poll(reader_);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].time_ns, 7000);
  EXPECT_EQ(seen[1], Record(4)) << "it has a time of its own";
  EXPECT_TRUE(reader_.heard_all());
  ASSERT_EQ(reader_.peers().count("other"), 1u);
  EXPECT_EQ(reader_.peers().at("other").claimed_bytes, 300u);
  EXPECT_GT(reader_.peers().at("other").written_ns, 0);

  writer.Rotate();
  const JournalRecord second[] = {node(500, 8000)};
  ASSERT_TRUE(writer.Append(second));
  EXPECT_TRUE(Poll(reader_).empty());
  EXPECT_EQ(reader_.peers().at("other").claimed_bytes, 500u);
  reader_.Forget("other");
  EXPECT_EQ(reader_.peers().at("other").claimed_bytes, 0u);
  const JournalRecord third[] = {node(100, 9000)};
  ASSERT_TRUE(writer.Append(third));
  EXPECT_TRUE(Poll(reader_).empty());
  EXPECT_EQ(reader_.peers().at("other").claimed_bytes, 100u) << "it was not dead";
}

TEST_F(SharedFsJournal, WhoCouldNotReadAJournalHasNotHeardAll) {
  JournalWriter writer = Writer("other");
  ASSERT_TRUE(writer.Append(Records(0, 3)));
  for (const auto op : {FaultyFileIo::kOpen, FaultyFileIo::kFileStat, FaultyFileIo::kRead}) {
    io_.SetRule([op](const FaultyFileIo::Call& call) { return FaultyFileIo::Verdict{call.op == op ? EIO : 0}; });
    EXPECT_TRUE(Poll(reader_).empty());
    EXPECT_FALSE(reader_.heard_all()) << op;
  }
  io_.SetRule({});
  EXPECT_EQ(Poll(reader_), Records(0, 3));
  EXPECT_TRUE(reader_.heard_all());
}

// Else a full server takes away what a slow reader has not read.
TEST_F(SharedFsJournal, FailedAppendsTakeNoJournalAwayAndLeaveNone) {
  JournalWriter writer = Writer("other", 4 << 20, 2);
  ASSERT_TRUE(writer.Append(Records(0, 3)));
  io_.SetRule([](const FaultyFileIo::Call& call) {
    return FaultyFileIo::Verdict{call.op == FaultyFileIo::kSync ? ENOSPC : 0};
  });
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(writer.Append(Records(3, 5)));
  io_.SetRule({});
  EXPECT_EQ(Files(), 1u);
  ASSERT_TRUE(writer.Append(Records(3, 5)));
  const std::vector<JournalRecord> seen = Poll(reader_);
  ASSERT_GE(seen.size(), 5u);
  EXPECT_EQ(std::vector(seen.begin(), seen.begin() + 3), Records(0, 3));
  EXPECT_EQ(std::vector(seen.end() - 2, seen.end()), Records(3, 5));
}

TEST_F(SharedFsJournal, ARotatedJournalThatCouldNotBeReadIsNotTakenForRead) {
  JournalWriter writer = Writer("other", 2 * kJournalRecordBytes, 100);
  ASSERT_TRUE(writer.Append(Records(0, 2)));
  ASSERT_TRUE(writer.Append(Records(2, 4)));
  for (const int os_error : {EIO, ENOENT}) {
    io_.SetRule([=](const FaultyFileIo::Call& call) {
      return FaultyFileIo::Verdict{call.op == FaultyFileIo::kOpen ? os_error : 0};
    });
    EXPECT_TRUE(Poll(reader_).empty());
  }
  io_.SetRule({});
  EXPECT_EQ(Poll(reader_), Records(0, 4));
}

TEST_F(SharedFsJournal, ADeadServerIsAskedForOneOfManyJournals) {
  for (const char* node : {"a", "b", "c", "d", "e"}) ASSERT_TRUE(Writer(node).Append(Records(0, 1)));
  int lists = 0;
  // The client has the first listing in its cache; whatever goes to the server takes its time and fails.
  io_.SetRule([&](const FaultyFileIo::Call& call) {
    return FaultyFileIo::Verdict{call.op == FaultyFileIo::kList && lists++ == 0 ? 0 : EIO};
  });
  const int opens = io_.calls(FaultyFileIo::kOpen);
  EXPECT_FALSE(reader_.Poll([](const JournalRecord&) {}));
  EXPECT_EQ(io_.calls(FaultyFileIo::kOpen) - opens, 1);
  io_.SetRule({});
  EXPECT_EQ(Poll(reader_).size(), 5u);
}

TEST_F(SharedFsJournal, AListingThatFailsIsAnError) {
  std::filesystem::remove_all(dir_);
  EXPECT_FALSE(reader_.Poll([](const JournalRecord&) {}));
}

}  // namespace
}  // namespace terrace
