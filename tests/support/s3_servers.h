// Real S3 servers in processes of their own, for one test program: versitygw (strict) and SeaweedFS (an unrelated
// second opinion), over plain HTTP or TLS with a CA made on the spot. Started when first asked for, on free ports, with
// their data in a folder of their own; they end with the program. The binaries come from scripts/setup (VERSITYGW, WEED
// in the environment).
#pragma once

#include <cstdint>
#include <string>

#include "s3/client.h"

namespace terrace {

class S3Server {
 public:
  enum class Kind : uint8_t { kVersitygw, kSeaweedfs };
  // The only one of its kind in this process.
  static S3Server& Get(Kind kind, bool tls);

  S3Server(const S3Server&) = delete;
  S3Server& operator=(const S3Server&) = delete;
  ~S3Server();

  uint16_t port() const { return port_; }
  int pid() const { return pid_; }
  bool tls() const { return tls_; }
  const std::string& ca_file() const { return ca_file_; }  // Of its certificate; "" without TLS.

  static constexpr const char* kBucket = "kv-cache";
  static constexpr const char* kAccessKey = "TERRACEACCESSKEY";
  static constexpr const char* kSecretKey = "terrace-test-secret-key";
  // For a client of bucket kBucket, below `prefix`: path style, or virtual-hosted by way of s3.localhost.
  s3::ClientOptions Client(const std::string& prefix, s3::Style style) const;

 private:
  S3Server(Kind kind, bool tls);
  void MakeCertificate();
  void Start();
  void WaitUntilItServes();

  const Kind kind_;
  const bool tls_;
  std::string directory_;
  std::string ca_file_;
  uint16_t port_ = 0;
  int pid_ = -1;
};

}  // namespace terrace
