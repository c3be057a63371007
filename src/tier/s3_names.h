// Names of frames in a bucket: PREFIX/frames/<3 hex>/<64 hex>.kvf, as in a shared directory.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "s3/check.h"
#include "terrace/key.h"

namespace terrace {

class S3Names {
 public:
  explicit S3Names(const s3::Endpoint& endpoint) : root_(s3::WithPrefix(endpoint, "frames/")) {}

  const std::string& root() const { return root_; }

  // The first 12 bits once more: names of one directory stay few for gateways that keep objects as files.
  std::string Of(const Digest& key) const {
    const std::string hex = key.Hex();
    return root_ + hex.substr(0, 3) + "/" + hex + std::string(kSuffix);
  }
  // Nothing, if it is another object's.
  std::optional<Digest> KeyOf(const std::string& name) const {
    constexpr size_t kHex = 64;
    if (!name.starts_with(root_) || name.size() != root_.size() + 4 + kHex + kSuffix.size()) return std::nullopt;
    std::optional<Digest> key = Digest::FromHex(std::string_view(name).substr(root_.size() + 4, kHex));
    if (key && Of(*key) != name) key.reset();
    return key;
  }

 private:
  static constexpr std::string_view kSuffix = ".kvf";
  const std::string root_;
};

}  // namespace terrace
