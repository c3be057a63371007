/* The same as save_and_load.cc, in C: save_and_load_c [SOCKET]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <terrace/client_c.h>

enum { kChunkTokens = 256, kTokens = 1000, kChunks = kTokens / kChunkTokens, kChunkBytes = 1 << 20, kSoonMs = 5000 };

int main(int argc, char** argv) {
  const char* settings[] = {"ram", "256MiB", NULL};
  char error[256];
  terrace_client* client = terrace_open(argc > 1 ? argv[1] : NULL, settings, error, sizeof error);
  if (client == NULL) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  if (!terrace_connected(client)) fprintf(stderr, "no node there: everything is computed\n");
  uint8_t space[TERRACE_KEY_BYTES]; /* SHA-256 of all that must be equal for engines to share KV. */
  memset(space, 7, sizeof space);
  int32_t prompt[kTokens];
  for (int32_t i = 0; i < kTokens; ++i) prompt[i] = i;
  uint8_t keys[kChunks * TERRACE_KEY_BYTES];
  const size_t count = terrace_chunk_keys(space, prompt, kTokens, kChunkTokens, keys);

  terrace_call* lookup = terrace_lookup(client, keys, count);
  terrace_call_wait(lookup, kSoonMs);
  const size_t known = terrace_call_count(lookup);
  terrace_call_free(lookup);

  void* chunks[kChunks];
  for (size_t i = 0; i < count; ++i) chunks[i] = calloc(1, kChunkBytes);
  const terrace_load load = {.space = space,
                             .keys = keys,
                             .key_count = known,
                             .payload_bytes = kChunkBytes,
                             .deadline_ms = kSoonMs,
                             .into = chunks};
  terrace_call* loading = terrace_load_into(client, &load);
  while (!terrace_call_wait(loading, kSoonMs)) terrace_call_cancel(loading); /* The buffers must not go before. */
  size_t loaded = 0;
  while (loaded < known && terrace_call_outcome(loading, loaded) == TERRACE_HIT) ++loaded;
  terrace_call_free(loading);

  for (size_t i = loaded; i < count; ++i) memset(chunks[i], 42, kChunkBytes); /* Here the engine computes. */
  const terrace_save save = {.space = space,
                             .parent = loaded == 0 ? space : keys + (loaded - 1) * TERRACE_KEY_BYTES,
                             .keys = keys + loaded * TERRACE_KEY_BYTES,
                             .key_count = count - loaded,
                             .first_token = (uint32_t)loaded * kChunkTokens,
                             .chunk_tokens = kChunkTokens,
                             .payload_bytes = kChunkBytes,
                             .from = (const void* const*)chunks + loaded};
  terrace_call* saving = terrace_save_from(client, &save);
  while (!terrace_call_wait(saving, kSoonMs)) terrace_call_cancel(saving);
  size_t saved = 0;
  for (size_t i = 0; i < terrace_call_size(saving); ++i) saved += terrace_call_outcome(saving, i) == TERRACE_HIT;
  terrace_call_free(saving);
  printf("loaded %zu saved %zu of %zu chunks\n", loaded, saved, count);
  terrace_close(client, kSoonMs);
  for (size_t i = 0; i < count; ++i) free(chunks[i]);
  return 0;
}
