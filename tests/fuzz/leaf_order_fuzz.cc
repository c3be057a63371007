// Parents are what headers of others say: whatever shape they have, everything can go, once.
#include <cstddef>
#include <cstdint>
#include <set>

#include "base/assert.h"
#include "tier/leaf_order.h"

namespace {

terrace::Digest Key(uint8_t n) {
  terrace::Digest key;
  key.bytes[0] = n;
  return key;
}

}  // namespace

// Three bytes a step: what is done, to which chunk, with which parent.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  terrace::LeafOrder order;
  std::set<terrace::Digest> here;
  for (size_t at = 0; at + 3 <= size; at += 3) {
    const terrace::Digest key = Key(data[at + 1]);
    switch (data[at] % 4) {
      case 0:
      case 1:
        order.Add(key, Key(data[at + 2]), data[at + 2]);
        here.insert(key);
        break;
      case 2:
        order.Remove(key);
        here.erase(key);
        break;
      default: order.Use(key, data[at + 2]);
    }
    if (data[at] >= 128) TERRACE_ASSERT(order.Oldest().has_value() == !here.empty());
  }
  while (const auto next = order.Oldest()) {
    TERRACE_ASSERT(here.erase(next->key) == 1);
    order.Remove(next->key);
  }
  TERRACE_ASSERT(here.empty());
  return 0;
}
