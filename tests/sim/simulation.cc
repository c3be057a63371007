#include "tests/sim/simulation.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/assert.h"
#include "chunk/frame.h"
#include "tests/sim/bounds_proof.h"
#include "tests/sim/disk_proof.h"
#include "tests/sim/sim_node.h"
#include "tier/shared_fs_journal.h"

namespace terrace::sim {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr uint32_t kChunkTokens = 16;

// No call but LoadJob::Wait and Close may let time pass, and Wait only until its deadline.
constexpr Scheduler::Duration kWaitSlack = milliseconds(1);

// A close waits beyond its deadline for calls to the operating system that don't return: the longest outage and
// the longest slow operations that can follow it.
constexpr seconds kCloseSlack{60};

// Since faults ended: what a node remembered wrongly is forgotten (30 s), the server is back (20 s), a scan begun after
// that has been everywhere.
constexpr seconds kRecovery = seconds(35) + kScanInterval;

// What one node publishes, the others know then, journals and NFS included.
constexpr seconds kVisibleWithin{2};

std::string Seconds(Scheduler::Duration duration) {
  return std::to_string(duration_cast<milliseconds>(duration).count()) + " ms";
}

// A node with its clients through all its lives.
struct Seat {
  std::string name;
  std::shared_ptr<SimNode> node;  // Null while it is down.
  std::vector<Scheduler::FiberId> clients;
  bool stop_clients = false;  // Of this life.
  uint64_t last_life = 0;
  Scheduler::FiberId operator_fiber = 0;
};

class Simulation {
 public:
  explicit Simulation(const RunOptions& options) : world_(options), random_(world_.plan.random.Fork()) {
    if (!world_.plan.bounded()) return;
    world_.oracle.may_go = [this](const SimDisk::NameChange& change) {
      ++report_.collected;
      return MayBeCollected(world_, change);
    };
    if (world_.plan.on_bucket) return;
    // A crash of the server may take back claims, and what they stood for is there.
    world_.oracle.on_change = [this] {
      if (world_.disk.epoch() == 0) ProveSize(world_, "in between");
    };
  }

  RunReport Run();

 private:
  using Item = LoadJob::Item;

  void MakeConversations();
  void Direct();  // The fiber that all others hang from.

  // Lives.
  void Begin(Seat& seat) { Begin(seat, world_.plan.clients); }
  void Begin(Seat& seat, size_t clients);
  void StopClients(Seat& seat);
  void End(Seat& seat);      // Honestly.
  void Bury(Seat& seat);     // After a death.
  void Operate(Seat& seat);  // Until faults end: dies, restarts.
  void Sabotage();           // Until faults end.
  void SabotageOnce(Random& random);
  void RotOnDisk(Random& random);
  void PlantNews(const Digest& key, JournalRecord::Kind kind, Random& random);

  // Clients. `life` guards against a seat whose node is another one by now.
  struct Client {
    std::shared_ptr<SimNode> node;
    Seat& seat;
    uint64_t life;
    Random random;
    bool Over() const { return seat.last_life != life || seat.stop_clients || node->dead(); }
  };
  void Serve(Client client);
  void Turn(Client& client);
  void CheckLookup(Client& client, const Conversation& talk);
  // One lease for each chunk loaded, empty if it was given back already.
  std::vector<Lease> LoadSome(Client& client, const Conversation& talk, size_t chunks, TimePoint deadline);
  void SaveOne(Client& client, const Digest& key);
  Item WaitFor(SimNode& node, LoadJob& job, size_t i, TimePoint deadline);
  void CheckItem(const SimNode& node, const Digest& key, const Item& item);
  Item LoadOne(SimNode& node, const Digest& key);  // Alone, so that no queue is too short.
  // Runs `call`, in which no time may pass.
  template <class Call>
  auto AtOnce(const SimNode& node, const char* what, Call&& call);

  // The proof.
  void CheckNames();
  void CheckIdle(Seat& seat);
  void CheckShared(Seat& seat, const std::set<Digest>& there, const char* when);
  // Conversations, up to the first chunk whose name a later version's frame has: a save needs its parent.
  std::vector<Conversation> Savable() const;
  void Heal();
  void ProveBounds();
  bool Goes(const Digest& key);
  void CheckHeardOf(Seat& seat);
  void AwaitSaves(SimNode& node);  // A minute at most.
  std::set<std::string> Temporaries() const;
  void CheckEverythingHits(Seat& seat);
  void CheckRecovered(Seat& seat);
  std::string WhatIsNotRecovered(Seat& seat);  // Empty: nothing.

  void Wrong(const std::string& text) { world_.oracle.Contradiction(text); }
  bool failed() const { return !world_.oracle.contradiction().empty(); }
  bool chaos() const { return world_.scheduler.Now() < chaos_ends_; }
  // Sleeps about `mean`, until faults end.
  bool SleepAbout(Random& random, seconds mean);

