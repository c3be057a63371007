#include "s3/list_all.h"

#include <memory>
#include <unordered_set>
#include <utility>

namespace terrace::s3 {
namespace {

constexpr size_t kPage = 1000;

struct Listing {
  ObjectStore& store;
  std::string prefix;
  std::function<void(const ListPage&)> page;
  std::function<void(const Failure&, int64_t now)> done;
  // Hashes of the tokens so far: none comes twice. Two tokens of one hash are a failure of one listing in 10^9.
  std::unordered_set<size_t> tokens = {};
};

void Next(const std::shared_ptr<Listing>& listing, const std::string& token) {
  listing->store.List({.prefix = listing->prefix, .token = token, .limit = kPage},
                      [listing](const Failure& failure, const ListPage& page) {
                        if (failure) return listing->done(failure, 0);
                        listing->page(page);
                        if (page.next.empty()) return listing->done({}, page.now);
                        const bool fresh = listing->tokens.insert(std::hash<std::string>{}(page.next)).second;
                        if (fresh && listing->tokens.size() < kListPagesMax) return Next(listing, page.next);
                        listing->done({.trouble = Trouble::kNoS3, .message = "a list without an end"}, 0);
                      });
}

}  // namespace

void ListAll(ObjectStore& store, const std::string& prefix, std::function<void(const ListPage&)> page,
             std::function<void(const Failure&, int64_t now)> done) {
  Next(std::make_shared<Listing>(Listing{store, prefix, std::move(page), std::move(done)}), "");
}

}  // namespace terrace::s3
