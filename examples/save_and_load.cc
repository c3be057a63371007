// What an engine does: names the chunks of a prompt, asks how many are known, loads those, computes and saves the rest.
//
//   save_and_load [SOCKET]    with the socket of a node (terrace node --socket SOCKET), or with a store of its own.
// Run it twice with a node: the second run finds what the first one saved.
#include <terrace/client.h>
#include <terrace/key.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

using namespace std::chrono_literals;

constexpr uint32_t kChunkTokens = 256;
constexpr uint64_t kChunkBytes = 1 << 20;  // What an engine's KV of 256 tokens takes.

int main(int argc, char** argv) {
  terrace::ClientOptions options;
  if (argc > 1) options.node = argv[1];
  options.settings = {{"ram", "256MiB"}};
  auto opened = terrace::Client::Open(options);
  if (!opened) {
    std::fprintf(stderr, "%s\n", opened.error().what.c_str());
    return 1;
  }
  const std::unique_ptr<terrace::Client> client = *std::move(opened);
  const auto soon = [] { return std::chrono::steady_clock::now() + 5s; };
  if (!client->connected()) std::fprintf(stderr, "no node there: everything is computed\n");

  // Everything that must be equal for two engines to share KV. A real engine fills in all fields.
  terrace::SpaceFields fields;
  fields.engine = "example";
  fields.chunk_tokens = kChunkTokens;
  const terrace::Digest space = terrace::SpaceId(fields);
  std::vector<int32_t> prompt(1000);
  std::iota(prompt.begin(), prompt.end(), 0);
  terrace::KeyChain chain(space, kChunkTokens);
  chain.Extend(prompt);
  const std::vector<terrace::Digest>& keys = chain.keys();  // Three whole chunks, and 232 tokens to compute always.

  const auto lookup = client->Lookup(keys);
  lookup->Wait(soon());
  const size_t known = lookup->done() ? lookup->Poll(0)->chunks : 0;

  // The engine's memory. It must stay until all items are settled, so the calls share it.
  const auto memory = std::make_shared<std::vector<std::byte>>(keys.size() * kChunkBytes);
  const auto chunk = [&](size_t i) { return std::span(*memory).subspan(i * kChunkBytes, kChunkBytes); };
  terrace::LoadRequest request{.space = space, .payload_bytes = kChunkBytes, .deadline = soon()};
  request.keys.assign(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(known));
  for (size_t i = 0; i < known; ++i) request.into.push_back({chunk(i)});
  request.owner = memory;
  const auto load = client->Load(std::move(request));
  load->Wait(soon());
  size_t loaded = 0;
  while (loaded < known && load->Poll(loaded) != nullptr && load->Poll(loaded)->outcome == terrace::Outcome::kHit) {
    ++loaded;
  }

  std::vector<terrace::SaveChunk> saves;
  for (size_t i = loaded; i < keys.size(); ++i) {
    std::fill(chunk(i).begin(), chunk(i).end(), std::byte{42});  // Here the engine computes.
    terrace::FrameInfo info;
    info.space = space;
    info.key = keys[i];
    info.parent = chain.parent(i);
    info.first_token = static_cast<uint32_t>(i) * kChunkTokens;
    info.token_count = kChunkTokens;
    info.payload_bytes = kChunkBytes;
    saves.push_back({info, {chunk(i)}});
  }
  const auto save = client->Save(std::move(saves), memory);
  save->Wait(soon());
  size_t saved = 0;
  for (size_t i = 0; i < save->size(); ++i) {
    const terrace::SavedChunk* item = save->Poll(i);
    if (item != nullptr && item->outcome == terrace::Outcome::kHit) ++saved;
  }
  std::printf("loaded %zu saved %zu of %zu chunks\n", loaded, saved, keys.size());
  client->Close(soon());
  return 0;
}
