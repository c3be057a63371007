// Would catch: a client that is held up by a node that is not there, whose first calls miss although the node is there,
// or that does not say, or says over and over, why it can't join; one that writes where a node may still be reading.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "client/node_client.h"
#include "client/packet_socket.h"
#include "client/wire.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

TimePoint Soon() { return std::chrono::steady_clock::now() + 30s; }  // A failure, not a measure.

class NodeJoin : public testing::Test {
 protected:
  NodeJoin() {
    log::SetSink([this](log::Level, std::string_view line) {
      std::lock_guard lock(mutex);
      lines.emplace_back(line);
    });
  }
  ~NodeJoin() override { log::SetSink(nullptr); }
  std::vector<std::string> Lines(const std::string& event) {
    std::lock_guard lock(mutex);
    std::vector<std::string> found;
    for (const std::string& line : lines) {
      if (line.find("event=" + event) != std::string::npos) found.push_back(line);
    }
    return found;
  }
  std::vector<std::string> Refusals() { return Lines("node_refused"); }
  // What a client says that is opened for a node at `path`.
  std::string Missing(const std::string& path) {
    {
      std::lock_guard lock(mutex);
      lines.clear();
    }
    const auto client = NewNodeClient({.node_wait = 1h}, path);
    EXPECT_FALSE(client->connected());
    for (const TimePoint deadline = Soon(); Lines("node_missing").empty();) {  // It is said just after the attempt.
      if (std::chrono::steady_clock::now() > deadline) return "(nothing)";
      std::this_thread::yield();
    }
    return Lines("node_missing")[0];
  }

  const std::string socket = "@terrace-join-test-" + std::to_string(getpid());
  std::mutex mutex;
  std::vector<std::string> lines;  // Guarded by mutex.
};

TEST_F(NodeJoin, WhoIsNotThereIsNotWaitedFor) {
  const auto client = NewNodeClient({.node_wait = 1h}, socket);
  EXPECT_FALSE(client->connected());
  const auto lookup = client->Lookup({Digest{}});
  ASSERT_TRUE(lookup->done());
  EXPECT_EQ(lookup->Poll(0)->miss_reason, Reason::kUnavailable);
  EXPECT_TRUE(Refusals().empty());
}