  World world_;
  Random random_;
  std::vector<Conversation> talks_;
  std::vector<std::unique_ptr<Seat>> seats_;
  std::vector<Scheduler::FiberId> burials_;
  std::set<Digest> versioned_;  // Keys that carry a frame of a later release: nobody may touch it.
  TimePoint chaos_ends_;
  bool finished_ = false;
  RunReport report_;
};

// --- Set-up

void Simulation::MakeConversations() {
  const Plan& plan = world_.plan;
  for (size_t space = 0; space < plan.payload_bytes.size(); ++space) {
    const Digest id = SpaceId({.engine = "sim", .chunk_tokens = kChunkTokens, .salt = std::to_string(space)});
    std::vector<std::vector<int32_t>> all;
    for (size_t c = 0; c < plan.conversations; ++c) {
      std::vector<int32_t> tokens;
      if (!all.empty() && !random_.OneIn(3)) {
        const std::vector<int32_t>& fork = all[random_.Below(all.size())];
        tokens.assign(fork.begin(), fork.begin() + static_cast<ptrdiff_t>(random_.Below(fork.size() + 1)));
      }
      const size_t length = kChunkTokens * random_.Between(1, plan.chunks_max);
      while (tokens.size() < length) tokens.push_back(static_cast<int32_t>(random_.Below(32'000)));
      KeyChain chain(id, kChunkTokens);
      chain.Extend(tokens);
      for (size_t i = 0; i < chain.keys().size(); ++i) {
        world_.oracle.AddChunk({.space = id,
                                .key = chain.keys()[i],
                                .parent = chain.parent(i),
                                .first_token = static_cast<uint32_t>(i * kChunkTokens),
                                .token_count = kChunkTokens,
                                .payload_bytes = plan.payload_bytes[space]});
      }
      talks_.push_back({id, chain.keys()});
      all.push_back(std::move(tokens));
    }
  }
}

RunReport Simulation::Run() {
  MakeConversations();
  world_.log.Event("plan", world_.plan.Describe());
  world_.scheduler.Spawn("director", [this] {
    Direct();
    finished_ = true;
  });
  const TimePoint start = world_.scheduler.Now();
  const bool ran = world_.scheduler.Run([this] { return finished_ || failed(); });
  if (!ran) Wrong("the run hangs:\n" + world_.scheduler.Describe());
  // The director joined all others; one more step lets it end.
  if (!failed()) world_.scheduler.Run([this] { return world_.scheduler.idle(); });
  report_.failure = world_.oracle.contradiction();
  report_.ok = report_.failure.empty();
  report_.log = world_.log.lines();
  report_.digest = world_.log.digest();
  report_.faults = world_.log.faults();
  report_.steps = world_.scheduler.steps();
  report_.virtual_seconds = std::chrono::duration<double>(world_.scheduler.Now() - start).count();
  return report_;
}

void Simulation::Direct() {
  Scheduler& scheduler = world_.scheduler;
  chaos_ends_ = scheduler.Now() + world_.plan.chaos;
  for (size_t i = 0; i < world_.plan.nodes; ++i) {
    seats_.push_back(std::make_unique<Seat>());
    Seat& seat = *seats_.back();
    seat.name = std::string(1, static_cast<char>('a' + i));
    seat.operator_fiber = scheduler.Spawn(seat.name + "-operator", [this, &seat] { Operate(seat); });
  }
  const auto saboteur = scheduler.Spawn("saboteur", [this] { Sabotage(); });

  for (const auto& seat : seats_) scheduler.Join(seat->operator_fiber);
  scheduler.Join(saboteur);
  for (const auto burial : burials_) scheduler.Join(burial);
  world_.calm = true;
  world_.disk.SetFull(false);
  for (const auto& seat : seats_) seat->node->Heal();
  world_.log.Event("director", "calm");
  for (const auto& seat : seats_) StopClients(*seat);
  scheduler.Sleep(kRecovery);

  // Each node as it is, whatever it went through.
  CheckNames();
  const std::set<Digest> after_recovery = world_.oracle.Present();
  for (const auto& seat : seats_) {
    CheckIdle(*seat);
    // A tier that goes on failing on purpose proves nothing here.
    if (world_.plan.tier_faults.empty()) CheckShared(*seat, after_recovery, "after recovery");
    // With RAM empty, damage on the share has nowhere to hide.
    End(*seat);
    Begin(*seat);
    StopClients(*seat);
  }
  if (failed()) return;
  scheduler.Sleep(seconds(10));
  world_.plan.bounded() ? ProveBounds() : Heal();

  // Everything is written: an honest close keeps it, even if the server's memory goes, and new nodes find it.
  const std::set<Digest> before = world_.oracle.Present();
  std::map<std::string, std::set<Digest>> on_disk;  // By node.
  for (const auto& seat : seats_) {
    const CloseReport report = seat->node->CloseStore(scheduler.Now() + seconds(60));
    seat->node->Destroy();
    seat->node.reset();
    if (!report.clean || report.abandoned > 0) Wrong(seat->name + " can't close clean in peace");
    if (!world_.plan.has_disk) continue;
    LocalDisk& disk = world_.Local(seat->name);
    on_disk[seat->name] = RightFrames(world_, disk);
    disk.files.LoseUnsynced();  // Its power goes, too.
  }
  world_.disk.LoseUnsynced();
  if (!world_.plan.bounded() && world_.oracle.Present() != before) Wrong("frames were lost after an honest close");
  scheduler.Sleep(kStaleAge + minutes(1));
  for (const auto& seat : seats_) Begin(*seat, /*clients=*/0);  // Nothing changes what is there.
  scheduler.Sleep(seconds(15));
  CheckNames();
  for (const auto& seat : seats_) {
    if (world_.plan.has_disk) ProveDisk(world_, *seat->node, on_disk[seat->name]);  // Before loads change it.
    CheckShared(*seat, before, "after a restart");
    CheckRecovered(*seat);
  }
  for (const auto& seat : seats_) End(*seat);
}

// --- Lives

void Simulation::Begin(Seat& seat, size_t clients) {
  const uint64_t life = ++seat.last_life;
  ++report_.lives;
  seat.stop_clients = false;
  seat.node = std::make_shared<SimNode>(world_, seat.name + std::to_string(life));
  seat.clients.clear();
  for (size_t i = 0; i < clients; ++i) {
    seat.clients.push_back(
        world_.scheduler.Spawn(seat.node->name() + "-client-" + std::to_string(i),
                               [this, client = Client{seat.node, seat, life, random_.Fork()}] { Serve(client); }));
  }
}

void Simulation::StopClients(Seat& seat) {
  seat.stop_clients = true;
  for (const auto client : std::exchange(seat.clients, {})) world_.scheduler.Join(client);
}

void Simulation::End(Seat& seat) {
  const std::shared_ptr<SimNode> node = seat.node;
  // A server may still be asked things while it closes.
  const bool clients_first = random_.OneIn(2);
  if (clients_first) StopClients(seat);
  const TimePoint deadline = world_.scheduler.Now() + milliseconds(random_.Below(20'000));
  node->CloseStore(deadline);
  if (world_.scheduler.Now() > deadline + kCloseSlack) Wrong(node->name() + " does not close by its deadline");
  StopClients(seat);
  node->Destroy();
  seat.node.reset();
}

void Simulation::Bury(Seat& seat) {
  ++report_.deaths;
  burials_.push_back(world_.scheduler.Spawn(
      seat.node->name() + "-burial", [this, node = seat.node, clients = std::exchange(seat.clients, {})] {
        node->KillExecutors();
        node->CloseStore(world_.scheduler.Now());  // Settles what its clients wait for.
        for (const auto client : clients) world_.scheduler.Join(client);
        node->Destroy();
      }));
  seat.node.reset();
}

bool Simulation::SleepAbout(Random& random, seconds mean) {
  const auto most = static_cast<uint64_t>(Scheduler::Duration(2 * mean).count());
  world_.scheduler.SleepUntil(std::min(chaos_ends_, world_.scheduler.Now() + Scheduler::Duration(random.Below(most))));
  return chaos();
}

void Simulation::Operate(Seat& seat) {
  Random random = random_.Fork();
  const Plan& plan = world_.plan;
  Begin(seat);
  while (chaos()) {
    const bool dies = plan.node_death.count() > 0 && (plan.node_restart.count() == 0 || random.OneIn(2));
    const seconds mean = dies ? plan.node_death : plan.node_restart;
    if (mean.count() == 0) {
      world_.scheduler.SleepUntil(chaos_ends_);
      break;
    }
    if (!SleepAbout(random, mean)) break;
    if (dies) {
      // At any step: within the operation that comes up when the counter runs out.
      SimNode& node = *seat.node;
      const bool on_disk = plan.has_disk && random.OneIn(2);
      node.DieWithin(1 + random.Below(40), on_disk, [this, &node, &seat] {
        node.Die();
        world_.scheduler.Wake(&seat);
      });
      const TimePoint patience = world_.scheduler.Now() + seconds(5);
      while (!node.dead() && world_.scheduler.Now() < patience) world_.scheduler.Wait(&seat, patience);
      node.Die();
      Bury(seat);
    } else {
      End(seat);
    }
    world_.scheduler.Sleep(milliseconds(random.Below(3000)));
    Begin(seat);
  }
}

// --- What others do to the share

void Simulation::Sabotage() {
  Random random = random_.Fork();
  const Plan& plan = world_.plan;
  Scheduler& scheduler = world_.scheduler;
  std::vector<Scheduler::FiberId> saboteurs;
  const auto repeat = [&](const char* name, seconds mean, std::function<void(Random&)> act) {
    if (mean.count() == 0) return;
    saboteurs.push_back(scheduler.Spawn(name, [this, mean, act, random = random.Fork()]() mutable {
      while (SleepAbout(random, mean)) act(random);
    }));
  };
  const auto some_view = [this](Random& r) -> SimFileIo* {
    const auto& node = seats_[r.Below(seats_.size())]->node;
    return node ? &node->view() : nullptr;
  };
  repeat("server-crash", plan.server_crash,
         [&](Random& r) { world_.disk.Crash(milliseconds(r.Between(100, 15'000))); });
  repeat("outage", plan.outage, [&](Random& r) { world_.disk.Unreachable(milliseconds(r.Between(100, 20'000))); });
  repeat("full", plan.full, [&](Random& r) {
    world_.disk.SetFull(true);
    scheduler.Sleep(milliseconds(r.Between(500, 10'000)));
    world_.disk.SetFull(false);
  });
  repeat("unmount", plan.unmount, [&](Random& r) {
    const size_t i = r.Below(seats_.size());
    const std::shared_ptr<SimNode> node = seats_[i]->node;
    if (!node) return;
    node->view().SetMounted(false);
    scheduler.Sleep(milliseconds(r.Between(500, 10'000)));
    node->view().SetMounted(true);
  });
  repeat("stall", plan.stall, [&](Random& r) {
    SimFileIo* view = some_view(r);
    if (!view) return;
    const Scheduler::Duration stall = milliseconds(r.Between(500, 25'000));
    world_.log.Fault("saboteur", "stalls a node for " + Seconds(stall));
    view->StallUntil(scheduler.Now() + stall);
  });
  repeat("disk-full", plan.disk_full, [&](Random& r) {
    SimDisk& disk = world_.Local(seats_[r.Below(seats_.size())]->name).files;
    disk.SetFull(true);
    scheduler.Sleep(milliseconds(r.Between(500, 10'000)));
    disk.SetFull(false);
  });
  repeat("disk-rot", plan.disk_rot, [&](Random& r) { RotOnDisk(r); });
  repeat("sabotage", plan.sabotage, [&](Random& r) { SabotageOnce(r); });
  for (const auto fiber : saboteurs) scheduler.Join(fiber);
}

void Simulation::RotOnDisk(Random& random) {
  SimDisk& disk = world_.Local(seats_[random.Below(seats_.size())]->name).files;
  std::vector<std::pair<std::string, InodePtr>> frames;
  disk.Walk([&](const std::string& path, const InodePtr& inode) {
    if (Oracle::FrameKey(path) && !inode->content.empty()) frames.emplace_back(path, inode);
  });
  if (frames.empty()) return;
  const auto& [path, inode] = frames[random.Below(frames.size())];
  disk.Rot(path, inode, random.Below(inode->content.size()), static_cast<uint8_t>(1u << random.Below(8)), "saboteur");
}

void Simulation::PlantNews(const Digest& key, JournalRecord::Kind kind, Random& random) {
  const FrameInfo& info = world_.oracle.chunk(key).info;
  const EncodedRecord encoded = EncodeJournalRecord({.kind = kind,
                                                     .space = info.space,
                                                     .key = key,
                                                     .parent = info.parent,
                                                     .payload_bytes = info.payload_bytes,
                                                     .first_token = info.first_token,
                                                     .token_count = info.token_count});
  std::vector<std::byte> bytes(encoded.begin(), encoded.end());
  bytes.resize(bytes.size() + random.Below(2 * kJournalRecordBytes), std::byte{0x5a});
  const std::string name = FormatJournalName({"mad" + std::to_string(random.Next()), 0});
  world_.disk.Plant("nodes/" + name, std::move(bytes), "saboteur", "false news");
}

// A peer gone mad, or a disk: wrong things under right names.
void Simulation::SabotageOnce(Random& random) {
  Oracle& oracle = world_.oracle;
  const char* who = "saboteur";
  auto it = oracle.chunks().begin();
  std::advance(it, static_cast<ptrdiff_t>(random.Below(oracle.chunks().size())));
  const auto& [key, chunk] = *it;
  const std::string path = Oracle::FramePath(key);
  const InodePtr there = world_.disk.Find(path);
  if (versioned_.contains(key)) return;

  const auto frame_of = [](const Chunk& c) {
    const FrameHeader header = EncodeFrameHeader(c.info, 1, HashSegments(c.payload));
    std::vector<std::byte> bytes(header.begin(), header.end());
    bytes.insert(bytes.end(), c.payload.begin(), c.payload.end());
    bytes.resize(FrameBytes(c.payload.size()));
    return bytes;
  };
  const std::vector<std::byte> frame = frame_of(chunk);
  const auto cut = [&](size_t bytes) {
    return std::vector(frame.begin(), frame.begin() + static_cast<ptrdiff_t>(bytes));
  };
  switch (random.Below(11)) {
    case 0: return world_.disk.Plant(path, {}, who, "empty");
    case 1: return world_.disk.Plant(path, cut(1 + random.Below(kFrameHeaderBytes - 1)), who, "part of a header");
    case 2: return world_.disk.Plant(path, cut(kFrameHeaderBytes), who, "header only");
    case 3: return world_.disk.Plant(path, cut(frame.size() - 1), who, "one byte short");
    case 4: {
      std::vector<std::byte> noise(frame.size());
      for (std::byte& b : noise) b = static_cast<std::byte>(random.Next());
      return world_.disk.Plant(path, std::move(noise), who, "noise");
    }
    case 5: {
      auto other = oracle.chunks().begin();
      std::advance(other, static_cast<ptrdiff_t>(random.Below(oracle.chunks().size())));
      if (other->first == key) return;
      return world_.disk.Plant(path, frame_of(other->second), who, "another chunk's frame");
    }
    case 6: {
      std::vector<std::byte> bytes = frame;
      bytes[kFrameHeaderBytes + random.Below(chunk.payload.size())] ^= std::byte{0x10};
      return world_.disk.Plant(path, std::move(bytes), who, "one bit of the payload wrong");
    }
    case 7:  // Of frames that never were, or still are.
      oracle.Believe(key);
      return PlantNews(key, random.OneIn(2) ? JournalRecord::Kind::kRemoved : JournalRecord::Kind::kPublished, random);
    case 8: {
      static constexpr const char* kNames[] = {"frames/000/README",      "frames/.nfs0001",  "tmp/left-by-nobody.tmp",
                                               "quarantine/old.damaged", "nodes/readme.txt", "frames/zzz/x.kvf"};
      return world_.disk.Plant(kNames[random.Below(std::size(kNames))], cut(10), who, "a stranger's file");
    }
    case 9: {  // A whole frame of a format that comes later.
      if (!random.OneIn(4)) return;
      std::vector<std::byte> bytes = frame;
      bytes[8] = std::byte{99};
      versioned_.insert(key);
      return world_.disk.Plant(path, std::move(bytes), who, "a later version");
    }
    default:
      if (!there || there->content.empty()) return;
      return world_.disk.Rot(path, there, random.Below(there->content.size()),
                             static_cast<uint8_t>(1u << random.Below(8)), who);
  }
}

// --- Clients: each does what an engine does

template <class Call>
auto Simulation::AtOnce(const SimNode& node, const char* what, Call&& call) {
  const TimePoint begun = world_.scheduler.Now();
  auto result = call();
  const auto took = world_.scheduler.Now() - begun;
  if (took.count() > 0) Wrong(node.name() + ": " + what + " blocked its caller for " + Seconds(took));
  return result;
}

void Simulation::Serve(Client client) {
  while (!client.Over()) {
    Turn(client);
    if (client.Over()) break;
    world_.scheduler.Sleep(milliseconds(client.random.Below(1500)));
  }
}

void Simulation::Turn(Client& client) {
  Random& random = client.random;
  Store& store = client.node->store();
  Conversation talk = talks_[random.Below(talks_.size())];
  if (random.OneIn(3)) talk.keys.resize(1 + random.Below(talk.keys.size()));
  if (random.Chance(world_.plan.erase)) {
    const Digest key = talk.keys[random.Below(talk.keys.size())];
    world_.log.Step(client.node->name(), "erases " + key.Hex());
    for (ProbeTier* probe : client.node->probes()) probe->Erase(std::span(&key, 1));
  }

  CheckLookup(client, talk);
  const PrefixHit known = AtOnce(*client.node, "Lookup", [&] { return store.Lookup(talk.keys); });
  // Mostly what is known; sometimes everything, as one who knows better.
  const size_t asked = random.OneIn(8) ? talk.keys.size() : known.chunks;
  const TimePoint deadline = world_.scheduler.Now() + milliseconds(random.Between(1, random.OneIn(3) ? 100 : 10'000));
  const std::vector<Lease> leases = LoadSome(client, talk, asked, deadline);

  for (size_t i = leases.size(); i < talk.keys.size() && !client.Over(); ++i) {
    world_.scheduler.Sleep(milliseconds(random.Below(20)));  // Computes.
    SaveOne(client, talk.keys[i]);
  }
  // Lent bytes stay as they are.
  for (size_t i = 0; i < leases.size(); ++i) {
    if (!leases[i].pin) continue;
    world_.oracle.CheckDelivered(client.node->name() + " (lease)", talk.keys[i], leases[i].info, leases[i].bytes);
  }
  const TierStats ram = store.ram_stats();
  if (ram.bytes > ram.bytes_max || ram.bytes_max > world_.plan.ram_bytes) {
    Wrong(client.node->name() + " has " + std::to_string(ram.bytes) + " bytes in RAM, more than its cap");
  }
}

void Simulation::CheckLookup(Client& client, const Conversation& talk) {
  const Scheduler::Atomic atomic(world_.scheduler);
  Store& store = client.node->store();
  const PrefixHit hit = store.Lookup(talk.keys);
  size_t prefix = 0;
  while (prefix < talk.keys.size() && store.Lookup(std::span(&talk.keys[prefix], 1)).chunks == 1) ++prefix;
  if (hit.chunks != prefix || hit.tier.size() != hit.chunks) {
    Wrong(client.node->name() + " claims a prefix of " + std::to_string(hit.chunks) + " chunks where it knows " +
          std::to_string(prefix));
  }
  if ((hit.miss_reason == Reason::kNone) != (hit.chunks == talk.keys.size())) {
    Wrong(client.node->name() + " gives no reason for a miss, or one for none");
  }
}

std::vector<Lease> Simulation::LoadSome(Client& client, const Conversation& talk, size_t chunks, TimePoint deadline) {
  Random& random = client.random;
  Store& store = client.node->store();
  const std::span keys(talk.keys.data(), chunks);
  std::vector<Lease> leases;
  if (chunks == 0) return leases;
  const uint64_t bytes = world_.oracle.chunk(keys[0]).info.payload_bytes;
  if (random.OneIn(20)) {  // By mistake: nothing of it may come back.
    Digest space = talk.space;
    uint64_t wrong_bytes = bytes;
    if (random.OneIn(2)) {
      space.bytes[0] ^= 1;
    } else {
      wrong_bytes += 1;
    }
    const auto job = store.Load(space, keys.first(1), wrong_bytes, deadline);
    const Item item = WaitFor(*client.node, *job, 0, deadline);
    if (item.outcome == Outcome::kHit && (space != talk.space || item.lease.bytes.size() != wrong_bytes)) {
      Wrong(client.node->name() + " delivers a chunk to another space or size");
    }
    return leases;
  }
  const auto job = AtOnce(*client.node, "Load", [&] { return store.Load(talk.space, keys, bytes, deadline); });
  const size_t gives_up = random.OneIn(10) ? random.Below(chunks + 1) : chunks;
  for (size_t i = 0; i < gives_up && !client.Over(); ++i) {
    // Sometimes with less patience than the load has.
    const TimePoint until =
        random.OneIn(6) ? world_.scheduler.Now() + milliseconds(random.Below(20)) : deadline + seconds(1);
    const Item item = WaitFor(*client.node, *job, i, until);
    CheckItem(*client.node, keys[i], item);
    if (item.outcome != Outcome::kHit) break;
    leases.push_back(item.lease);
    if (random.OneIn(4)) world_.scheduler.Sleep(milliseconds(random.Below(50)));  // Inserts.
    // An engine copies and lets go; now and then one is slow to.
    if (!random.OneIn(8)) leases.back() = {};
  }
  return leases;
}

Simulation::Item Simulation::WaitFor(SimNode& node, LoadJob& job, size_t i, TimePoint deadline) {
  ++node.waits;
  ++report_.chunks_asked;
  const TimePoint begun = world_.scheduler.Now();
  Item item = job.Wait(i, deadline);
  world_.log.Step(node.name(), item.outcome == Outcome::kHit
                                   ? "gets a chunk from " + node.store().tier_names()[item.tier]
                                   : std::string("misses a chunk: ") + ReasonName(item.reason));
  const TimePoint now = world_.scheduler.Now();
  if (now > std::max(begun, deadline) + kWaitSlack) {
    Wrong(node.name() + ": Wait ends " + Seconds(now - deadline) + " after its deadline");
  }
  if (item.outcome == Outcome::kHit) ++(item.tier == 0 ? report_.hits_ram : report_.hits_below);
  return item;
}

Simulation::Item Simulation::LoadOne(SimNode& node, const Digest& key) {
  const FrameInfo& info = world_.oracle.chunk(key).info;
  for (int tries = 0;; ++tries) {
    const TimePoint deadline = world_.scheduler.Now() + seconds(30);
    const auto job = node.store().Load(info.space, std::span(&key, 1), info.payload_bytes, deadline);
    Item item = WaitFor(node, *job, 0, deadline);
    CheckItem(node, key, item);
    // RAM may hold one chain whose last chunk some thread is about to let go of: it has no other leaf.
    if (item.reason != Reason::kFull || tries == 10) return item;
    world_.scheduler.Sleep(milliseconds(10));
  }
}

void Simulation::CheckItem(const SimNode& node, const Digest& key, const Item& item) {
  if (item.outcome == Outcome::kHit) {
    if (item.reason != Reason::kNone) Wrong(node.name() + " gives a reason for a hit");
    world_.oracle.CheckDelivered(node.name(), key, item.lease.info, item.lease.bytes);
  } else if (item.reason == Reason::kNone) {
    Wrong(node.name() + " misses a chunk without a reason");
  }
}

void Simulation::SaveOne(Client& client, const Digest& key) {
  Store& store = client.node->store();
  const Chunk& chunk = world_.oracle.chunk(key);
  if (!AtOnce(*client.node, "Needs", [&] { return store.Needs(key); })) return;
  Result<SaveSlot> slot = AtOnce(*client.node, "BeginSave", [&] { return store.BeginSave(chunk.info); });
  if (!slot) return;
  const size_t half = chunk.payload.size() / 2;
  std::memcpy(slot->bytes.data(), chunk.payload.data(), half);
  if (client.random.OneIn(3)) world_.scheduler.Sleep(milliseconds(client.random.Below(10)));
  if (client.random.OneIn(20)) return;  // The request went away.
  std::memcpy(slot->bytes.data() + half, chunk.payload.data() + half, chunk.payload.size() - half);
  world_.log.Step(client.node->name(), "commits " + key.Hex());
  AtOnce(*client.node, "Commit", [&] {
    store.Commit(std::move(*slot));
    return 0;
  });
}

// --- The proof

// Nothing under a frame's name is anything else, but what was done to it on purpose.
void Simulation::CheckNames() {
  world_.disk.Walk([&](const std::string& path, const InodePtr& inode) {
    const std::optional<Digest> key = Oracle::FrameKey(path);
    if (key && inode->damage.empty() && !world_.oracle.IsFrame(*key, inode->durable)) {
      Wrong("no whole frame, and no fault did it: " + path);
    }
  });
}

// Nobody asks for anything, nothing fails: nothing may be under way, and the books must balance.
void Simulation::CheckIdle(Seat& seat) {
  SimNode& node = *seat.node;
  Metrics& metrics = node.metrics();
  if (const uint64_t pending = node.store().pending_saves(); pending > 0) {
    return Wrong(node.name() + " still has " + std::to_string(pending) + " saves under way");
  }
  const auto counter = [&](const char* name, const Labels& labels) {
    return metrics.GetCounter(name, "", labels).value();
  };
  for (const ProbeTier* probe : node.probes()) {
    const std::string& tier = probe->info().name;
    const ProbeTier::Counts& counts = probe->counts();
    if (counts.loads != counts.loads_settled || counts.saves != counts.saves_settled) {
      Wrong(node.name() + " has loads or saves that never settled");
    }
    report_.saves_written += counts.written;
    const auto saved = [&](const char* outcome) {
      return counter("terrace_chunks_saved_total", {{"tier", tier}, {"outcome", outcome}});
    };
    // A guard answers for a tier that is late, or that it does not ask.
    const bool right = world_.plan.guarded ? saved("written") <= counts.written && saved("existed") <= counts.existed
                                           : saved("written") == counts.written && saved("existed") == counts.existed &&
                                                 saved("failed") == counts.saves - counts.written - counts.existed;
    if (world_.plan.tier_faults.empty() && !right) {
      Wrong(node.name() + " counts other saves to " + tier + " than it made");
    }
    if (metrics.GetGauge("terrace_write_behind_bytes", "", {{"tier", tier}}).value() != 0) {
      Wrong(node.name() + " counts bytes that wait for " + tier + " and there are none");
    }
  }
  uint64_t hits = 0, misses = 0;
  for (const std::string& tier : node.store().tier_names()) {
    hits += counter("terrace_chunk_hits_total", {{"tier", tier}});
  }
  for (int i = 1; i < kReasonCount; ++i) {
    misses += counter("terrace_chunk_misses_total", {{"reason", ReasonName(static_cast<Reason>(i))}});
  }
  if (hits + misses != node.waits) {
    Wrong(node.name() + " was asked for " + std::to_string(node.waits) + " chunks and counts " + std::to_string(hits) +
          " hits and " + std::to_string(misses) + " misses");
  }
  uint64_t live = 0, frames = 0;
  for (const auto& [key, chunk] : world_.oracle.chunks()) {
    const PrefixHit hit = node.store().Lookup(std::span(&key, 1));
    if (hit.chunks == 0 || hit.tier[0] != 0) continue;
    ++frames;
    live += PaddedBytes(chunk.info.payload_bytes);
  }
  const TierStats ram = node.store().ram_stats();
  if (ram.bytes != live || ram.frames != frames || ram.pinned_bytes != 0) {
    Wrong(node.name() + " holds " + std::to_string(frames) + " chunks of " + std::to_string(live) +
          " bytes in RAM and says " + std::to_string(ram.frames) + " of " + std::to_string(ram.bytes) + ", " +
          std::to_string(ram.pinned_bytes) + " pinned");
  }
}

// Every right frame that was on the share before the checks began is found and delivered by this node: a check may make
// another node write what only its disk had.
void Simulation::CheckShared(Seat& seat, const std::set<Digest>& there, const char* when) {
  SimNode& node = *seat.node;
  for (const Digest& key : there) {
    const InodePtr inode = world_.disk.Find(Oracle::FramePath(key));
    if (!inode || !inode->damage.empty()) continue;
    const PrefixHit hit = node.store().Lookup(std::span(&key, 1));
    if (hit.chunks == 0) {
      if (Goes(key)) continue;
      return Wrong(node.name() + " does not find a frame that is on the share " + when + ": " + key.Hex() + ", " +
                   ReasonName(hit.miss_reason));
    }
    const Item item = LoadOne(node, key);
    if (item.outcome != Outcome::kHit) {
      if (Goes(key)) continue;
      return Wrong(node.name() + " can't load a frame that is on the share " + when + ": " + key.Hex() + ", " +
                   ReasonName(item.reason));
    }
  }
}

std::vector<Conversation> Simulation::Savable() const {
  std::vector<Conversation> savable;
  for (const Conversation& talk : talks_) {
    const auto stop =
        std::find_if(talk.keys.begin(), talk.keys.end(), [&](const Digest& k) { return versioned_.contains(k); });
    if (stop != talk.keys.begin()) savable.push_back({talk.space, {talk.keys.begin(), stop}});
  }
  return savable;
}

// Each node serves every conversation once, computes and saves what is not there. Damage that nobody had met is met
// here. Then every node has everything.
void Simulation::Heal() {
  constexpr int kPassesMax = 6;
  const std::set<std::string> left_before = Temporaries();
  // Word of a removal that is not true, or no longer: nobody forgets what is there.
  for (const Digest& key : world_.oracle.Present()) {
    if (random_.OneIn(4)) PlantNews(key, JournalRecord::Kind::kRemoved, random_);
  }
  world_.scheduler.Sleep(kVisibleWithin);
  for (const auto& seat : seats_) CheckHeardOf(*seat);
  for (int pass = 0; pass < kPassesMax; ++pass) {
    bool complete = true;
    for (const auto& seat : seats_) {
      Client client{seat->node, *seat, seat->last_life, random_.Fork()};
      for (const Conversation& talk : Savable()) {
        for (const Digest& key : talk.keys) complete = LoadOne(*seat->node, key).outcome == Outcome::kHit && complete;
        for (const Digest& key : talk.keys) {
          complete = complete && !seat->node->store().Needs(key);
          SaveOne(client, key);
        }
        AwaitSaves(*seat->node);
      }
      world_.scheduler.Sleep(kVisibleWithin);
      for (const auto& other : seats_) CheckHeardOf(*other);
    }
    if (complete || failed()) break;
  }
  for (const auto& seat : seats_) CheckEverythingHits(*seat);
  for (const std::string& path : Temporaries()) {
    if (!left_before.contains(path)) Wrong("a save in peace leaves a temporary: " + path);
  }
}

// A share with bounds can't have everything. In peace it keeps them, finds room for what is new, and has what is used.
void Simulation::ProveBounds() {
  world_.scheduler.Sleep(2 * (world_.plan.on_bucket ? kLeaseLife : kClaimLife));  // That of a dead node is over.
  ProveSize(world_, "in peace");
  for (const auto& seat : seats_) {
    Client client{seat->node, *seat, seat->last_life, random_.Fork()};
    for (const Conversation& talk : Savable()) {
      for (const Digest& key : talk.keys) LoadOne(*seat->node, key);
      for (const Digest& key : talk.keys) SaveOne(client, key);
      AwaitSaves(*seat->node);
      world_.scheduler.Sleep(kVisibleWithin);
      ProveSize(world_, "while one node writes");
      for (const auto& other : seats_) CheckHeardOf(*other);
    }
    const TimePoint patience = world_.scheduler.Now() + minutes(1);
    for (const Conversation& talk : Savable()) {
      const Digest& first = talk.keys[0];
      while (!world_.disk.Find(Oracle::FramePath(first)) && !failed()) {
        SaveOne(client, first);
        AwaitSaves(*seat->node);
        world_.scheduler.Sleep(seconds(1));
        if (world_.scheduler.Now() > patience) Wrong(seat->node->name() + " finds no room: " + first.Hex());
      }
    }
  }
  if (world_.plan.bound_ttl.count() > 0 && !failed()) ProveTtl(world_, *seats_.back()->node);
}

// Collected in this moment: some node forgets it first, and then takes it away.
bool Simulation::Goes(const Digest& key) {
  if (!world_.plan.bounded()) return false;
  world_.scheduler.Sleep(kVisibleWithin);
  return !world_.disk.Find(Oracle::FramePath(key));
}

void Simulation::AwaitSaves(SimNode& node) {
  const TimePoint patience = world_.scheduler.Now() + seconds(60);
  while (node.store().pending_saves() > 0 && world_.scheduler.Now() < patience) {
    world_.scheduler.Sleep(milliseconds(20));
  }
}

std::set<std::string> Simulation::Temporaries() const {
  std::set<std::string> paths;
  world_.disk.Walk([&](const std::string& path, const InodePtr&) {
    if (path.starts_with("tmp/")) paths.insert(path);
  });
  return paths;
}

void Simulation::CheckHeardOf(Seat& seat) {
  for (const Digest& key : world_.oracle.Present()) {
    if (seat.node->store().Lookup(std::span(&key, 1)).chunks == 0) {
      if (Goes(key)) continue;
      return Wrong(seat.node->name() + " does not hear of a frame in time: " + key.Hex());
    }
  }
}

void Simulation::CheckEverythingHits(Seat& seat) {
  std::set<Digest> present = world_.oracle.Present();
  for (const Conversation& talk : Savable()) {
    for (const Digest& key : talk.keys) {
      // Where a disk has it, nobody meets the damage on the share.
      const InodePtr inode = world_.disk.Find(Oracle::FramePath(key));
      const bool hidden = world_.plan.has_disk && inode && !inode->damage.empty();
      Item item = LoadOne(*seat.node, key);
      if (item.outcome == Outcome::kMiss && hidden) {
        // Until now, when the disk has made room of it: then it heals like all that was met in the passes.
        Client client{seat.node, seat, seat.last_life, random_.Fork()};
        SaveOne(client, key);
        AwaitSaves(*seat.node);
        item = LoadOne(*seat.node, key);
        if (!world_.oracle.Present().contains(key)) return Wrong(seat.node->name() + " does not heal: " + key.Hex());
        present.insert(key);
      }
      if (item.outcome != Outcome::kHit || !(present.contains(key) || hidden)) {
        return Wrong(seat.node->name() + " does not heal: " + key.Hex() + ", " + ReasonName(item.reason) +
                     (present.contains(key) ? "" : ", not on the share"));
      }
    }
  }
}

// A node that began with nothing under way knows exactly what is there, and has cleaned up. What has just gone for its
// age is known to another in a moment.
void Simulation::CheckRecovered(Seat& seat) {
  std::string wrong = WhatIsNotRecovered(seat);
  for (int i = 0; i < 3 && !wrong.empty() && world_.plan.bounded(); ++i) {
    world_.scheduler.Sleep(kVisibleWithin);
    wrong = WhatIsNotRecovered(seat);
  }
  if (!wrong.empty()) Wrong(wrong);
}

std::string Simulation::WhatIsNotRecovered(Seat& seat) {
  std::string wrong;
  uint64_t frames = 0, bytes = 0, damaged = 0, quarantined = 0;
  world_.disk.Walk([&](const std::string& path, const InodePtr& inode) {
    // In a bucket nobody has temporaries, and a stranger's are none of ours.
    if (path.starts_with("tmp/") && !world_.plan.on_bucket) wrong = "a temporary is left: " + path;
    if (path.starts_with("quarantine/")) ++quarantined;
    const std::optional<Digest> key = Oracle::FrameKey(path);
    if (!key) return;
    if (!inode->damage.empty()) ++damaged;  // Nobody has asked for it yet: a journal may tell of it.
    if (!world_.oracle.IsFrame(*key, inode->content)) return;
    ++frames;
    bytes += inode->content.size();
  });
  // Two nodes may both find room for one more; strangers count too.
  if (quarantined > world_.plan.quarantine_files + world_.plan.nodes + 1) wrong = "the quarantine grows without bound";
  const TierStats stats = seat.node->probes()[0]->stats();
  const bool counts = damaged > 0 ? stats.frames >= frames && stats.frames <= frames + damaged
                                  : stats.frames == frames && stats.bytes == bytes;
  if (!counts || !stats.available || !stats.index_ready) {
    wrong = seat.node->name() + " counts " + std::to_string(stats.frames) + " frames of " +
            std::to_string(stats.bytes) + " bytes where there are " + std::to_string(frames) + " of " +
            std::to_string(bytes);
  }
  if (seat.node->store().health().degraded) wrong = seat.node->name() + " is degraded without a reason";
  return wrong;
}

}  // namespace

RunReport RunSeed(const RunOptions& options) {
  auto simulation = std::make_unique<Simulation>(options);
  RunReport report = simulation->Run();
  // Fibers in the middle of something can't be destroyed: what failed stays as it is.
  if (!report.ok) {
    static auto& kept = *new std::vector<std::unique_ptr<Simulation>>;
    Scheduler::Abandon();
    kept.push_back(std::move(simulation));
  }
  return report;
}

}  // namespace terrace::sim
