// What could go wrong with servers as they are: a signature that a strict server refuses for some key or query, a
// condition that is not one, trouble that is given the wrong name at the start, two nodes that do not share.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "base/hash.h"
#include "s3/check.h"
#include "tests/support/s3_servers.h"
#include "tier/s3_tier.h"

namespace terrace {
namespace {

using s3::Failure;
using s3::ObjectInfo;
using s3::Style;
using s3::Trouble;
using Kind = S3Server::Kind;

struct Place {
  Kind kind;
  bool tls;
  Style style;
  friend void PrintTo(const Place& place, std::ostream* out) {
    *out << (place.kind == Kind::kVersitygw ? "versitygw" : "seaweedfs") << (place.tls ? "_tls" : "")
         << (place.style == Style::kVirtual ? "_virtual" : "_path");
  }
};

std::string FreshPrefix() {
  static const uint64_t seed = std::random_device{}();
  static int n = 0;
  return "test-" + std::to_string(seed) + "-" + std::to_string(n++);
}

class Clients {
 public:
  TimePoint Soon() const { return clock_.Now() + std::chrono::seconds(30); }

  std::unique_ptr<s3::ObjectStore> Open(const s3::ClientOptions& options) {
    return s3::OpenClient(options, clock_, metrics_);
  }

  struct Answer {
    Failure failure;
    ObjectInfo info;
    std::string bytes;
  };
  template <class Begin>
  static Answer Await(s3::ObjectStore& store, const Begin& begin) {
    auto end = std::make_shared<std::promise<Answer>>();
    store.executor().Post([begin, end] {
      begin([end](const Failure& failure, const ObjectInfo& info) { end->set_value({failure, info, ""}); });
    });
    return end->get_future().get();
  }
  Answer Put(s3::ObjectStore& store, const std::string& key, const std::string& bytes, bool only_if_absent = false) {
    auto owner = std::make_shared<std::string>(bytes);
    return Await(store, [&, owner](auto done) {
      store.Put({.key = key,
                 .body = {std::as_bytes(std::span(*owner))},
                 .owner = owner,
                 .only_if_absent = only_if_absent,
                 .deadline = Soon()},
                done);
    });
  }
  Answer Get(s3::ObjectStore& store, const std::string& key, uint64_t begin = 0, uint64_t end = 0) {
    auto bytes = std::make_shared<std::string>();
    Answer answer = Await(store, [&, bytes](auto done) {
      s3::GetRequest request{.key = key, .begin = begin, .end = end, .deadline = Soon()};
      request.sink = [bytes, begin](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
        bytes->resize(offset - begin);
        bytes->append(reinterpret_cast<const char*>(piece.data()), piece.size());
        return true;
      };
      store.Get(std::move(request), done);
    });
    answer.bytes = *bytes;
    return answer;
  }
  Answer Head(s3::ObjectStore& store, const std::string& key) {
    return Await(store, [&](auto done) { store.Head(key, Soon(), done); });
  }
  Answer Delete(s3::ObjectStore& store, const std::string& key) {
    return Await(store, [&](auto done) { store.Delete(key, Soon(), done); });
  }
  std::vector<std::string> List(s3::ObjectStore& store, const std::string& prefix, size_t page) {
    std::vector<std::string> keys;
    std::string token;
    do {
      std::promise<void> end;
      store.executor().Post([&] {
        store.List({.prefix = prefix, .token = token, .limit = page, .deadline = Soon()},
                   [&](const Failure& failure, const s3::ListPage& list) {
                     EXPECT_FALSE(failure) << failure.Describe();
                     for (const auto& object : list.objects) keys.push_back(object.key);
                     token = list.next;
                     end.set_value();
                   });
      });
      end.get_future().get();
    } while (!token.empty());
    return keys;
  }
  s3::CheckResult Check(const s3::ClientOptions& options) {
    const auto store = Open(options);
    return s3::CheckBucket(*store, clock_.Now() + std::chrono::seconds(10));
  }