TEST_F(NodeJoin, ASocketThatCanNotBeOpenedIsSaidWithWhatToDo) {
  std::string folder = (std::filesystem::temp_directory_path() / "terrace-join-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/node.sock";
  EXPECT_NE(Missing(path).find("no such file; start `terrace node --socket " + path), std::string::npos);
  std::ofstream(path) << "text";
  EXPECT_NE(Missing(path).find("the file is no socket"), std::string::npos);
  EXPECT_NE(Missing(path + "/below").find("is no folder"), std::string::npos);
  std::filesystem::remove(path);
  {
    const Listener dead = ListenAt(path).value();
    std::filesystem::rename(path, path + ".kept");  // One that is killed leaves its file behind.
  }
  std::filesystem::rename(path + ".kept", path);
  EXPECT_NE(Missing(path).find("its node has ended; start it again"), std::string::npos);
  std::filesystem::remove(path);
  const Fd other(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(other.get(), 1), 0);
  EXPECT_NE(Missing(path).find("another program's socket"), std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST_F(NodeJoin, ASocketOfAnotherUserIsSaidWithWhatToDo) {
  const bool root = geteuid() == 0;
  std::string folder = (std::filesystem::temp_directory_path() / "terrace-join-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const Listener listener = ListenAt(folder + "/node.sock").value();
  ASSERT_EQ(root ? seteuid(65534) : chmod(folder.c_str(), 0), 0);  // Of all threads.
  const std::string line = Missing(folder + "/node.sock");
  ASSERT_EQ(root ? seteuid(0) : chmod(folder.c_str(), 0700), 0);
  EXPECT_NE(line.find("belongs in the node's group"), std::string::npos) << line;
  std::filesystem::remove_all(folder);
}

// Its backlog is gone with it: who waited there sees a socket that was hung up.
TEST_F(NodeJoin, ANodeThatIsKilledBeforeItLetAClientInHasNotRefusedIt) {
  std::string folder = (std::filesystem::temp_directory_path() / "terrace-join-XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/node.sock";
  {
    Listener listener = ListenAt(path).value();
    const auto client = NewNodeClient({.node_wait = 0ms}, path);
    pollfd event{.fd = listener.fd.get(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&event, 1, 30'000), 1);
    listener.fd = Fd();
    for (const TimePoint deadline = Soon(); Lines("node_missing").empty() && Refusals().empty();) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }
  EXPECT_TRUE(Refusals().empty()) << Refusals()[0];
  std::filesystem::remove_all(folder);
}

TEST_F(NodeJoin, WhoReadsThatItIsGoneReadsThatItIsBack) {
  const Fd arena = NewSharedMemory("arena", 4096).value();
  const auto welcome = [&](const Fd& listener) {
    pollfd event{.fd = listener.get(), .events = POLLIN, .revents = 0};
    poll(&event, 1, 30'000);
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    event.fd = fd.get();
    poll(&event, 1, 30'000);
    std::vector<std::byte> bytes;
    Fd none;
    ReceiveMessage(fd.get(), bytes, none);
    SendMessage(fd.get(), wire::Encode(wire::Header{.kind = wire::Kind::kWelcome, .numbers = {1, 4096}}), arena.get());
    return fd;
  };
  const auto said = [&](const std::string& event, size_t times) {
    for (const TimePoint deadline = Soon(); Lines(event).size() < times;) {
      if (std::chrono::steady_clock::now() > deadline) return std::string("(nothing)");
      std::this_thread::yield();
    }
    return Lines(event)[times - 1];
  };
  const Listener listener = ListenAt(socket).value();
  const auto client = NewNodeClient({.node_wait = 0ms}, socket);
  {
    const Fd first = welcome(listener.fd);
    EXPECT_NE(said("node_joined", 1).find("level=info"), std::string::npos);
  }
  EXPECT_NE(said("node_lost", 1).find("level=warn"), std::string::npos);
  const Fd second = welcome(listener.fd);
  EXPECT_NE(said("node_joined", 2).find("level=warn"), std::string::npos);
}

TEST_F(NodeJoin, WhoListensAndSaysNothingIsWaitedForAsLongAsAsked) {
  const Listener listener = ListenAt(socket).value();
  const auto client = NewNodeClient({.node_wait = 20ms}, socket);
  EXPECT_FALSE(client->connected());
  ASSERT_TRUE(client->Lookup({Digest{}})->done());
}

TEST_F(NodeJoin, AnotherVersionIsSaidOnceWithBothNumbersAndTriedAgain) {
  const Listener listener = ListenAt(socket).value();
  std::atomic<int> tries{0};
  std::atomic<bool> over{false};
  std::thread node([&] {
    while (!over.load()) {
      pollfd event{.fd = listener.fd.get(), .events = POLLIN, .revents = 0};
      if (poll(&event, 1, 10) != 1) continue;
      const Fd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
      event.fd = fd.get();
      poll(&event, 1, 30'000);
      std::vector<std::byte> hello;
      Fd none;
      ReceiveMessage(fd.get(), hello, none);  // What a socket has not read when it closes takes its answers with it.
      SendMessage(fd.get(), wire::Encode(wire::Header{.version = wire::kVersion + 7, .kind = wire::Kind::kHello}));
      tries.fetch_add(1);
    }
  });
  {
    const auto client = NewNodeClient({.node_wait = 1h}, socket);
    EXPECT_FALSE(client->connected());
    const auto load = client->Prefetch({.keys = {Digest{}}, .payload_bytes = 1, .deadline = Soon()});
    ASSERT_TRUE(load->done()) << "goes on without";
    for (const TimePoint deadline = Soon(); tries.load() < 3;) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }
  over.store(true);
  node.join();
  const auto refusals = Refusals();
  ASSERT_EQ(refusals.size(), 1u);
  EXPECT_NE(refusals[0].find("version " + std::to_string(wire::kVersion + 7)), std::string::npos) << refusals[0];
  EXPECT_NE(refusals[0].find("one release"), std::string::npos) << refusals[0];
}

// A node by hand: hands each message of one client to `answer`, until that client hangs up.
void ServeByHand(const Listener& listener, const std::function<void(int fd, const wire::Header& asked)>& answer) {
  pollfd event{.fd = listener.fd.get(), .events = POLLIN, .revents = 0};
  poll(&event, 1, 30'000);
  const Fd fd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
  event.fd = fd.get();
  std::vector<std::byte> bytes;
  Fd none;
  while (poll(&event, 1, 30'000) == 1 && ReceiveMessage(fd.get(), bytes, none) == Received::kMessage) {
    answer(fd.get(), wire::Decode(bytes).value().header);
  }
}

// A node by hand that welcomes a client and says nothing more.
TEST_F(NodeJoin, ANodeThatDoesNotAnswerIsLeftSoThatTheNextSaveNeedNotWait) {
  const Listener listener = ListenAt(socket).value();
  const Fd arena = NewSharedMemory("arena", 4096).value();
  std::thread node([&] {
    ServeByHand(listener, [&](int fd, const wire::Header& asked) {
      const wire::Header answer{.kind = wire::Kind::kWelcome, .call = asked.call, .numbers = {1, 4096}};
      if (asked.kind == wire::Kind::kHello) SendMessage(fd, wire::Encode(answer), arena.get());
    });
  });
  const auto client = NewNodeClient({.node_wait = 30s, .save_max = 100ms}, socket);
  for (const Reason reason : {Reason::kTimeout, Reason::kUnavailable}) {
    const auto payload = std::make_shared<std::vector<std::byte>>(8192);
    FrameInfo info;
    info.payload_bytes = payload->size();
    const auto save = client->Save({{info, {*payload}}}, payload);
    ASSERT_TRUE(save->Wait(Soon()));
    EXPECT_EQ(save->Poll(0)->reason, reason);
    if (reason == Reason::kTimeout) node.join();  // The client has hung up.
  }
}

// A node by hand that takes all a client says and never answers a commit. It has room for one chunk.
TEST_F(NodeJoin, WhatANodeMayStillBeReadingIsNotWrittenTo) {
  constexpr uint64_t kChunkBytes = 8192;
  const Listener listener = ListenAt(socket).value();
  const Fd arena = NewSharedMemory("arena", 4096).value();
  const Fd memory = NewSharedMemory("segment", kChunkBytes).value();
  const auto segment = Mapping::Map(memory.get(), kChunkBytes, false);
  int commits = 0;
  std::byte committed{};
  bool changed = false;
  std::thread node([&] {
    ServeByHand(listener, [&](int fd, const wire::Header& asked) {
      wire::Header answer{.call = asked.call};
      switch (asked.kind) {
        case wire::Kind::kHello:
          answer.kind = wire::Kind::kWelcome;
          answer.numbers = {1, 4096};
          SendMessage(fd, wire::Encode(answer), arena.get());
          break;
        case wire::Kind::kNeeds:
          answer.kind = wire::Kind::kNeeded;
          SendMessage(fd, wire::Encode<uint8_t>(answer, std::vector<uint8_t>(asked.count, 1)));
          break;
        case wire::Kind::kSegment:
          answer.kind = wire::Kind::kGranted;
          answer.numbers = {9, kChunkBytes};
          SendMessage(fd, wire::Encode(answer), memory.get());
          break;
        case wire::Kind::kCommit:
          ++commits;
          committed = segment->bytes()[0];
          break;
        default: break;
      }
    });
    changed = segment->bytes()[0] != committed;
  });
  {
    const auto client = NewNodeClient({.node_wait = 30s, .save_max = 100ms}, socket);
    for (int i = 1; i <= 2; ++i) {
      const auto payload = std::make_shared<std::vector<std::byte>>(kChunkBytes, static_cast<std::byte>(i));
      FrameInfo info;
      info.key.bytes[0] = static_cast<uint8_t>(i);
      info.payload_bytes = kChunkBytes;
      const auto save = client->Save({{info, {*payload}}}, payload);
      ASSERT_TRUE(save->Wait(Soon()));
      EXPECT_EQ(save->Poll(0)->reason, i == 1 ? Reason::kTimeout : Reason::kUnavailable);
    }
    node.join();  // The client has hung up.
  }
  EXPECT_EQ(commits, 1);
  EXPECT_FALSE(changed);
}

}  // namespace
}  // namespace terrace
