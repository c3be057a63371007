/* The client (client.h) for C and what binds to C. Same rules, fewer words:
 *
 *   - A call returns at once with a handle; terrace_call_wait and terrace_call_done ask after it, item by item;
 *     terrace_call_free drops it, which cancels nothing.
 *   - Keys, parents and spaces are 32 bytes. Times are milliseconds from now.
 *   - Buffers that are handed in belong to the call until all of its items are done, also after terrace_call_cancel.
 *   - Whatever may be null says so. Functions that can fail return null or a negative number and tell why in `error`
 *     (bytes cut to error_bytes, ends with a zero; may be null).
 *   - Any thread may call anything, but an object that is being freed. */
#ifndef TERRACE_CLIENT_C_H_
#define TERRACE_CLIENT_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* NOLINTBEGIN(readability-identifier-naming): the names of C. */
#define TERRACE_KEY_BYTES 32

typedef struct terrace_client terrace_client;
typedef struct terrace_call terrace_call;

/* As terrace::Outcome. */
enum { TERRACE_HIT = 0, TERRACE_MISS = 1, TERRACE_DECLINED = 2, TERRACE_FAILED = 3, TERRACE_PENDING = -1 };

/* Log lines go to `sink`, from any thread; level 1 informs, 2 warns, 3 is an error. Without it, warnings go to stderr.
 * Before the first client is opened. */
void terrace_log_to(void (*sink)(void* context, int level, const char* line), void* context);

/* `node`: a node's socket; null or "": what settings and environment say, else a store in this process. `settings`:
 * name, value, name, value, ..., null; may be null. A node that listens is waited for, for a second at most (setting
 * node-wait); without one all loads are misses until it is there. Null on failure. */
terrace_client* terrace_open(const char* node, const char* const* settings, char* error, size_t error_bytes);
/* Saves under way are finished until the deadline. Calls' handles may be freed later. */
void terrace_close(terrace_client* client, int64_t deadline_ms);
int terrace_connected(const terrace_client* client);
/* Readable when an item of any call was done since terrace_clear_event. Never read from it. */
int terrace_event_fd(const terrace_client* client);
void terrace_clear_event(terrace_client* client);

/* Keys of the whole chunks of `tokens` after `parent` (a chunk's key, or the space): count / chunk_tokens of them, 32
 * bytes each, to `keys`. Returns how many. No media, see KeyChain for those. */
size_t terrace_chunk_keys(const uint8_t* parent, const int32_t* tokens, size_t count, uint32_t chunk_tokens,
                          uint8_t* keys);

typedef struct terrace_load {
  const uint8_t* space;
  const uint8_t* keys; /* 32 bytes each */
  size_t key_count;
  uint64_t payload_bytes; /* of each chunk */
  int64_t deadline_ms;
  void* const* into; /* one buffer of payload_bytes each; null: prefetch or lease */
} terrace_load;

typedef struct terrace_save {
  const uint8_t* space;
  const uint8_t* parent; /* of the first chunk; each is the parent of the next */
  const uint8_t* keys;
  size_t key_count;
  uint32_t first_token; /* of the first chunk */
  uint32_t chunk_tokens;
  uint64_t payload_bytes;
  const void* const* from; /* one buffer each; null: room is asked for (terrace_begin_save) */
} terrace_save;

/* One item: how many keys are known from the first on, see terrace_call_count. */
terrace_call* terrace_lookup(terrace_client* client, const uint8_t* keys, size_t key_count);
/* One item a key. */
terrace_call* terrace_load_into(terrace_client* client, const terrace_load* load);
terrace_call* terrace_lease(terrace_client* client, const terrace_load* load);
terrace_call* terrace_prefetch(terrace_client* client, const terrace_load* load);
terrace_call* terrace_pin(terrace_client* client, const terrace_load* load, int64_t lifetime_ms);
void terrace_unpin(terrace_client* client, const uint8_t* keys, size_t key_count);
terrace_call* terrace_save_from(terrace_client* client, const terrace_save* save);
/* Room to fill, see terrace_call_bytes; then terrace_commit gives all of it back, and the call stays yours to free. */
terrace_call* terrace_begin_save(terrace_client* client, const terrace_save* save);
terrace_call* terrace_commit(terrace_client* client, terrace_call* room);

/* Statistics as text, name=value a line, cut to text_bytes; waits at most deadline_ms. Returns 0, or -1 if the node did
 * not answer. */
int terrace_stats(terrace_client* client, int64_t deadline_ms, char* text, size_t text_bytes);

size_t terrace_call_size(const terrace_call* call);
/* Of all items: 1 when done, 0 at the deadline. */
int terrace_call_wait(const terrace_call* call, int64_t deadline_ms);
int terrace_call_done(const terrace_call* call);
void terrace_call_cancel(terrace_call* call);
void terrace_call_free(terrace_call* call); /* Leases and room that it holds end with it. May be null. */

/* Of one item: TERRACE_HIT, ..., or TERRACE_PENDING. */
int terrace_call_outcome(const terrace_call* call, size_t index);
const char* terrace_call_reason(const terrace_call* call, size_t index); /* "not_found", ...; "" while it is pending. */
/* Of a lookup: keys known. Of any other call: 0. */
size_t terrace_call_count(const terrace_call* call);
/* Of a lease: its bytes, to be read. Of terrace_begin_save: room, to be written. Null for what is neither. */
void* terrace_call_bytes(const terrace_call* call, size_t index);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TERRACE_CLIENT_C_H_ */
