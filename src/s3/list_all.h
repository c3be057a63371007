// Goes through every object below a prefix, a page after the other. A listing that goes in circles, or has no end, is a
// failure and no loop.
#pragma once

#include <functional>
#include <string>

#include "s3/object_store.h"

namespace terrace::s3 {

// More pages than these have a bucket of 100 million objects; a server that shows more has no end.
inline constexpr size_t kListPagesMax = 100'000;

// On the store's thread, which `page` and `done` run on, too: `page` for each page in order, then `done` once, with the
// server's time by the last page (0: it did not say). The store outlives the listing.
void ListAll(ObjectStore& store, const std::string& prefix, std::function<void(const ListPage&)> page,
             std::function<void(const Failure&, int64_t now)> done);

}  // namespace terrace::s3
