// Would catch: a simulated share kinder than a real one (unsynced bytes that survive, an absence that is not
// remembered, an ENOSPC that comes early only), or one that breaks what real file servers keep (synced bytes, O_EXCL,
// listings).
#include "tests/sim/sim_file_io.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <string_view>

#include "base/hash.h"
#include "chunk/frame.h"
#include "tests/sim/oracle.h"

namespace terrace::sim {
namespace {

using namespace std::chrono_literals;

class SimFileIoTest : public testing::Test {
 protected:
  // On a fiber, to the end.
  void OnFiber(const std::function<void()>& body) {
    scheduler.Spawn("test", body);
    ASSERT_TRUE(scheduler.Run([&] { return scheduler.idle(); })) << scheduler.Describe();
  }
  std::unique_ptr<SimFileIo> View(const FaultRates& rates = {}, const std::string& name = "a") {
    return std::make_unique<SimFileIo>(disk, scheduler, log, name, rates, Random(7));
  }
  static std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }
  static void Write(FileIo& io, const std::string& path, std::string_view text, bool sync = true) {
    auto file = io.Open(path, OpenMode::kCreateNew);
    ASSERT_TRUE(file) << file.error().what;
    ASSERT_TRUE((*file)->WriteAt(0, Bytes(text)));
    if (sync) {
      ASSERT_TRUE((*file)->Sync());
    }
    ASSERT_TRUE((*file)->Close());
  }
  static std::string Read(FileIo& io, const std::string& path) {
    auto file = io.Open(path, OpenMode::kRead);
    if (!file) return strerrorname_np(file.error().os_error);
    std::string text(100'000, '\0');
    const auto read = (*file)->ReadAt(0, std::as_writable_bytes(std::span(text)));
    if (!read) return strerrorname_np(read.error().os_error);
    text.resize(*read);
    return text;
  }

  Scheduler scheduler{{.seed = 1}};
  SimLog log{scheduler, false};
  SimDisk disk{scheduler, log, Random(3)};
};

TEST_F(SimFileIoTest, WithoutFaultsItIsAFileSystem) {
  OnFiber([&] {
    const auto a = View(), b = View({}, "b");
    ASSERT_TRUE(a->MakeDir("/share/d"));
    EXPECT_TRUE(a->MakeDir("/share/d"));
    EXPECT_EQ(a->MakeDir("/share/no/d").error().os_error, ENOENT);
    Write(*a, "/share/d/x", "hello");
    EXPECT_EQ(Read(*b, "/share/d/x"), "hello");
    EXPECT_EQ(b->Open("/share/d/x", OpenMode::kCreateNew).error().os_error, EEXIST);
    EXPECT_EQ(a->Stat("/share/d/x")->bytes, 5u);
    EXPECT_TRUE(a->Stat("/share/d")->is_directory);
    ASSERT_TRUE(a->Link("/share/d/x", "/share/d/y"));
    EXPECT_EQ(a->Link("/share/d/x", "/share/d/y").error().os_error, EEXIST);
    EXPECT_EQ(a->Stat("/share/d/y")->links, 2u);
    ASSERT_TRUE(b->Rename("/share/d/x", "/share/d/z"));
    EXPECT_EQ(Read(*a, "/share/d/x"), "ENOENT");
    auto names = *a->List("/share/d");
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, (std::vector<std::string>{"y", "z"}));
    auto append = a->Open("/share/d/z", OpenMode::kAppend);
    ASSERT_TRUE((*append)->Append(Bytes(", you")));
    EXPECT_EQ((*append)->Stat()->bytes, 10u);
    EXPECT_EQ(Read(*b, "/share/d/z"), "hello");  // Not before it is flushed.
    ASSERT_TRUE((*append)->Close());
    EXPECT_EQ(Read(*b, "/share/d/z"), "hello, you");
    ASSERT_TRUE(b->Unlink("/share/d/z"));
    EXPECT_EQ(b->Unlink("/share/d/z").error().os_error, ENOENT);
    EXPECT_EQ(Read(*a, "/share/d/y"), "hello, you");
  });
}

TEST_F(SimFileIoTest, AnAbsenceIsRememberedUntilTheDirectoryIsListed) {
  OnFiber([&] {
    const auto a = View(), b = View({.negative_max = 30s}, "b");
    int believed_absent = 0;
    for (int i = 0; i < 20; ++i) {
      const std::string path = "/share/" + std::to_string(i);
      EXPECT_EQ(Read(*b, path), "ENOENT");
      Write(*a, path, "here");
      believed_absent += Read(*b, path) == "ENOENT";
      ASSERT_TRUE(b->List("/share"));
      EXPECT_EQ(Read(*b, path), "here");
    }
    EXPECT_GT(believed_absent, 15);
    EXPECT_EQ(Read(*b, "/share/last"), "ENOENT");
    Write(*a, "/share/last", "here");
    scheduler.Sleep(31s);
    EXPECT_EQ(Read(*b, "/share/last"), "here");
  });
}

TEST_F(SimFileIoTest, ADeadNodeLosesWhatItHadNotSyncedAndKeepsTheRest) {
  int lost = 0;
  for (int i = 0; i < 20; ++i) {
    OnFiber([&] {
      auto view = View({}, "n" + std::to_string(i));
      const std::string synced = "/share/s" + std::to_string(i), unsynced = "/share/u" + std::to_string(i);
      const std::string text(20'000, 'x');
      Write(*view, synced, text);
      auto file = view->Open(unsynced, OpenMode::kCreateNew);
      ASSERT_TRUE((*file)->WriteAt(0, Bytes(text)));
      view->Crash();
      EXPECT_EQ((*file)->Sync().error().os_error, EIO);
      EXPECT_EQ((*file)->Close().error().os_error, EIO);
      file->reset();
      EXPECT_EQ(view->Unlink(synced).error().os_error, EIO);
      const auto other = View();
      EXPECT_EQ(Read(*other, synced), text);
      lost += Read(*other, unsynced) != text;
    });
  }
  EXPECT_GT(lost, 10);
}

TEST_F(SimFileIoTest, AServerCrashTakesNothingThatWasSyncedAndHasANameForLong) {
  OnFiber([&] {
    auto view = View({.hard_mount = true});
    Write(*view, "/share/old", "old");
    scheduler.Sleep(10s);
    const std::string text(50'000, 'x');
    int unsynced_lost = 0, names_lost = 0;
    for (int i = 0; i < 20; ++i) {
      const std::string path = "/share/new" + std::to_string(i);
      Write(*view, path, text, false);
      const TimePoint before = scheduler.Now();
      disk.Crash(3s);
      const std::string now = Read(*view, path);
      EXPECT_GE(scheduler.Now(), before + 3s);
      names_lost += now == "ENOENT";
      unsynced_lost += now != "ENOENT" && now != text;
      EXPECT_EQ(Read(*view, "/share/old"), "old");
    }
    EXPECT_GT(names_lost, 3);
    EXPECT_GT(unsynced_lost, 3);
  });
}

TEST_F(SimFileIoTest, ENOSPCMostlyComesLateAndOnce) {
  OnFiber([&] {
    auto view = View();
    int late = 0, at_once = 0;
    for (int i = 0; i < 20; ++i) {
      auto file = view->Open("/share/f" + std::to_string(i), OpenMode::kCreateNew);
      ASSERT_TRUE(file);
      disk.SetFull(true);
      if (const auto written = (*file)->WriteAt(0, Bytes("text")); !written) {
        EXPECT_EQ(written.error().os_error, ENOSPC);
        ++at_once;
      } else {
        EXPECT_EQ((*file)->Sync().error().os_error, ENOSPC);
        EXPECT_TRUE((*file)->Close());  // Said already.
        ++late;
      }
      disk.SetFull(false);
    }
    EXPECT_GT(at_once, 0);
    EXPECT_GT(late, at_once);
  });
}

TEST_F(SimFileIoTest, WhileTheServerIsDownASoftMountTimesOut) {
  OnFiber([&] {
    auto view = View({.soft_timeout = 5s});
    Write(*view, "/share/x", "x");
    disk.Unreachable(60s);
    const TimePoint before = scheduler.Now();
    EXPECT_EQ(Read(*view, "/share/x"), "EIO");
    EXPECT_LT(scheduler.Now(), before + 6s);
    scheduler.Sleep(60s);
    EXPECT_EQ(Read(*view, "/share/x"), "x");
  });
}

TEST_F(SimFileIoTest, AnUnmountedShareIsAnotherDirectory) {
  OnFiber([&] {
    auto view = View();
    Write(*view, "/share/x", "x");
    const uint64_t device = view->Stat("/share")->device;
    view->SetMounted(false);
    EXPECT_EQ(Read(*view, "/share/x"), "ENOENT");
    EXPECT_NE(view->Stat("/share")->device, device);
    view->SetMounted(true);
    EXPECT_EQ(Read(*view, "/share/x"), "x");
  });
}

TEST_F(SimFileIoTest, EachFaultHappensAndIsLogged) {
  OnFiber([&] {
    auto view = View({.io_error = 0.1, .lost_reply = 0.1, .slow = 0.05, .torn_write = 0.2, .sync_error = 0.2});
    const std::string text(20'000, 'x');
    for (int i = 0; i < 300; ++i) {
      const std::string path = "/share/" + std::to_string(i);
      auto file = view->Open(path, OpenMode::kCreateNew);
      if (!file) continue;
      if ((*file)->WriteAt(0, Bytes(text)) && (*file)->Sync()) (void)(*file)->Close();
      (void)view->Rename(path, path + "r");
      (void)view->Unlink(path + "r");
    }
    std::string all;
    for (const std::string& line : log.lines()) all += line;
    for (const char* fault : {"EIO on", "lost reply on", "slow on", "torn on write", "EIO late on sync"}) {
      EXPECT_NE(all.find(fault), std::string::npos) << fault;
    }
    EXPECT_EQ(log.faults(), log.lines().size());
  });
}

// --- The oracle's eyes on it

TEST_F(SimFileIoTest, TheOracleSeesAFrameThatGetsItsNameBeforeItIsDurable) {
  for (const bool synced : {true, false}) {
    Oracle oracle(disk, scheduler);
    FrameInfo info;
    info.key.bytes[0] = synced;
    info.parent = info.space;
    info.payload_bytes = 5000;
    oracle.AddChunk(info);
    OnFiber([&] {
      auto view = View();
      const auto& payload = oracle.chunk(info.key).payload;
      const FrameHeader header = EncodeFrameHeader(info, 1, HashSegments(payload));
      std::string frame(reinterpret_cast<const char*>(header.data()), header.size());
      frame.append(reinterpret_cast<const char*>(payload.data()), payload.size());
      frame.resize(FrameBytes(payload.size()));
      const std::string path = "/share/" + Oracle::FramePath(info.key);
      ASSERT_TRUE(view->MakeDir("/share/frames"));
      ASSERT_TRUE(view->MakeDir(path.substr(0, path.rfind('/'))));
      Write(*view, "/share/temp", frame, synced);
      ASSERT_TRUE(view->Link("/share/temp", path));
      ASSERT_TRUE(view->Unlink("/share/temp"));
    });
    EXPECT_EQ(oracle.contradiction().empty(), synced) << oracle.contradiction();
  }
}

}  // namespace
}  // namespace terrace::sim