 protected:
  SystemClock clock_;
  Metrics metrics_;
};

class RealServer : public testing::TestWithParam<Place>, protected Clients {
 protected:
  s3::ClientOptions Options(const std::string& prefix = "") {
    return S3Server::Get(GetParam().kind, GetParam().tls).Client(prefix, GetParam().style);
  }
};

// D19.
TEST_P(RealServer, KeysOfAnyByteAreWrittenFoundReadListedAndRemoved) {
  const auto store = Open(Options());
  const std::string root = FreshPrefix() + "/";
  const std::string names[] = {"model@rev/a=b",     "with space",       "plus+plus",     "tilde~(par)'!*$",
                               "u-umlaut \xc3\xbc", "comma,;:&?#%25[]", "a/b/c=d@e+f ~g"};
  std::vector<std::string> expected;
  for (const std::string& name : names) {
    const std::string key = root + name;
    const std::string bytes = "bytes of " + name;
    const Answer put = Put(*store, key, bytes);
    ASSERT_FALSE(put.failure) << name << ": " << put.failure.Describe();
    const Answer head = Head(*store, key);
    EXPECT_FALSE(head.failure) << name << ": " << head.failure.Describe();
    EXPECT_EQ(head.info.bytes, bytes.size());
    const Answer got = Get(*store, key);
    EXPECT_FALSE(got.failure) << name << ": " << got.failure.Describe();
    EXPECT_EQ(got.bytes, bytes);
    expected.push_back(key);
  }
  std::sort(expected.begin(), expected.end());
  std::vector<std::string> listed = List(*store, root, 3);
  std::sort(listed.begin(), listed.end());
  EXPECT_EQ(listed, expected);
  for (const std::string& key : expected) {
    EXPECT_FALSE(Delete(*store, key).failure) << key;
    EXPECT_EQ(Get(*store, key).failure.trouble, Trouble::kNotFound) << key;
  }
}

TEST_P(RealServer, RangesAndTheirEnds) {
  const auto store = Open(Options());
  const std::string key = FreshPrefix() + "/k";
  std::string bytes(100'000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  ASSERT_FALSE(Put(*store, key, bytes).failure);
  const Answer middle = Get(*store, key, 5000, 9000);
  EXPECT_TRUE(middle.bytes == bytes.substr(5000, 4000));
  EXPECT_EQ(middle.info.bytes, bytes.size());
  EXPECT_TRUE(Get(*store, key, 99'000, 200'000).bytes == bytes.substr(99'000));
  EXPECT_EQ(Get(*store, key, 100'000, 200'000).failure.trouble, Trouble::kNoRange);
}

TEST_P(RealServer, OfManyConditionalWritersOneWins) {
  const std::string key = FreshPrefix() + "/k";
  constexpr int kWriters = 8;
  std::atomic<int> won{0};
  std::atomic<int> lost{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      const auto store = Open(Options());
      const Answer put = Put(*store, key, "writer " + std::to_string(i), true);
      if (!put.failure) ++won;
      if (put.failure.trouble == Trouble::kExists) ++lost;
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(won.load(), 1);
  EXPECT_EQ(lost.load(), kWriters - 1);
}

TEST_P(RealServer, PartsBecomeOneObjectAndSignedBodiesAreTaken) {
  s3::ClientOptions options = Options();
  options.single_put_bytes_max = 6 << 20;
  options.part_bytes = 5 << 20;
  options.sign_payload = true;
  const auto store = Open(options);
  const std::string key = FreshPrefix() + "/k";
  std::mt19937_64 random(3);
  std::string bytes(12 << 20, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  const Answer put = Put(*store, key, bytes, true);
  ASSERT_FALSE(put.failure) << put.failure.Describe();
  EXPECT_TRUE(Get(*store, key).bytes == bytes);
  EXPECT_EQ(Put(*store, key, bytes, true).failure.trouble, Trouble::kExists);
  EXPECT_FALSE(Put(*store, key + "-small", "signed").failure);
}

TEST_P(RealServer, AWrongKeyOrSecretIsNamed) {
  s3::ClientOptions options = Options(FreshPrefix());
  options.credentials.fixed.secret_access_key = "not the secret";
  EXPECT_EQ(Check(options).failure.trouble, Trouble::kWrongKey);
  options = Options(FreshPrefix());
  options.credentials.fixed.access_key_id = "NOBODY";
  EXPECT_EQ(Check(options).failure.trouble, Trouble::kWrongKey);
}

TEST_P(RealServer, AMissingBucketIsNamed) {
  s3::ClientOptions options = Options(FreshPrefix());
  options.endpoint.bucket = "no-such-bucket";
  const s3::CheckResult result = Check(options);
  EXPECT_EQ(result.failure.trouble, Trouble::kNoBucket) << result.failure.Describe();
  EXPECT_NE(s3::CheckError(result, options.endpoint).what.find("create bucket no-such-bucket"), std::string::npos);
}

TEST_P(RealServer, TheWrongSchemeIsNamed) {
  s3::ClientOptions options = Options(FreshPrefix());
  options.attempts_max = 1;
  options.endpoint.scheme = GetParam().tls ? "http" : "https";
  const s3::CheckResult result = Check(options);
  EXPECT_EQ(result.failure.trouble, GetParam().tls ? Trouble::kTlsServer : Trouble::kPlainServer)
      << result.failure.Describe();
}

TEST_P(RealServer, TwoNodesShareWhatEitherWrites) {
  const s3::ClientOptions client = Options(FreshPrefix());
  const auto open = [&] {
    auto tier = OpenS3Tier(client, {}, {.clock = clock_, .metrics = metrics_});
    EXPECT_TRUE(tier) << tier.error().what;
    return *std::move(tier);
  };
  const std::unique_ptr<Tier> writer = open();
  const std::unique_ptr<Tier> reader = open();
  constexpr size_t kChunks = 40;
  const Digest space = Sha256Of("space");
  std::vector<Digest> keys;
  std::vector<SaveItem> items;
  auto payload = std::make_shared<std::vector<std::byte>>(5000, std::byte{7});
  for (size_t i = 0; i < kChunks; ++i) {
    keys.push_back(Sha256Of("key " + std::to_string(i)));
    items.push_back(
        {.info = {.space = space, .key = keys[i], .parent = i == 0 ? space : keys[i - 1], .payload_bytes = 5000},
         .payload = *payload,
         .owner = payload});
  }
  auto saved = std::make_shared<SaveBatch>(kChunks);
  writer->Save(std::move(items), saved);
  ASSERT_TRUE(saved->WaitAll(Soon()));
  keys.push_back(Sha256Of("never written"));

  std::promise<std::optional<Error>> probed;
  reader->Probe(keys, Soon(), [&](const std::optional<Error>& trouble) { probed.set_value(trouble); });
  const std::optional<Error> trouble = probed.get_future().get();
  EXPECT_FALSE(trouble) << trouble->what;
  std::vector<uint8_t> present(keys.size());
  reader->Contains(keys, present);
  EXPECT_EQ(std::count(present.begin(), present.end(), 1), static_cast<ptrdiff_t>(kChunks));
  EXPECT_EQ(present.back(), 0);

  auto into = std::make_shared<std::vector<std::byte>>(5000);
  auto loaded = std::make_shared<LoadBatch>(1);
  reader->Load({{.key = keys[kChunks - 1], .space = space, .into = *into, .owner = into}}, Soon(), loaded);
  ASSERT_TRUE(loaded->WaitAll(Soon()));
  EXPECT_EQ(loaded->Poll(0)->outcome, Outcome::kHit);
  EXPECT_TRUE(*into == *payload);
}

// By the server's own times, lists and conditions.
TEST_P(RealServer, TheBoundsOfABucketAreKeptLeafFirst) {
  const s3::ClientOptions client = Options(FreshPrefix());
  const auto open = [&](const S3Bounds& bounds) {
    S3TierOptions options{.list_interval = std::chrono::milliseconds(100), .bounds = bounds};
    auto tier = OpenS3Tier(client, options, {.clock = clock_, .metrics = metrics_});
    EXPECT_TRUE(tier) << tier.error().what;
    return *std::move(tier);
  };
  constexpr size_t kChunks = 20;
  const Digest space = Sha256Of("space");
  auto payload = std::make_shared<std::vector<std::byte>>(1000, std::byte{7});
  std::vector<SaveItem> items;
  for (size_t i = 0; i < kChunks; ++i) {
    items.push_back({.info = {.space = space,
                              .key = Sha256Of("key " + std::to_string(i)),
                              .parent = i == 0 ? space : items.back().info.key,
                              .payload_bytes = 1000},
                     .payload = *payload,
                     .owner = payload});
  }
  const std::vector<SaveItem> chain = items;
  const std::unique_ptr<Tier> writer = open({});
  auto saved = std::make_shared<SaveBatch>(kChunks);
  writer->Save(std::move(items), saved);
  ASSERT_TRUE(saved->WaitAll(Soon()));

  const auto store = Open(client);
  const auto left = [&] { return List(*store, client.endpoint.prefix + "/frames/", 1000).size(); };
  const auto await = [&](size_t frames) {
    const TimePoint deadline = Soon();
    while (left() != frames && clock_.Now() < deadline) std::this_thread::yield();
    return left();
  };
  const std::unique_ptr<Tier> bounded = open({.bytes_max = 16 * 8192});
  EXPECT_EQ(await(15), 15u);
  for (size_t i = 0; i < 15; ++i) {
    const std::string hex = chain[i].info.key.Hex();
    const std::string name = client.endpoint.prefix + "/frames/" + hex.substr(0, 3) + "/" + hex + ".kvf";
    EXPECT_FALSE(Head(*store, name).failure) << i;
  }
  EXPECT_FALSE(Head(*store, client.endpoint.prefix + "/collector.lease").failure);
  bounded->Close(Soon());
  EXPECT_EQ(Head(*store, client.endpoint.prefix + "/collector.lease").failure.trouble, Trouble::kNotFound);
  const std::unique_ptr<Tier> forgetful = open({.ttl = std::chrono::seconds(1)});
  EXPECT_EQ(await(0), 0u);
}

TEST_P(RealServer, AWriteOverAnotherVersionThanWasReadIsRefused) {
  const auto store = Open(Options());
  const std::string key = FreshPrefix() + "/k";
  ASSERT_FALSE(Put(*store, key, "one").failure);
  const std::string etag = Get(*store, key).info.etag;
  const auto over = [&](const std::string& bytes) {
    auto owner = std::make_shared<std::string>(bytes);
    return Await(*store, [&, owner](auto done) {
      store->Put({.key = key,
                  .body = {std::as_bytes(std::span(*owner))},
                  .owner = owner,
                  .if_match = etag,
                  .deadline = Soon()},
                 done);
    });
  };
  EXPECT_FALSE(over("two").failure);
  EXPECT_EQ(over("three").failure.trouble, Trouble::kExists);
  const Answer answer = Get(*store, key);
  EXPECT_EQ(answer.bytes, "two");
  EXPECT_GT(answer.info.modified, 1'700'000'000);
  EXPECT_GE(answer.info.now + 2, answer.info.modified) << "its Date may be that of a second ago";
}

INSTANTIATE_TEST_SUITE_P(Places, RealServer,
                         testing::Values(Place{Kind::kVersitygw, false, Style::kPath},
                                         Place{Kind::kVersitygw, true, Style::kVirtual},
                                         Place{Kind::kSeaweedfs, false, Style::kVirtual},
                                         Place{Kind::kSeaweedfs, true, Style::kPath}),
                         testing::PrintToStringParamName());

class RealServerAlone : public testing::Test, protected Clients {};

TEST_F(RealServerAlone, AnotherCaThanTheServersIsNamed) {
  const S3Server& server = S3Server::Get(Kind::kVersitygw, true);
  s3::ClientOptions options = server.Client(FreshPrefix(), Style::kPath);
  options.http.ca_file = "";  // The system's, which has not signed it.
  EXPECT_EQ(Check(options).failure.trouble, Trouble::kWrongCa);
  options.http.ca_file = "/no/such/file.pem";
  EXPECT_EQ(Check(options).failure.trouble, Trouble::kCaFile);
  options = server.Client(FreshPrefix(), Style::kPath);
  options.endpoint.host = "127.0.0.2";  // Not in the certificate, and the server is not there.
  const Trouble other = Check(options).failure.trouble;
  EXPECT_TRUE(other == Trouble::kUnreachable || other == Trouble::kWrongCa) << s3::TroubleName(other);
}

TEST_F(RealServerAlone, Http2IsSpokenWhereItIsOfferedUnlessUnwanted) {
  const S3Server& server = S3Server::Get(Kind::kSeaweedfs, true);
  for (const bool wanted : {true, false}) {
    HttpClient client({.ca_file = server.ca_file(), .http2 = wanted});
    std::promise<int> version;
    client.Start({.url = "https://127.0.0.1:" + std::to_string(server.port()) + "/", .deadline = Soon()},
                 [&](const HttpResponse& response) { version.set_value(response.http_version); });
    EXPECT_EQ(version.get_future().get(), wanted ? 20 : 11);
  }
}

TEST_F(RealServerAlone, AServerThatKnowsOnlyPathStyleIsNamed) {
  const S3Server& server = S3Server::Get(Kind::kVersitygw, false);
  s3::ClientOptions options = server.Client(FreshPrefix(), Style::kVirtual);
  options.endpoint.host = "elsewhere.localhost";  // Not the domain that it was told.
  const s3::CheckResult result = Check(options);
  EXPECT_EQ(result.failure.trouble, Trouble::kNeedsPathStyle) << result.failure.Describe();
  EXPECT_NE(s3::CheckError(result, options.endpoint).what.find("--s3-addressing path"), std::string::npos);
}

}  // namespace
}  // namespace terrace
